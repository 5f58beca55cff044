"""The sound part of a configuration to domain values and a route table, with everything that only shows when parts are put together.

Rule: a reference to something that is declared but broken is not reported: its own problem is.
"""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from din_extproc.control.topology import RESERVED_CLUSTERS, SocketAddress
from din_extproc.domain.node import Endpoint, Pool
from din_extproc.domain.request import Operation
from din_extproc.domain.tenant import ApiKey, OnSensitive, Tenant
from din_extproc.route.compile import compile_routes
from din_extproc.route.flaw import Flaw, did_you_mean
from din_extproc.route.table import RouteTable
from din_extproc.screen.kinds import BUILT_IN
from din_extproc.settings.budgets import unknown_names
from din_extproc.settings.catalog import Catalog
from din_extproc.settings.discovered import make_discovery
from din_extproc.settings.document import Document
from din_extproc.settings.keys import OWN_KEY
from din_extproc.settings.operations import make_operations_table
from din_extproc.settings.pools import make_adapters, make_nodes, make_operations, make_requirements, resolve_api
from din_extproc.settings.problems import Place
from din_extproc.settings.sensitive import SensitiveDataSection
from din_extproc.settings.shape import ShapedConfig
from din_extproc.settings.tenants import TenantPolicySection
from din_extproc.southbound.engines import find_engine

_DECISION_MS = 1000
"""Between the end of a wait and the moment when Envoy gives up."""


class AssembledConfig(Struct, frozen=True):
    """The domain's values. Complete only when no problem was reported."""

    pools: tuple[Pool, ...]
    tenants: tuple[Tenant, ...]
    keys: tuple[tuple[Tenant, tuple[ApiKey, ...]], ...]
    routes: RouteTable | None
    operations: Mapping[str, Operation]
    """Every operation by path."""


def assemble(shaped: ShapedConfig, catalog: Catalog | None, document: Document, keyed: frozenset[str] = frozenset()) -> AssembledConfig:
    """Put the parts together and report what does not fit.

    Args:
        shaped: The sound parts.
        catalog: None: there is one, but it could not be read.
        document: Where to report.
        keyed: Tenants whose keys are elsewhere.
    """
    config = shaped.config
    operations = make_operations_table(config.operations, document, config.envoy.health_paths)
    pools = tuple(_make_pools(shaped, catalog, operations, document))
    tenants = tuple(tenant.to_tenant(config.defaults) for tenant in config.tenants)
    keys = tuple((tenant, tuple(key.to_key() for key in section.keys)) for tenant, section in zip(tenants, config.tenants, strict=True))
    aliases, rules = [alias.alias(name) for name, alias in config.aliases.items()], [rule.rule() for rule in config.rules]
    compiled = compile_routes(pools, aliases, rules, tenants, operations)
    for flaw in compiled.flaws:
        _report_flaw(flaw, shaped, document)
    _report_duplicate_ids(shaped, document)
    _report_unused(shaped, document, keyed)
    _report_kinds(shaped, document)
    if not {"identity", "envoy"} & shaped.broken:
        _report_identities(shaped, document)
    _report_cycles(shaped, document)
    _report_waits(shaped, document)
    _report_timeouts(shaped, document)
    _report_ports(shaped, document)
    _report_budgets(shaped, pools, document)
    if "pools" not in shaped.broken:
        _report_models(shaped, pools, document)
        _report_stuck(shaped, {pool.name: pool for pool in pools}, document)
        if not config.store.one_script:
            _report_scattered_counters(shaped, document)
        if config.fail_open is not None and config.fail_open.pool not in config.pools:
            document.report(
                ("fail_open", "pool"), f"no pool is called {config.fail_open.pool!r}", did_you_mean(config.fail_open.pool, config.pools)
            )
    return AssembledConfig(pools, tenants, keys, compiled.table, operations)


