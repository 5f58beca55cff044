"""The one frozen tree that everything above `settings/` is built from.

Rule: what is here was checked; no later code checks again whether a pool exists or a range holds.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.control.topology import Address, Outlier, Retry, SocketAddress, Topology, XdsSource
from din_extproc.domain.identity import NO_IDENTITIES, IdentityRules
from din_extproc.domain.node import Endpoint, Pool
from din_extproc.domain.price import NO_PRICES, PriceList
from din_extproc.domain.request import BUILT_IN, Operation
from din_extproc.domain.spending import SpendingBudgets
from din_extproc.domain.tenant import ApiKey, GlobalLimits, Tenant
from din_extproc.edge.registry.catalog_source import is_url
from din_extproc.flow.node_selector import InFlightFallback
from din_extproc.route.table import RouteTable
from din_extproc.settings.audit import AuditSettings
from din_extproc.settings.budgets import WebhookSection
from din_extproc.settings.catalog import Catalog
from din_extproc.settings.envoy import EnvoySection
from din_extproc.settings.gateway import GatewaySection, StoreSection, as_reached
from din_extproc.settings.health import HealthSection
from din_extproc.settings.problems import ConfigProblem
from din_extproc.settings.registry import Reaches, Tokens
from din_extproc.settings.telemetry import TelemetrySection
from din_extproc.settings.tls import ServerTlsSection
from din_extproc.settings.verification import VerificationSection

_MIB = 1 << 20


class Settings(Struct, frozen=True, kw_only=True):
    """A configuration in use."""

    file: str
    catalog_source: str | None
    """A file or a URL; None: there is no catalogue."""
    catalog_refresh_s: float | None
    """How often a URL is asked again."""
    node_tokens_file: str | None
    """None: no node can register."""
    keys_file: str | None
    """Where `din-extproc keys` keeps keys."""
    fingerprint: str
    """12 hex digits that change with the text of the configuration or its catalogue."""
    network: str
    node_tokens: Tokens
    node_reaches: Reaches
    gateway: GatewaySection
    store: StoreSection
    catalog: Catalog
    pools: tuple[Pool, ...]
    """In the order of the file."""
    tenants: tuple[Tenant, ...]
    global_limits: GlobalLimits
    keys: tuple[tuple[Tenant, tuple[ApiKey, ...]], ...]
    """The entries of a `KeyRing`."""
    sensitive_patterns: dict[str, str]
    """RE2 patterns of sensitive data, by the name of their kind, besides the built-in ones."""
    routes: RouteTable
    token_thresholds: frozenset[int]
    """Prompt sizes at which a rule turns."""
    health: HealthSection
    envoy: EnvoySection
    telemetry: TelemetrySection | None
    """None: traces and metrics are not pushed."""
    verification: VerificationSection | None
    """None: nodes are not compared."""
    audit: AuditSettings | None
    """None: nothing is recorded."""
    audit_key_files: tuple[str, ...]
    fail_open_pool: str | None
    """None: without a worker, requests are refused."""
    operations: Mapping[str, Operation] = BUILT_IN
    """Every operation by path."""
    prices_file: str | None = None
    """None: the configuration itself has the prices, if there are any."""
    prices: PriceList = NO_PRICES
    budgets: SpendingBudgets | None = None
    """None: there are none."""
    budget_webhook: WebhookSection | None = None
    """None: warnings are in the log and in metrics only."""
    identity: IdentityRules = NO_IDENTITIES
    """How requests without an API key get a tenant."""
    warnings: tuple[ConfigProblem, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The file of the configuration."""
        catalog = None if self.catalog_url else self.catalog_source
        named = (self.file, catalog, self.node_tokens_file, self.keys_file, self.prices_file, *self.audit_key_files)
        return tuple(file for file in named if file is not None)

    @property
    def folder(self) -> Path:
        """Base folder of relative paths in the file."""
        return Path(self.file).parent

    @property
    def catalog_url(self) -> str | None:
        """Where the catalogue is pulled from; None: it is a file, or there is none."""
        return self.catalog_source if self.catalog_source is not None and is_url(self.catalog_source) else None

    @property
    def credentials_folder(self) -> Path:
        """Where Envoy finds the credentials of remote APIs."""
        return self.folder.absolute() / self.envoy.credentials_folder

    def find_tenant(self, name: str) -> Tenant | None:
        """Return the tenant of this name, listed or like all that are not; None: there can be none."""
        listed = next((tenant for tenant in self.tenants if tenant.id == name), None)
        unlisted = self.identity.unlisted
        return listed if listed is not None or unlisted is None else replace(unlisted, id=name)

    @property
    def has_several_tenants(self) -> bool:
        """Whether a tenant can take something from another one."""
        return len(self.tenants) > 1 or self.identity.unlisted is not None

    @property
    def longest_wait_ms(self) -> int:
        """How long a request may wait in its tenant's queue."""
        tenants = self.tenants if self.identity.unlisted is None else (*self.tenants, self.identity.unlisted)
        return max((tenant.queueing.max_wait_ms for tenant in tenants), default=0)

    @property
    def body_limit(self) -> int:
        """The largest request body, in bytes."""
        return self.envoy.body_limit_mib * _MIB

    @property
    def may_move_in_flight(self) -> tuple[tuple[str, str], ...]:
        """Pools, each with the one that takes over its requests in flight: those of rules."""
        if not self.envoy.retry.to_fallback:
            return ()
        return tuple((pool.name, fallback.name) for pool, fallback in self.routes.fallbacks)

    @property
    def in_flight(self) -> InFlightFallback:
        """The same for who decides, with how often Envoy asks the first pool before."""
        return InFlightFallback(frozenset(self.may_move_in_flight), Retry(**self.envoy.retry.model_dump()).tries)

    @property
    def own_addresses(self) -> Iterator[Endpoint]:
        """Yield the addresses on which the sidecar and its Envoy listen."""
        yield self.envoy.listener
        yield self.envoy.admin
        registry = self.gateway.registry
        sections = (self.gateway.xds, self.gateway.admin, self.gateway.ext_proc, self.gateway.access_log)
        known = [None if section is None else section.address for section in sections]
        if registry is not None:
            known += [registry.address, registry.http_address]
        yield from (address for address in known if address is not None)

    def make_xds_source(self, node_id: str) -> XdsSource | None:
        """The xDS source of an Envoy of this name. None: it uses none."""
        xds = self.gateway.xds
        return None if xds is None else XdsSource(self._make_reached_address(xds.address, xds.tls), node_id, xds.delta)

    def _make_reached_address(self, endpoint: Endpoint, tls: ServerTlsSection | None) -> SocketAddress:
        """Where Envoy reaches one of our ports, and how it speaks to it."""
        envoy = self.envoy.sidecar_tls
        trust = None if tls is None or envoy is None else envoy.trust(self.folder)
        return as_reached(endpoint, self.gateway.reached_at, trust)

    @property
    def worker_addresses(self) -> tuple[Address, ...]:
        """Where Envoy asks for decisions."""
        ext_proc = self.gateway.ext_proc
        return self.gateway.worker_addresses if ext_proc.address is None else (self._make_reached_address(ext_proc.address, ext_proc.tls),)

    def make_topology(self, usage_lua: str, discovery: XdsSource | None = None) -> Topology:
        """Return the input of the Envoy renderer.

        Args:
            usage_lua: The source of the filter that reads usage from answers.
            discovery: For an Envoy that gets its pools, nodes and routes by xDS.
        """
        envoy = self.envoy
        access_log = self.gateway.access_log
        return Topology(
            ext_proc=self.worker_addresses,
            access_log=self._make_reached_address(access_log.address, access_log.tls),
            pools=self.pools,
            listener=SocketAddress(envoy.listener.host, envoy.listener.port),
            admin=SocketAddress(envoy.admin.host, envoy.admin.port),
            usage_lua=usage_lua,
            body_limit_bytes=self.body_limit,
            timeouts=envoy.timeouts.timeouts(),
            retry=Retry(**envoy.retry.model_dump()),
            outlier=Outlier(**envoy.outlier.model_dump()),
            slow_start=self.health.slow_start(),
            moves=self.may_move_in_flight,
            health_check=None if envoy.health_check is None else envoy.health_check.health_check(),
            cors_origins=envoy.cors.allow_origins,
            fail_open_pool=self.fail_open_pool,
            access_log_flush_ms=envoy.access_log_flush_ms,
            credentials_folder=str(self.credentials_folder),
            fluentd_log=envoy.access_log == "fluentd",
            health_path=envoy.health_path,
            identity=self.identity,
            tls=None if envoy.tls is None else envoy.tls.listener_tls(self.folder),
            discovery=discovery,
        )
