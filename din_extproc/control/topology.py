"""Topology: the immutable input of the Envoy configuration.

Invariant: this module does not depend on Envoy's messages. A topology that could not be rendered can't be built.
"""

from collections import Counter
from ipaddress import ip_address

from msgspec import Struct, field

from din_extproc.domain.access_log import NODE_REFUSALS
from din_extproc.domain.identity import NO_IDENTITIES, IdentityRules
from din_extproc.domain.node import Pool

EXT_PROC_CLUSTER = "din_ext_proc"
ACCESS_LOG_CLUSTER = "din_access_log"
XDS_CLUSTER = "din_xds"
AGENT_CLUSTER = "din_agent"
JWKS_PREFIX = "din_jwks_"
RESERVED_CLUSTERS = frozenset({EXT_PROC_CLUSTER, ACCESS_LOG_CLUSTER, XDS_CLUSTER, AGENT_CLUSTER})
_MAX_BODY_BYTES = 1 << 30


class TlsTrust(Struct, frozen=True, kw_only=True):
    """TLS settings of a connection from Envoy: paths of PEM files on its machine."""

    ca: str
    cert: str | None = None
    """With `key`. None: it shows none."""
    key: str | None = None
    server_name: str | None = None
    """The name that the other side's certificate must carry. None: any that `ca` has issued will do."""


class ListenerTls(Struct, frozen=True, kw_only=True):
    """TLS of the listener: paths of PEM files on Envoy's machine."""

    cert: str
    key: str
    client_ca: str | None = None
    """File with the CA of clients' certificates. None: clients are not asked for one."""
    requires_certificate: bool = False
    """A client without a certificate is refused."""