def _report_scattered_counters(shaped: ShapedConfig, document: Document) -> None:
    """Report what all tenants share while the counters of each tenant lie on a master of their own."""
    hint = "set `store.one_slot: true`: then all counters are on one master"
    if shaped.config.limits.any:
        document.report(("limits",), "in a Redis Cluster, limits of all tenants together can't be counted with each tenant's", hint)
    for name, pool in shaped.config.pools.items():
        if pool.long_tail is not None:
            document.report(("pools", name, "long_tail"), "in a Redis Cluster, slots can't be counted with each tenant's limits", hint)


def _make_pools(shaped: ShapedConfig, catalog: Catalog | None, operations: Mapping[str, Operation], document: Document) -> Iterable[Pool]:
    for name, pool in shaped.config.pools.items():
        if name in RESERVED_CLUSTERS:
            document.report(("pools", name), f"{name!r} is a cluster of the gateway itself", "call the pool something else", at_key=True)
        if pool.discover is not None and shaped.config.gateway.xds is None:
            hint = "give `gateway.xds` and render Envoy's configuration with `--xds`: a static one has the listed nodes alone"
            document.report(("pools", name, "discover"), "Envoy gets the nodes that are found by xDS only", hint)
        if not pool.nodes and pool.discover is None and shaped.config.gateway.registry is None:
            hint = "list nodes, let them be found (`discover`), or let them register (`gateway.registry`)"
            document.report(("pools", name), "no node: nothing can be sent there", hint, at_key=True)
        nodes = make_nodes(name, pool, catalog, document)
        discover = make_discovery(name, pool, catalog, document)
        kind = make_requirements(name, pool, (*nodes, *(() if discover is None else (discover.template,))), document)
        yield Pool(
            name=name,
            model=pool.model,
            served_model=pool.served_model or pool.model,
            engine=pool.engine,
            scheduler=pool.scheduler.name,
            scheduler_options=pool.scheduler.options,
            long_tail=None if pool.long_tail is None else pool.long_tail.long_tail(),
            timeouts=pool.timeouts.to_timeouts(),
            traffic=pool.traffic,
            nodes=nodes,
            discover=discover,
            operations=make_operations(name, pool, operations, document),
            api=resolve_api(pool),
            unmappable=pool.unmappable,
            stream_usage=find_engine(pool.engine).stream_usage if pool.stream_usage is None else pool.stream_usage,
            priority_scheduling=pool.priority_scheduling,
            sensitive_data=pool.sensitive_data.sensitive_data(),
            dtype=kind.dtype,
            tp_world_size=kind.tp_world_size,
            compute_capability=kind.compute_capability,
            min_seq_len=pool.min_seq_len,
            adapters=make_adapters(name, pool, document),
        )


def _report_flaw(flaw: Flaw, shaped: ShapedConfig, document: Document) -> None:
    if flaw.missing is not None:
        kind, name = flaw.missing
        sections = {"pools", "aliases"} if kind == "models" else {kind}
        if sections & shaped.broken and (kind == "models" or declares(document.data.get(kind), name)):
            return
    document.report(_get_file_place(flaw.place, shaped), flaw.message, flaw.hint, warning=flaw.warning)


def declares(section: object, name: str) -> bool:
    """Whether a broken section has the name; one that is no section at all might have had any."""
    if isinstance(section, dict):
        return name in section
    return not isinstance(section, list) or any(isinstance(item, dict) and item.get("id") == name for item in section)


def _get_file_place(place: Place, shaped: ShapedConfig) -> Place:
    """A place among the sound items, as a place in the file."""
    section, index, *rest = place
    where = {"rules": shaped.rules, "tenants": shaped.tenants}.get(str(section))
    return place if where is None or not isinstance(index, int) else (section, where[index], *rest)


