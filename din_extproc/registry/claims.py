"""Validation of registrations and heartbeats against plausible ranges and the catalogue.

Invariant: a check returns the reason as text; "" if the value is valid.
"""

import math
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from msgspec import Struct

from din_extproc.domain.membership import Heartbeat, NodeState, Registration
from din_extproc.domain.node import Endpoint

_REPORTABLE_STATES = frozenset({NodeState.LOADING, NodeState.READY, NodeState.DRAINING})
_MAX_VALUE = 1 << 40
"""Upper bound of requests, tokens and tokens per second of a node."""
MAX_BYTES = 1 << 50
MAX_REGISTERED: Mapping[str, int] = {"max_seq_len": 1 << 30, "max_concurrency": 1 << 20, "tp_world_size": 1 << 12}
"""Upper bounds of registered values, far beyond real nodes."""
_MAX_SEQUENCE = 1 << 53
"""Largest exact integer in JSON; holds microseconds since the epoch."""
_MAX_ADAPTERS = 1024
_MAX_REASON_CHARS = 500


class CatalogEntry(Struct, frozen=True):
    """Catalogue entry of one version of one model."""

    dtype: str
    max_seq_len: int
    sha256: str | None = None
    """Digest of the weights; None: not given."""


class AllowedAddresses(Struct, frozen=True):
    """Addresses that a node's token allows."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    endpoints: frozenset[Endpoint] = frozenset()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "AllowedAddresses":
        """Parse networks (`10.0.0.0/24`, `fd00::/64`), addresses, and addresses with a port (`10.0.0.7:8000`, `[fd00::7]:8000`).

        Raises:
            ValueError: A text is none of these.
        """
        networks, endpoints = [], set()
        for text in texts:
            try:
                networks.append(ip_network(text))
            except ValueError:
                endpoints.add(Endpoint.parse(text))
        return cls(tuple(networks), frozenset(endpoints))

    def allows(self, endpoint: Endpoint) -> bool:
        """Return whether the address is allowed."""
        host = ip_address(endpoint.host)
        return endpoint in self.endpoints or any(host.version == network.version and host in network for network in self.networks)


def is_link_local(endpoint: Endpoint) -> bool:
    """Return whether the address is link-local, such as a cloud's metadata service (169.254.169.254)."""
    host = ip_address(endpoint.host)
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return (mapped or host).is_link_local


Catalogue = Mapping[str, Mapping[str, CatalogEntry]]
"""Entries by model and version. Empty: no catalogue; any model may register."""


def find_contradiction(registration: Registration, catalogue: Catalogue) -> str:
    """Return why the registration contradicts the catalogue."""
    node = registration.node
    if not catalogue:
        return ""
    versions = catalogue.get(node.model)
    if versions is None:
        return f"the catalogue has no model {node.model!r}"
    described = versions.get(node.version)
    if described is None:
        return f"the catalogue has {node.model!r} in versions {', '.join(versions)}, not {node.version!r}"
    if node.dtype != described.dtype:
        return f"{node.model} {node.version} is {described.dtype} in the catalogue, not {node.dtype}"
    if node.max_seq_len > described.max_seq_len:
        return f"{node.model} {node.version} takes at most {described.max_seq_len} tokens by the catalogue, not {node.max_seq_len}"
    if described.sha256 is not None and registration.weights_sha256 != described.sha256:
        declared = registration.weights_sha256 or "nothing"
        return f"the weights of {node.model} {node.version} have the sha256 {described.sha256} in the catalogue, not {declared}"
    return ""


def find_impossible_value(beat: Heartbeat) -> str:
    """Return why the heartbeat is implausible."""
    if beat.state not in _REPORTABLE_STATES:
        return f"a node does not say of itself that it is {beat.state.value}"
    if not 0 <= beat.sequence < _MAX_SEQUENCE:
        return f"sequence {beat.sequence} is out of range"
    for name in ("waiting", "running", "tokens_in_use", "prefill_rate", "decode_rate"):
        value = getattr(beat, name)
        if value is not None and not (math.isfinite(value) and 0 <= value <= _MAX_VALUE):
            return f"{name} {value} is impossible"
    for name in ("prefill_rate", "decode_rate"):
        if getattr(beat, name) == 0:
            return f"{name} 0 is impossible: leave it out while nothing is measured"
    if len(beat.reason) > _MAX_REASON_CHARS or not beat.reason.isprintable():
        return f"reason is longer than {_MAX_REASON_CHARS} characters or not printable"
    for queue in beat.instances:
        if not all(value is None or 0 <= value <= _MAX_VALUE for value in (queue.waiting, queue.running)):
            return f"the queue of {queue.model[:_MAX_REASON_CHARS]!a} is impossible"
    if beat.free_memory_bytes is not None and not 0 <= beat.free_memory_bytes <= MAX_BYTES:
        return f"free_memory_bytes {beat.free_memory_bytes} is impossible"
    return _find_impossible_share(beat) or _find_impossible_adapters(beat)


def _find_impossible_share(beat: Heartbeat) -> str:
    for name, share in (("kv_cache_usage", beat.kv_cache_usage), ("cached_share", beat.cached_share)):
        if share is not None and not 0.0 <= share <= 1.0:
            return f"{name} {share} is not within 0 and 1"
    return ""


def _find_impossible_adapters(beat: Heartbeat) -> str:
    for names in (beat.adapters or (), beat.active_adapters):
        if len(names) > _MAX_ADAPTERS or not all(0 < len(name) <= _MAX_REASON_CHARS for name in names):
            return f"adapters: more than {_MAX_ADAPTERS}, or one whose name is empty or longer than {_MAX_REASON_CHARS} characters"
    if beat.adapter_slots is not None and not 1 <= beat.adapter_slots <= _MAX_ADAPTERS:
        return f"adapter_slots {beat.adapter_slots} is not within 1 and {_MAX_ADAPTERS}"
    return ""
