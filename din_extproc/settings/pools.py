"""Pools and their nodes, as written and as the domain knows them.

Rule: nodes of one pool that differ in dtype or tensor-parallel size are kept apart; in compute capability they agree.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct
from pydantic import BeforeValidator, Field

from din_extproc.domain.identity import SYSTEM_CA
from din_extproc.domain.node import NO_ADAPTERS, Adapters, InternalEndpoint, LongTail, Node, PoolTimeouts, TrafficClass, meets_capability
from din_extproc.domain.request import COUNTING, GENERATING, POOLING, TOKENIZING, TRANSCRIBING, Operation
from din_extproc.domain.tenant import OnSensitive
from din_extproc.route.flaw import did_you_mean
from din_extproc.schedule.pick import STRATEGIES
from din_extproc.settings.catalog import Catalog, VersionText
from din_extproc.settings.discover import DiscoverSection
from din_extproc.settings.document import Document
from din_extproc.settings.operations import PoolEngine
from din_extproc.settings.problems import Place
from din_extproc.settings.remote import REMOTE_ENGINES, ApiUrl, CredentialSection, HeaderName, make_remote
from din_extproc.settings.section import AsTuple, ModelName, Name, NodeAddress, Positive, Section, Text, one_or_many
from din_extproc.settings.sensitive import SensitiveDataPolicy, SensitiveDataSection
from din_extproc.southbound.engines import native_operations, openai_operations
from din_extproc.southbound.load import ADAPTER_ENGINES

_KINDS = {"generate": GENERATING | COUNTING | TOKENIZING, "pooling": POOLING | TOKENIZING, "transcribe": TRANSCRIBING}


def _pool_operations(value: object) -> object:
    """Paths, or a word for all paths of one kind of model; the words are replaced by their paths."""
    given = one_or_many(value)
    if not isinstance(given, (list, tuple)):
        return given
    return tuple(path for each in given for path in (sorted(_KINDS[each]) if isinstance(each, str) and each in _KINDS else [each]))


PoolOperations = Annotated[tuple[Text, ...], BeforeValidator(_pool_operations)]


class PoolNodeSection(Section):
    """One engine instance, or one account of a remote API. What is left out comes from the model's catalogue entry."""

    id: Name
    address: NodeAddress | None = None
    """Of an engine in the gateway's network."""
    url: ApiUrl | None = None
    """Of a remote API (`engine: openai`, `azure_openai`, `anthropic`): its base URL as SDKs take it, such as `https://api.openai.com/v1`."""
    credential: CredentialSection | None = None
    """With `url`: where the API's key is. Envoy adds it; the sidecar, clients and logs never see it."""
    ca: Text = SYSTEM_CA
    """With `url`: the PEM file of the authorities that Envoy trusts; the default is the operating system's bundle."""
    headers: Mapping[HeaderName, Text] = Field(default_factory=dict)
    """With `url`: sent with every request, such as `OpenAI-Project`. No credentials."""
    api_version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")] | None = None
    """With `url`: sent as the query parameter `api-version`, which Azure's deployment paths need."""
    version: VersionText | None = None
    dtype: Name | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    """Such as '9.0'; None: not known, or no such thing."""
    tp_world_size: Positive | None = None
    max_seq_len: Positive | None = None
    max_concurrency: Positive = 64


class SchedulerSection(Struct, frozen=True):
    """A strategy's name and its own options."""

    name: str
    options: dict[str, float] = {}


def _read_scheduler(value: object) -> object:
    """`token_available`, or with options `{name: latency_ewma, half_life_s: 30}`."""
    if isinstance(value, SchedulerSection):
        return value
    options: dict[str, Any] = dict(value) if isinstance(value, dict) else {"name": value}
    name = options.pop("name", None)
    kind = STRATEGIES.get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(name, str):
        raise ValueError(f"{name!r} is not a scheduler: {', '.join(STRATEGIES)}")
    try:
        msgspec.convert(options, kind.options)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.options.__struct_fields__) or "none"
        raise ValueError(f"{_find_option(str(error))}; the options of {name} are: {known}") from None
    return SchedulerSection(name, options)


def _find_option(message: str) -> str:
    """The message of msgspec with the option's name in front."""
    what, _, where = message.partition(" - at `$.")
    return f"{where.rstrip('`')}: {what}" if where else what