def _report_duplicate_ids(shaped: ShapedConfig, document: Document) -> None:
    """Names that must be one of a kind in the whole file: nodes, tenants, keys. Those of rules are checked with the routes."""
    config = shaped.config
    nodes = [(node.id, ("pools", name, "nodes", at, "id")) for name, pool in config.pools.items() for at, node in enumerate(pool.nodes)]
    tenants = [(tenant.id, ("tenants", at, "id")) for at, tenant in zip(shaped.tenants, config.tenants, strict=True)]
    keys = [
        (key.id, ("tenants", at, "keys", index, "id"))
        for at, tenant in zip(shaped.tenants, config.tenants, strict=True)
        for index, key in enumerate(tenant.keys)
    ]
    for kind, named in (("node", nodes), ("tenant", tenants), ("key", keys)):
        first: dict[str, Place] = {}
        for name, place in named:
            if first.setdefault(name, place) != place:
                line = document.values[first[name]].line
                document.report(place, f"a second {kind} is called {name!r}, the first on line {line}", "give each its own id")
    _report_shared_keys(shaped, document)


def _report_shared_keys(shaped: ShapedConfig, document: Document) -> None:
    """A hash that stands twice is one secret with two owners: whose its requests are would depend on the order of the file."""
    first: dict[str, tuple[str, str, Place]] = {}
    for at, tenant in zip(shaped.tenants, shaped.config.tenants, strict=True):
        for index, key in enumerate(tenant.keys):
            place = ("tenants", at, "keys", index, "hash")
            owner, name, before = first.setdefault(key.hash, (tenant.id, key.id, place))
            if before != place:
                line = document.values[before].line
                document.report(place, f"it is also the hash of key {name!r} of tenant {owner!r}, on line {line}", OWN_KEY)


def _report_unused(shaped: ShapedConfig, document: Document, keyed: frozenset[str]) -> None:
    data = document.data
    needed = [] if shaped.config.identity.tenant_defaults else [("tenants", "no tenant: nobody can send a request")]
    if shaped.config.gateway.ext_authz is None:
        needed.insert(0, ("pools", "no pool: there is nowhere to send a request"))
    else:
        for name, pool in shaped.config.pools.items():
            if pool.sensitive_data.policy is not OnSensitive.OFF:
                message = f"pool {name!r}: a proxy that asks by ext_authz chooses the node, so this policy does not apply to its requests"
                document.report(("pools", name, "sensitive_data"), message, "give tenants the policy, too", warning=True)
    for section, message in needed:
        if section not in shaped.broken and not data.get(section):
            document.report((section,), message)
    for at, tenant in zip(shaped.tenants, shaped.config.tenants, strict=True):
        if not tenant.keys and tenant.id not in keyed and not shaped.config.identity.any:
            hint = "make one with `din-extproc keys new`"
            document.report(("tenants", at), f"tenant {tenant.id!r} has no key: nobody can use it", hint, warning=True)


def _policies(shaped: ShapedConfig) -> Iterator[tuple[Place, TenantPolicySection]]:
    """Yield what tenants may do, with its place: those that are listed, then the one of those that are not."""
    for at, tenant in zip(shaped.tenants, shaped.config.tenants, strict=True):
        yield ("tenants", at), tenant
    if shaped.config.identity.tenant_defaults is not None:
        yield ("identity", "tenant_defaults"), shaped.config.identity.tenant_defaults


def _report_identities(shaped: ShapedConfig, document: Document) -> None:
    """Report unknown tenants of certificates, and certificates that Envoy does not ask for."""
    config = shaped.config
    known = [tenant.id for tenant in config.tenants]
    open_ended = config.identity.tenant_defaults is not None or "tenants" in shaped.broken
    for at, rule in enumerate(config.identity.certificates):
        if rule.tenant is not None and rule.tenant not in known and not open_ended:
            place: Place = ("identity", "certificates", at, "tenant")
            document.report(place, f"no tenant is called {rule.tenant!r}", did_you_mean(rule.tenant, known))
    gateway = config.identity.gateway
    direct = bool(config.identity.certificates) and not (gateway is not None and gateway.client_certificate)
    has_client_ca = config.envoy.tls is not None and config.envoy.tls.client_ca is not None
    if (direct or (gateway is not None and gateway.certificates)) and not has_client_ca and config.gateway.reached_at is None:
        message = "Envoy asks no client for a certificate, so it can verify none"
        document.report(("identity",), message, "give `envoy.tls` with a `client_ca`", warning=True)


