"""A GPU node and its pool: static properties from the catalogue and the registration, without load."""

from collections.abc import Mapping
from enum import StrEnum
from ipaddress import IPv6Address, ip_address

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.request import Operation
from din_extproc.domain.tenant import SensitiveData

_PORTS = range(1, 65536)
EGRESS_PREFIX = "din_egress_"
"""Before a node's id in the names of its egress listener and cluster."""


class Endpoint(Struct, frozen=True, gc=False, order=True):
    """An IP address and a port in the spelling that Envoy's `override_host` compares: `10.0.0.7:8000`, `[fd00::10]:8000`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Read `host:port` or `[v6]:port`.

        Raises:
            ValueError: no IP address, a scoped or unspecified one, or a port outside 1-65535.
        """
        host, separator, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not separator or not (port.isascii() and port.isdigit()):
            raise ValueError(f"{text!r} is not address:port")
        if ":" in host and not bracketed:
            raise ValueError(f"{text!r}: an IPv6 address stands in brackets, [{host}]:{port}")
        try:
            address = ip_address(host[1:-1] if bracketed else host)
        except ValueError:
            raise ValueError(f"{text!r}: {host!r} is not an IP address (Envoy picks a node by address, not by name)") from None
        if bracketed and not isinstance(address, IPv6Address):
            raise ValueError(f"{text!r}: only an IPv6 address stands in brackets")
        if isinstance(address, IPv6Address) and address.scope_id:
            raise ValueError(f"{text!r}: a scoped address is reachable from one machine only")
        if address.is_unspecified:
            raise ValueError(f"{text!r}: an unspecified address can't be connected to")
        if int(port) not in _PORTS:
            raise ValueError(f"{text!r}: a port is a number from 1 to 65535")
        return cls(host=str(address), port=int(port))


class CredentialSource(Struct, frozen=True, gc=False):
    """The source of a remote API's credential: the name of an environment variable, or a file."""

    env: str | None = None
    file: str | None = None


class RemoteApi(Struct, frozen=True, gc=False):
    """An HTTPS API on another site that serves as a node. It holds no secret."""

    host: str
    port: int
    base_path: str
    """Replaces `/v1` at the start of a request's path; "" or starts with a slash."""
    tls: bool
    """False only for a host on loopback."""
    ca: str
    """PEM file of the authorities that Envoy trusts for it."""
    credential_header: tuple[str, str]
    """The header that carries the credential, and what precedes the credential in it."""
    credential: CredentialSource | None = None
    """None: the API needs none."""
    query: str = ""
    """Appended to every path, such as `api-version=2024-10-21`."""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def authority(self) -> str:
        """The `host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class InternalEndpoint(Endpoint, frozen=True, gc=False):
    """An internal listener of Envoy by which requests leave for a remote API; `host` is the listener's name and `port` is 0."""

    @classmethod
    def of(cls, node_id: str) -> "InternalEndpoint":
        """Return the endpoint of a node's egress listener."""
        return cls(f"{EGRESS_PREFIX}{node_id}", 0)

    def __str__(self) -> str:
        return f"envoy://{self.host}/"


class Node(Struct, frozen=True, gc=False):
    """One engine instance, or one account of a remote API, that serves one model. Lengths in tokens."""

    id: str
    endpoint: Endpoint
    model: str
    version: str
    dtype: str
    compute_capability: str
    tp_world_size: int
    max_seq_len: int
    max_concurrency: int
    remote: RemoteApi | None = None
    """None: Envoy connects to `endpoint`; otherwise requests leave by it for this API."""
    adapters: tuple[str, ...] | None = None
    """The adapters that it is said to serve; None: any of the pool's, until its engine lists its own."""

    @property
    def kind(self) -> tuple[str, int]:
        """The dtype and the tensor-parallel size: nodes of another kind never replace this one."""
        return self.dtype, self.tp_world_size

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a node needs an id")
        if min(self.tp_world_size, self.max_seq_len, self.max_concurrency) < 1:
            raise ValueError(f"node {self.id}: tp_world_size, max_seq_len and max_concurrency are at least 1")


def meets_capability(has: str, wanted: str) -> bool:
    """Return whether a compute capability such as `9.0` meets `9.0` exactly, or `>=8.0` as a minimum; "" is met by all."""
    if not wanted.startswith(">="):
        return not wanted or has == wanted
    return bool(has) and tuple(map(int, has.split("."))) >= tuple(map(int, wanted[2:].split(".")))


class LongTail(Struct, frozen=True, gc=False):
    """Limits for requests that take far longer than most."""

    over_s: float
    """The predicted duration on an idle node above which a request belongs to the long tail."""
    share: float
    """The share of each node's slots that long requests may hold, at least one slot."""
    timeout_ms: int
    """Envoy's route timeout for these requests."""


class PoolTimeouts(Struct, frozen=True, gc=False):
    """Timeouts of a pool's answers in milliseconds; None: the value of Envoy's configuration."""

    first_byte_ms: int | None = None
    """Until the response starts, for streams and requests that generate nothing; then Envoy retries on another node."""
    total_ms: int | None = None
    """For the whole response, except requests of the long tail."""


class Adapters(Struct, frozen=True, gc=False):
    """The adapters (LoRA) of a pool's model."""

    names: tuple[str, ...]
    """Their names for clients, tenants' grants, limits and engines."""
    slots: int = 4
    """Adapters that a node can have loaded at once, unless it reports its own number."""
    spread: float = 0.5
    """The part of its slots by which a node that has an adapter may be busier than another one before the other one loads it."""


NO_ADAPTERS = Adapters(())