class LongTailSection(Section):
    """Scheduling of requests that take far longer than the others."""

    over_s: Annotated[float, Field(gt=0, le=86_400)]
    """They would take longer than this at a usual node that is not busy."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Of each node's `max_concurrency`: so many slots they may hold, over all workers and replicas."""
    timeout_s: Annotated[float, Field(ge=0.001, le=86_400)]
    """How long their answers may take."""

    def long_tail(self) -> LongTail:
        """As the scheduler takes it."""
        return LongTail(over_s=self.over_s, share=self.share, timeout_ms=round(self.timeout_s * 1000))


class PoolTimeoutsSection(Section):
    """How long the answers of a pool's nodes may take."""

    first_byte_s: Annotated[float, Field(ge=0.001, le=86_400)] | None = 60.0
    """Until a stream, or an answer that is not generated, begins; then another node is asked."""
    total_s: Annotated[float, Field(ge=0.001, le=86_400)] | None = None
    """The whole answer, of requests that are not of the long tail."""

    def to_timeouts(self) -> PoolTimeouts:
        """In Envoy's unit."""
        return PoolTimeouts(*(None if limit is None else round(limit * 1000) for limit in (self.first_byte_s, self.total_s)))


class AdaptersSection(Section):
    """The adapters (LoRA) of a pool's model, which its engines (vLLM, SGLang) load beside it."""

    names: Annotated[tuple[ModelName, ...], AsTuple, Field(min_length=1, max_length=1024)]
    """The engines' names for them. Each is a model of its own to clients, aliases, tenants, limits and metrics."""
    slots: Positive = Adapters(()).slots
    """How many a node can have loaded at once (vLLM's `--max-loras`), unless its engine reports the number."""
    spread: Annotated[float, Field(gt=0, le=1)] = Adapters(()).spread
    """The part of its `max_concurrency` by which a node that has the adapter may be busier than another, before the other one loads it."""

    def to_adapters(self) -> Adapters:
        """As the scheduler takes them."""
        return Adapters(names=tuple(dict.fromkeys(self.names)), slots=self.slots, spread=self.spread)


def make_adapters(name: str, pool: "PoolSection", document: Document) -> Adapters:
    """The pool's adapters. Reports them for an engine that has none, in its OpenAI interface.

    Args:
        name: The pool's.
        pool: As written.
        document: Where problems go.
    """
    if pool.adapters is None:
        return NO_ADAPTERS
    if pool.engine not in ADAPTER_ENGINES:
        hint = f"remove `adapters`; engines with adapters are {', '.join(sorted(ADAPTER_ENGINES))}"
        document.report(("pools", name, "adapters"), f"{pool.engine} chooses no adapter by the model's name", hint)
    return pool.adapters.to_adapters()


def _read_traffic(text: object) -> object:
    """A kind of traffic by its name."""
    known = [kind.value for kind in TrafficClass]
    if not isinstance(text, str) or text not in known:
        raise ValueError(f"{text!r} is no kind of traffic: {', '.join(known)}")
    return TrafficClass(text)


class PoolSection(Section):
    """One pool, which is also one Envoy cluster."""

    model: ModelName
    served_model: Text | None = None
    """The name that the engine answers to, when it is not the model's."""
    engine: PoolEngine
    scheduler: Annotated[SchedulerSection, BeforeValidator(_read_scheduler)] = SchedulerSection("token_available")
    long_tail: LongTailSection | None = None
    """None: every request is like the others."""
    timeouts: PoolTimeoutsSection = PoolTimeoutsSection()
    traffic: Annotated[TrafficClass, BeforeValidator(_read_traffic)] = TrafficClass.STANDARD
    """How soon a node counts as failed: see `health.failover_threshold`."""
    operations: PoolOperations | None = None
    """Paths; or `generate` for what models that generate text are asked for, `pooling` for what embedding and ranking models are,
    `transcribe` for what models that listen are, as far as the engine has it. None: every operation that the engine has."""
    api: Literal["openai", "native"] | None = None
    """API that the engine is called by: OpenAI's, or its own (Ollama, TGI, Triton, Anthropic). None: OpenAI's, if it has it."""
    unmappable: Literal["refuse", "drop"] = "refuse"
    """Treatment of a parameter that the engine does not support."""
    stream_usage: bool | None = None
    """The engine honours `stream_options.include_usage`. None: by the engine, which is no for TGI and Triton, some of which refuse it."""
    sensitive_data: SensitiveDataPolicy = SensitiveDataSection(policy=OnSensitive.OFF)
    """Policy for sensitive data in prompts to this pool, also of in-flight fallback, in addition to the tenant's policy."""
    priority_scheduling: bool = False
    """The engine (vLLM, SGLang) schedules by `priority`: it is set from the request's class. A client's own is removed in any case."""
    dtype: Name | None = None
    """Of its nodes, those that register too; None: any, and nodes of different ones are kept apart."""
    tp_world_size: Positive | None = None
    """Likewise."""
    compute_capability: Annotated[str, Field(pattern=r"^(>=)?[0-9]{1,2}\.[0-9]$")] | None = None
    """Of its nodes, exactly (`"9.0"`) or at least (`">=8.0"`); None: that of the listed ones, without any: every one."""
    min_seq_len: Annotated[int, Field(ge=0)] = 0
    """Nodes that register take at least so many tokens."""
    adapters: AdaptersSection | None = None
    """None: the model alone."""
    nodes: Annotated[tuple[PoolNodeSection, ...], AsTuple] = ()
    """Those that do not register."""
    discover: DiscoverSection | None = None
    """Where further nodes are found. It needs `gateway.xds`, by which Envoy gets them."""