def _report_models(shaped: ShapedConfig, pools: tuple[Pool, ...], document: Document) -> None:
    """`per_model` counts per physical model, so that an alias is no way around it."""
    models = sorted({model for pool in pools for model in pool.models})
    places: list[Place] = [("limits", "per_model", name) for name in shaped.config.limits.per_model]
    for place, policy in _policies(shaped):
        places += [(*place, "limits", "per_model", name) for name in policy.limits.per_model]
    for place in places:
        name = str(place[-1])
        if name in shaped.config.aliases:
            document.report(place, f"{name!r} is an alias", f"limits count per physical model: {', '.join(models)}", at_key=True)
        elif models and name not in models:
            document.report(place, f"no pool serves a model {name!r}", did_you_mean(name, models), at_key=True)


def _report_budgets(shaped: ShapedConfig, pools: tuple[Pool, ...], document: Document) -> None:
    """Budgets of tenants and models that there are not would never be charged; those of money need prices."""
    config = shaped.config
    known = {
        "tenant": ("tenants", {tenant.id for tenant in config.tenants}),
        "model": ("pools", {model for pool in pools for model in pool.models}),
    }
    if config.identity.tenant_defaults is not None:
        del known["tenant"]
    whole = {field: frozenset(names) for field, (section, names) in known.items() if section not in shaped.broken}
    for index, field, value in unknown_names(config.budgets, whole):
        document.report(("budgets", "limits", index, field), f"there is no {field} {value!r}", did_you_mean(value, whole[field]))
    for index, budget in enumerate(config.budgets.limits):
        place: Place = ("budgets", "limits", index)
        if budget.money is not None and config.prices is None and "prices" not in shaped.broken:
            document.report((*place, "money"), "without prices, requests have no cost", "give `prices`")
        if not budget.tenant and not config.store.one_script:
            hint = "set `store.one_slot: true`: then all counters are on one master"
            document.report(place, "in a Redis Cluster, a budget of all tenants together can't be counted with each tenant's limits", hint)


def _report_stuck(shaped: ShapedConfig, pools: dict[str, Pool], document: Document) -> None:
    """Rules whose requests get an error, not the fallback, while their pool fails and no breaker has opened yet."""
    retry = shaped.config.envoy.retry
    for at, rule in zip(shaped.rules, shaped.config.rules, strict=True):
        pool, fallback = pools.get(rule.pool), pools.get(rule.fallback or "")
        if pool is None or fallback is None or pool is fallback:
            continue
        addresses = {node.endpoint for node in fallback.nodes}
        why, hint = "", ""
        if not retry.to_fallback:
            why, hint = "`envoy.retry.to_fallback` is off", "leave it on: then Envoy tries a node of the fallback itself"
        elif addresses and addresses <= {node.endpoint for node in pool.nodes}:
            why = f"each node of {fallback.name!r} is at an address of {pool.name!r}, and one address is not asked twice"
            hint = "a fallback on machines of its own"
        if why:
            document.report(("rules", at, "fallback"), f"no request moves there in flight: {why}", hint, warning=True)


def _report_kinds(shaped: ShapedConfig, document: Document) -> None:
    """Kinds of sensitive data that a policy names must exist."""
    config = shaped.config
    known = [*BUILT_IN, *config.sensitive_data.patterns]
    policies: list[tuple[Place, SensitiveDataSection | None]] = [(("defaults",), config.defaults.sensitive_data)]
    policies += [(place, policy.sensitive_data) for place, policy in _policies(shaped)]
    policies += [(("pools", name), pool.sensitive_data) for name, pool in config.pools.items()]
    for place, policy in policies if "sensitive_data" not in shaped.broken else ():
        for index, kind in enumerate(() if policy is None else policy.kinds or ()):
            if kind not in known:
                hint = did_you_mean(kind, known) or f"there are: {', '.join(known)}"
                document.report((*place, "sensitive_data", "kinds", index), f"no kind of sensitive data is called {kind!r}", hint)