class TrafficClass(StrEnum):
    """The latency class of a pool's requests, which decides how soon a node counts as failed."""

    REALTIME = "realtime"
    STANDARD = "standard"
    BATCH = "batch"


ATTEMPT_POOL = "x-din-attempt-pool"
"""Header that names the pool of the node that an attempt goes to. Only an Envoy cluster of two pools sets it."""
ATTEMPT_PLAN = "x-din-attempt-plan"
"""Header that says how the attempts of a request are translated, where two pools take different requests."""
EVERY_ATTEMPT = "every"
"""Prefix of an attempt plan whose attempts at the first pool are translated, too."""
DEGRADED = "x-bxagent-degraded"
"""Header on the answer of a pool that took over."""
DROPPED = "x-din-dropped-parameters"
"""Header on an answer that names what its engine was not told of the request."""
POOL_SEPARATOR = "+"
"""Separates the two pools in the name of an in-flight fallback cluster; no pool name contains it."""


def in_flight_cluster(pool: str, fallback: str) -> str:
    """Return the name of the Envoy cluster that holds a pool and its in-flight fallback."""
    return f"{pool}{POOL_SEPARATOR}{fallback}"


class DnsName(Struct, frozen=True, gc=False):
    """A DNS name whose addresses are nodes."""

    name: str
    port: int
    """0: the name has SRV records, which give the ports."""
    every_s: float
    """Seconds between two looks at least; a longer TTL is honoured."""
    server: Endpoint | None = None
    """None: the system's resolvers."""

    @property
    def title(self) -> str:
        """The name of the source for operators."""
        return f"DNS name {self.name}"


class KubernetesObjects(Struct, frozen=True, gc=False):
    """The endpoints of a Service, or pods with certain labels, that are nodes."""

    namespace: str
    port: int | str
    """A number, or the name of a port of the Service or of a container."""
    service: str = ""
    """"": pods."""
    selector: str = ""
    """Label selector of the pods."""
    kubeconfig: str = ""
    """"": the service account of this pod."""
    context: str = ""
    """Context of the kubeconfig; "": its current one."""

    @property
    def title(self) -> str:
        """The name of the source for operators."""
        return f"Service {self.namespace}/{self.service}" if self.service else f"pods {self.namespace}/{self.selector}"


class Discovery(Struct, frozen=True):
    """The discovery source of a pool's further nodes."""

    source: DnsName | KubernetesObjects
    template: Node
    """A node as each one found is, but for its id, its endpoint, its weight and what the source states."""
    versions: Mapping[str, Node] = {}
    """The same for nodes of other versions of the model, as far as the catalogue has them."""


class Pool(Struct, frozen=True):
    """Interchangeable nodes: one model, one engine, one scheduling strategy."""

    name: str
    """Also the name of the Envoy cluster."""
    model: str
    """The physical model name that tenants are allowed to use and billed for."""
    served_model: str
    """The model name that the engine expects; it is spliced into the body."""
    engine: str
    scheduler: str
    nodes: tuple[Node, ...]
    discover: Discovery | None = None
    operations: frozenset[Operation] | None = None
    """None: every operation."""
    stream_usage: bool = True
    """The engine honours `stream_options.include_usage`."""
    priority_scheduling: bool = False
    """The engine orders its queue by the requests' `priority`, which is set from their class."""
    api: str = "openai"
    """The engine's interface: `openai`, or `native` for its own."""
    unmappable: str = "refuse"
    """How requests with a parameter that the engine does not support are handled: `refuse`, or `drop` the parameter and report it."""
    dtype: str = ""
    """Required of every node, registered ones included; "": any. Nodes of different kinds are then kept apart."""
    tp_world_size: int = 0
    """Required likewise; 0: any."""
    compute_capability: str = ""
    """Required likewise, exactly (`9.0`) or at least (`>=8.0`); "": any"""
    min_seq_len: int = 0
    """The smallest context length in tokens that a registering node may have."""
    scheduler_options: Mapping[str, float] = {}
    traffic: TrafficClass = TrafficClass.STANDARD
    long_tail: LongTail | None = None
    """None: no request is treated as long."""
    timeouts: PoolTimeouts = PoolTimeouts()
    sensitive_data: SensitiveData = SensitiveData()
    """The policy for sensitive data before a prompt goes there, besides the tenant's own policy."""
    adapters: Adapters = NO_ADAPTERS
    adapter: str = ""
    """The adapter that this view of the pool serves as its model; "": its own model, see `for_adapter`."""

    @property
    def models(self) -> tuple[str, ...]:
        """The model and its adapters."""
        return self.model, *self.adapters.names

    def for_adapter(self, name: str) -> "Pool":
        """Return the view of the pool in which one of its adapters is the model."""
        return replace(self, model=name, served_model=name, adapter=name)

    @property
    def is_remote(self) -> bool:
        """Return whether its nodes are remote APIs, so that requests leave the site. All nodes of a pool are of one kind."""
        return bool(self.nodes) and self.nodes[0].remote is not None

    def serves(self, operation: str) -> bool:
        """Return whether the pool accepts requests for this operation, or for the operation of this path."""
        return self.operations is None or operation in self.operations

    def takes_same_bytes(self, other: "Pool") -> bool:
        """Whether both pools accept the same request except for the model's name, so that Envoy can move it in flight by itself."""
        own = (self.engine, self.api, self.stream_usage, self.unmappable, self.priority_scheduling, self.sensitive_data)
        its = (other.engine, other.api, other.stream_usage, other.unmappable, other.priority_scheduling, other.sensitive_data)
        return self.api == "openai" and own == its