def make_nodes(name: str, pool: PoolSection, catalog: Catalog | None, document: Document) -> tuple[Node, ...]:
    """The pool's nodes with the catalogue's values filled in. What can't be filled in is reported.

    Args:
        name: The pool's.
        pool: As written.
        catalog: None when there is one that could not be read: then nothing is missed.
        document: Where problems go.
    """
    nodes = [make_node(pool, node, catalog, document, ("pools", name, "nodes", index)) for index, node in enumerate(pool.nodes)]
    made = tuple(node for node in nodes if node is not None)
    _report_duplicate_nodes(name, pool, document)
    if len(made) == len(pool.nodes):
        _report_mixed_dtypes(name, pool, made, document)
    return made


def resolve_api(pool: PoolSection) -> Literal["openai", "native"]:
    """The interface in which the pool's engine is asked: as the pool says, else OpenAI's where the engine has it."""
    return pool.api or ("native" if openai_operations(pool.engine) == frozenset() else "openai")


def make_operations(name: str, pool: PoolSection, known: Mapping[str, Operation], document: Document) -> frozenset[Operation] | None:
    """Return the pool's operations: those that it names, limited to the interface of its engine that `api` chooses.

    Args:
        name: The pool's.
        pool: As written.
        known: Every operation by path.
        document: Where problems go.
    """
    native, in_openai = native_operations(pool.engine), openai_operations(pool.engine)
    if in_openai is not None:
        in_openai |= {operation for operation in known.values() if pool.engine in operation.spec.engines}
    if pool.api == "openai" and in_openai == frozenset():
        document.report(("pools", name, "api"), f"{pool.engine} has no OpenAI interface", "leave `api` out: it speaks its own words")
    api = resolve_api(pool)
    if pool.api == "native" and native is None:
        document.report(("pools", name, "api"), f"{pool.engine} has no interface of its own", "leave `api` out: it speaks OpenAI's words")
    served = in_openai if api == "openai" else native
    if pool.operations is None:
        return served
    given = frozenset(known[path] for path in pool.operations if known.get(path) == path != Operation.MODELS)
    named = one_or_many(document.data["pools"][name]["operations"])
    for index, path in enumerate(named):
        if path not in _KINDS and path not in given:
            routed = ", ".join(dict.fromkeys(operation for operation in known.values() if operation is not Operation.MODELS))
            message = f"{path!r} is not a path that is routed: {routed}"
            document.report(("pools", name, "operations", index), message, did_you_mean(path, known))
    if served is None:
        return given
    others = (native if api == "openai" else in_openai) or frozenset()
    for operation in sorted(given - served):
        if operation in named:
            interface = "natively" if api == "native" else "in its OpenAI interface"
            hint = f"it has {', '.join(sorted(served))}"
            if operation in others:
                hint = f"it has it with `api: {'native' if api == 'openai' else 'openai'}`"
            document.report(("pools", name, "operations"), f"{pool.engine} does not have {operation.value} {interface}", hint)
    return given & served


class NodeRequirements(Struct, frozen=True):
    """Properties that all nodes of a pool share."""

    dtype: str
    tp_world_size: int
    compute_capability: str


def make_requirements(name: str, pool: PoolSection, nodes: tuple[Node, ...], document: Document) -> NodeRequirements:
    """Return the requirements for a node to join. A dtype or size that the pool does not name is any, and kinds are kept apart.

    Args:
        name: The pool's.
        pool: As written.
        nodes: Its listed ones.
        document: Where problems go.
    """
    first = nodes[0] if nodes else None
    dtype, size = pool.dtype or "", pool.tp_world_size or 0
    for field, wanted in (("dtype", dtype), ("tp_world_size", size)):
        other = next((node for node in nodes if wanted and getattr(node, field) != wanted), None)
        if other is not None:
            document.report(("pools", name, field), f"node {other.id!r} of this pool has {field} {getattr(other, field)}")
    capability = pool.compute_capability or (first.compute_capability if first is not None else "")
    for node in nodes if pool.compute_capability is not None else ():
        if not meets_capability(node.compute_capability, capability):
            has = node.compute_capability or "not given"
            document.report(("pools", name, "compute_capability"), f"node {node.id!r} of this pool has compute_capability {has}")
    return NodeRequirements(dtype, size, capability)