def _report_cycles(shaped: ShapedConfig, document: Document) -> None:
    """A node at Envoy's own listener: each of its requests would be one more."""
    config, listener = shaped.config, shaped.config.envoy.listener
    if "envoy" in shaped.broken:
        return
    for name, pool in config.pools.items():
        for index, node in enumerate(pool.nodes):
            if node.address is None:
                continue
            host, port = node.address.host, node.address.port
            here = host == listener.host or (listener.host in {"0.0.0.0", "::"} and SocketAddress(host, port).is_loopback)
            if here and port == listener.port:
                place = ("pools", name, "nodes", index, "address")
                document.report(place, "here Envoy itself listens (`envoy.listener`)", "give the engine's address, or Envoy another port")


def _report_waits(shaped: ShapedConfig, document: Document) -> None:
    """Envoy gives up an answer of the sidecar after `message_ms`: no request may wait that long."""
    config = shaped.config
    longest = config.envoy.timeouts.message_ms - _DECISION_MS
    waits: list[tuple[int, Place]] = [(config.defaults.queue.max_wait_ms, ("defaults", "queue", "max_wait_ms"))]
    waits += [(policy.queue.max_wait_ms, (*place, "queue", "max_wait_ms")) for place, policy in _policies(shaped)]
    for max_wait_ms, place in waits:
        if max_wait_ms > max(0, longest):
            hint = f"at most {max(0, longest)}, or a longer `envoy.timeouts.message_ms`"
            document.report(place, f"Envoy gives up after {config.envoy.timeouts.message_ms} ms, a second before at the latest", hint)


def _report_timeouts(shaped: ShapedConfig, document: Document) -> None:
    """While Redis does not answer, a decision takes as long as Redis is waited for: Envoy must wait longer."""
    if {"store", "envoy"} & shaped.broken:
        return
    redis, message = shaped.config.store.timeout_ms, shaped.config.envoy.timeouts.message_ms
    if redis >= message:
        place: Place = ("store", "timeout_ms")
        if place not in document.values:
            place = ("envoy", "timeouts", "message_ms")
        hint = f"`envoy.timeouts.message_ms` of at least {2 * redis}, or a shorter `store.timeout_ms`"
        document.report(
            place, f"Redis is waited for {redis} ms, and Envoy gives up after {message} ms: no request would outlast a slow Redis", hint
        )


def _report_ports(shaped: ShapedConfig, document: Document) -> None:
    """Envoy and the sidecar on one machine can't both listen at one address. Those within a section are compared there."""
    config = shaped.config
    gateway, envoy = config.gateway, config.envoy
    if {"gateway", "envoy"} & shaped.broken or gateway.reached_at is not None:
        return
    own: list[tuple[str, Endpoint | None]] = [
        ("ext_proc.address", gateway.ext_proc.address),
        ("access_log.address", gateway.access_log.address),
        ("admin.address", gateway.admin.address),
        ("xds.address", None if gateway.xds is None else gateway.xds.address),
        ("registry.address", None if gateway.registry is None else gateway.registry.address),
        ("registry.http_address", None if gateway.registry is None else gateway.registry.http_address),
    ]
    for name, taken in (("listener", envoy.listener), ("admin", envoy.admin)):
        for ours, address in own:
            if address is not None and _overlap(taken, address):
                place: Place = ("envoy", name)
                if place not in document.values:
                    place = ("gateway", *ours.split("."))
                message = f"`envoy.{name}` and `gateway.{ours}` can't both be {taken if taken == address else f'{taken} and {address}'}"
                document.report(place, message, "give each a port of its own")


def _overlap(one: Endpoint, other: Endpoint) -> bool:
    """Whether only one of two can listen."""
    hosts = {one.host, other.host}
    return one.port == other.port and (len(hosts) == 1 or ("0.0.0.0" in hosts and not any(":" in host for host in hosts)) or "::" in hosts)
