"""A GPU node and the pool it belongs to: what the catalogue and the registration say, never how busy it is."""

from collections.abc import Mapping
from enum import StrEnum
from ipaddress import IPv6Address, ip_address

from msgspec import Struct

from din_extproc.domain.request import Operation

_PORTS = range(1, 65536)


class Endpoint(Struct, frozen=True, gc=False, order=True):
    """An IP address and a port, in the one spelling that Envoy's `override_host` compares: `10.0.0.7:8000`, `[fd00::10]:8000`."""

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


class Node(Struct, frozen=True, gc=False):
    """One engine instance that serves one model (R12, R17). Lengths in tokens."""

    id: str
    endpoint: Endpoint
    model: str
    version: str
    dtype: str
    compute_capability: str
    tp_world_size: int
    max_seq_len: int
    max_concurrency: int

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a node needs an id")
        if min(self.tp_world_size, self.max_seq_len, self.max_concurrency) < 1:
            raise ValueError(f"node {self.id}: tp_world_size, max_seq_len and max_concurrency are at least 1")


class LongTail(Struct, frozen=True, gc=False):
    """What is different for requests that take far longer than the rest (R21)."""

    over_s: float
    """They would take longer than this at a usual node that is not busy."""
    share: float
    """Of each node's slots: they may hold so many, and always one. Counted by each worker for itself."""
    timeout_ms: int
    """How long Envoy waits for them."""


class PoolTimeouts(Struct, frozen=True, gc=False):
    """How long the answers of a pool's nodes may take, in milliseconds; None: as long as Envoy's configuration says for all."""

    first_byte_ms: int | None = None
    """Until the answer begins, for streams and what is not generated; then another node is asked."""
    total_ms: int | None = None
    """The whole answer, of requests that are not of the long tail."""


class TrafficClass(StrEnum):
    """What the requests of a pool are like: how soon a node of it counts as failed (R23)."""

    REALTIME = "realtime"
    STANDARD = "standard"
    BATCH = "batch"


MOVES = "+"
"""Stands between the two pools in the name of a cluster whose requests may move from one to the other. No pool's name has it."""


def moving_cluster(pool: str, fallback: str) -> str:
    """The Envoy cluster of a pool with another that takes over in flight."""
    return f"{pool}{MOVES}{fallback}"


class Pool(Struct, frozen=True):
    """Nodes that may stand in for each other: one model, one engine, one strategy."""

    name: str
    """Also the name of the Envoy cluster."""
    model: str
    """The physical model name that tenants are allowed and billed for."""
    served_model: str
    """The name that the pool's engine answers to; what is spliced into the body."""
    engine: str
    scheduler: str
    nodes: tuple[Node, ...]
    operations: frozenset[Operation] | None = None
    """None: every operation."""
    stream_usage: bool = True
    """The engine honours `stream_options.include_usage`."""
    api: str = "openai"
    """What the engine is spoken to in: `openai`, or `native` for its own interface."""
    unmappable: str = "refuse"
    """Requests with a parameter that the engine can't be told: `refuse` them, or `drop` it and say so."""
    dtype: str = ""
    """Of every node, those that register too; "": of any."""
    tp_world_size: int = 0
    """Likewise; 0: any."""
    compute_capability: str = ""
    """Likewise; "": any."""
    min_seq_len: int = 0
    """Nodes that register take at least so many tokens."""
    scheduler_options: Mapping[str, float] = {}
    traffic: TrafficClass = TrafficClass.STANDARD
    long_tail: LongTail | None = None
    """None: every request is like the others."""
    timeouts: PoolTimeouts = PoolTimeouts()

    def hands_over_to(self, other: "Pool") -> bool:
        """Whether a request for this pool is one for the other but for the model's name, so that it can move there in flight."""
        own = (self.engine, self.api, self.stream_usage, self.unmappable)
        return self.api == "openai" and own == (other.engine, other.api, other.stream_usage, other.unmappable)