_HOSTED, _HOSTED_VERSION = "hosted", "0"
"""The dtype and the version of a remote API's model where neither the file nor the catalogue states one."""


def _report_context_limit(pool: PoolSection, node: PoolNodeSection, document: Document, place: Place) -> bool:
    """Report a node without exactly one of `address` and `url`, or with the one that its pool's engine does not take."""
    wanted, other = ("url", "address") if pool.engine in REMOTE_ENGINES else ("address", "url")
    if getattr(node, other) is not None:
        document.report((*place, other), f"a node of engine {pool.engine} has no `{other}`", f"give its `{wanted}`")
    elif getattr(node, wanted) is None:
        document.report(place, f"node {node.id!r} has no {wanted}", f"nodes of engine {pool.engine} are reached by `{wanted}`")
    else:
        alone = [name for name in ("credential", "ca", "headers", "api_version") if node.url is None and name in node.model_fields_set]
        for name in alone:
            document.report((*place, name), "only nodes with a `url` have it", f"remove `{name}`")
        return bool(alone)
    return True


def make_node(pool: PoolSection, node: PoolNodeSection, catalog: Catalog | None, document: Document, place: Place) -> Node | None:
    """One node with the catalogue's values filled in; None: something is missing, which is reported at `place`."""
    if _report_context_limit(pool, node, document, place):
        return None
    model = pool.model
    versions = catalog.versions(model) if catalog is not None else {}
    if node.version is None and len(versions) > 1:
        document.report(
            (*place, "version"), f"the catalogue has {model!r} in versions {', '.join(versions)}", "say which one the node serves"
        )
        return None
    entry = versions.get(node.version) if node.version is not None else next(iter(versions.values()), None)
    found = {
        "version": node.version or (entry.model_version if entry else _HOSTED_VERSION if node.url is not None else None),
        "dtype": node.dtype or (entry.dtype if entry else _HOSTED if node.url is not None else None),
        "tp_world_size": node.tp_world_size or (entry.tensor_parallel if entry else 1),
        "max_seq_len": node.max_seq_len or (entry and entry.max_seq_len),
    }
    missing = [field for field, value in found.items() if value is None]
    if missing and catalog is not None:
        described = f"version {node.version} of " if node.version and versions else ""
        hint = f"give it here, or describe {described}{model!r} in the catalogue"
        document.report(place, f"node {node.id!r} has no {', '.join(missing)}", hint)
    if missing:
        return None
    return Node(
        id=node.id,
        endpoint=node.address or InternalEndpoint.of(node.id),
        remote=None if node.url is None else make_remote(pool.engine, node, Path(document.file).parent),
        model=model,
        compute_capability=node.compute_capability or "",
        max_concurrency=node.max_concurrency,
        **found,  # type: ignore[arg-type]
    )


def _report_duplicate_nodes(name: str, pool: PoolSection, document: Document) -> None:
    first: dict[str, int] = {}
    for index, node in enumerate(pool.nodes):
        earlier = index if node.address is None else first.setdefault(str(node.address), index)
        if earlier != index:
            message = f"{node.address} is also the address of node {pool.nodes[earlier].id!r} of this pool"
            document.report(("pools", name, "nodes", index, "address"), message)


def _report_mixed_dtypes(name: str, pool: PoolSection, nodes: tuple[Node, ...], document: Document) -> None:
    fields = ("dtype", "tp_world_size", *(("compute_capability",) if pool.compute_capability is None else ()))
    for field in fields:
        groups: dict[str, list[str]] = {}
        for node in nodes:
            groups.setdefault(str(getattr(node, field)), []).append(node.id)
        if len(groups) > 1:
            listed = "; ".join(f"{value or 'not given'}: {', '.join(ids)}" for value, ids in groups.items())
            message, apart = f"the nodes differ in {field} ({listed})", field != "compute_capability"
            hint = "split the pool: what differs can't stand in for each other"
            if apart:
                message, hint = f"{message}: a request stays with nodes of one kind, its retries too", f"say `{field}` to keep others out"
            document.report(("pools", name), message, hint, at_key=True, warning=apart)