class SocketAddress(Struct, frozen=True):
    """A host (IP address or DNS name) and a TCP port."""

    host: str
    port: int
    tls: TlsTrust | None = None
    """TLS of connections to it. None: plain text."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("an address needs a host")
        if not 1 <= self.port <= 65535:  # noqa: PLR2004 - the range of TCP ports
            raise ValueError(f"{self.host}: a port is a number from 1 to 65535")

    @property
    def is_ip(self) -> bool:
        """Whether the host is an IP address, not a name to be resolved."""
        try:
            ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host == "localhost" or (self.is_ip and ip_address(self.host).is_loopback)


class UnixSocket(Struct, frozen=True):
    """A Unix domain socket, by its path."""

    path: str

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"{self.path!r}: a Unix socket has an absolute path")


Address = SocketAddress | UnixSocket


class Timeouts(Struct, frozen=True):
    """How long Envoy waits, in milliseconds. `total_ms` 0: no limit of its own."""

    message_ms: int = 5_000
    """For one answer of the sidecar. Longer than the sidecar's own deadline, so that it answers first."""
    max_message_ms: int = 60_000
    """Maximum to which the sidecar may extend the former, for a request that waits in its tenant's queue."""
    request_ms: int = 60_000
    """For a client to send its whole request."""
    stream_idle_ms: int = 600_000
    """Of silence in both directions of one exchange."""
    node_idle_ms: int = 420_000
    """Of silence of a node: before its first byte, and between two chunks; not of an answer that is generated whole."""
    connect_ms: int = 1_000
    total_ms: int = 0

    def __post_init__(self) -> None:
        for name in ("message_ms", "max_message_ms", "request_ms", "stream_idle_ms", "node_idle_ms", "connect_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"timeouts.{name} is at least 1")
        if self.total_ms < 0:
            raise ValueError("timeouts.total_ms is at least 0")
        if self.max_message_ms < self.message_ms:
            raise ValueError("timeouts.max_message_ms is at least timeouts.message_ms")


class Retry(Struct, frozen=True):
    """Another try on another node, before the first byte of an answer has left."""

    attempts: int = 1
    jitter_ms: int = 25
    """A try starts after a random time below this."""
    to_fallback: bool = True
    """When these have failed, one more try in the rule's other pool, where a request can move there as it is."""
    statuses: tuple[int, ...] = (*NODE_REFUSALS, 502, 503, 504, 529)
    """Statuses of a node that are retried on another. Not 500: a request that breaks one engine breaks the next."""

    def __post_init__(self) -> None:
        if self.attempts < 0:
            raise ValueError("retry.attempts is at least 0")
        if self.jitter_ms < 1:
            raise ValueError("retry.jitter_ms is at least 1")
        for status in self.statuses:
            if not 400 <= status <= 599:  # noqa: PLR2004 - the range of HTTP error statuses
                raise ValueError(f"retry.statuses: {status} is not an error status")

    @property
    def tries(self) -> int:
        """Return the largest number of attempts at nodes of the pool itself."""
        return self.attempts + 1


class Outlier(Struct, frozen=True):
    """When Envoy ejects a node that it can't connect to, and for how long."""

    consecutive_connect_failures: int = 3
    """Connections that could not be opened. What a node answers, and how it ends an exchange, is judged by the sidecar's breakers alone,
    which know whose request it was."""
    interval_ms: int = 1_000
    base_ejection_ms: int = 30_000
    max_ejection_percent: int = 100

    def __post_init__(self) -> None:
        for name in ("consecutive_connect_failures", "interval_ms", "base_ejection_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"outlier.{name} is at least 1")
        if not 0 <= self.max_ejection_percent <= 100:  # noqa: PLR2004 - a share in percent
            raise ValueError("outlier.max_ejection_percent is a number from 0 to 100")


class SlowStart(Struct, frozen=True):
    """Slow start of Envoy's own load balancing, for a node that is new or healthy again."""

    window_ms: int = 60_000
    """It has its full weight after so long."""
    least_percent: float = 10.0
    """The initial resources."""

    def __post_init__(self) -> None:
        if self.window_ms < 1:
            raise ValueError("slow_start.window_ms is at least 1")
        if not 0 < self.least_percent <= 100:  # noqa: PLR2004 - a share in percent
            raise ValueError("slow_start.least_percent is a number above 0, up to 100")


class HealthCheck(Struct, frozen=True):
    """Envoy's health check of a pool's nodes."""

    path: str = "/health"
    engine_paths: dict[str, str] = field(default_factory=lambda: {"ollama": "/api/version", "triton": "/v2/health/ready"})
    """Health check paths of engines that do not use `path`."""
    interval_ms: int = 5_000
    timeout_ms: int = 2_000
    unhealthy_after: int = 3
    """Failed checks in a row."""
    healthy_after: int = 1

    def __post_init__(self) -> None:
        for name in ("interval_ms", "timeout_ms", "unhealthy_after", "healthy_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"health_check.{name} is at least 1")
        for path in (self.path, *self.engine_paths.values()):
            if not path.startswith("/"):
                raise ValueError(f"health_check: {path!r} is not an absolute path")


class XdsSource(Struct, frozen=True):
    """xDS server of a running Envoy, and the Envoy's node id."""

    address: Address
    node_id: str
    delta: bool = True
    """Incremental protocol; otherwise state of the world."""

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ValueError("discovery: an Envoy that uses xDS needs a node id")


class Topology(Struct, frozen=True, kw_only=True):
    """Everything that the configuration of Envoy is derived from."""

    ext_proc: tuple[Address, ...]
    """The sidecar's workers."""
    access_log: Address | None
    """Receiver of the access log. None: standard output."""
    pools: tuple[Pool, ...] = ()
    listener: SocketAddress = SocketAddress("0.0.0.0", 10000)
    admin: SocketAddress = SocketAddress("127.0.0.1", 9901)
    """Envoy's own administration: it can stop Envoy, so only this machine may reach it."""
    usage_lua: str = ""
    """Source of the filter that reads usage from answers. "": no such filter."""
    body_limit_bytes: int = 32 << 20
    timeouts: Timeouts = Timeouts()
    retry: Retry = Retry()
    outlier: Outlier | None = Outlier()
    """None: no node is taken out."""
    slow_start: SlowStart = SlowStart()
    moves: tuple[tuple[str, str], ...] = ()
    """Pools, each with the one that takes over its requests in flight."""
    health_check: HealthCheck | None = HealthCheck()
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call: exact, with `*` inside, or `*` alone. Empty: none."""
    fail_open_pool: str | None = None
    """The pool that gets requests, unmetered and marked, while no worker responds. None: they are refused."""
    access_log_flush_ms: int = 50
    fluentd_log: bool = True
    """Whether the access log goes by Fluentd's forward protocol; otherwise by gRPC."""
    discovery: XdsSource | None = None
    """xDS server. None: the bootstrap file holds everything."""
    agent: Address | None = None
    """Answers `/health` in the node's stead. None: the path is one like any other."""
    credentials_folder: str = "/var/lib/din/credentials"
    """Where the SDS files with the credentials of remote APIs are."""
    max_connections: int = 20_000
    """Of clients at once; further ones are not accepted."""
    identity: IdentityRules = NO_IDENTITIES
    """Issuers whose tokens Envoy verifies, and the connection attributes that it sends."""
    tls: ListenerTls | None = None
    """TLS of the listener. None: plain text."""
    health_path: str | None = None
    """The path of the listener's health check for load balancers. None: there is none."""

    def __post_init__(self) -> None:
        if not self.ext_proc:
            raise ValueError("ext_proc: at least one address of a worker")
        if not self.admin.is_loopback:
            raise ValueError(f"admin: {self.admin.host} is not a loopback address")
        if not self.listener.is_ip:
            raise ValueError(f"listener: {self.listener.host} is not an IP address")
        if not 1 <= self.body_limit_bytes <= _MAX_BODY_BYTES:
            raise ValueError(f"body_limit_bytes is a number from 1 to {_MAX_BODY_BYTES}")
        for name in ("access_log_flush_ms", "max_connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1")
        names = Counter(pool.name for pool in self.pools)
        for name, count in names.items():
            if count > 1 or name in RESERVED_CLUSTERS or not name:
                raise ValueError(f"pools: {name!r} is empty, taken twice, or a name that the gateway uses itself")
        for pair in self.moves:
            if len(set(pair)) == 1 or not set(pair) <= names.keys():
                raise ValueError(f"moves: {pair[0]!r} and {pair[1]!r} are not two pools")
        if self.fail_open_pool is not None and self.fail_open_pool not in names:
            raise ValueError(f"fail_open_pool: there is no pool {self.fail_open_pool!r}")
