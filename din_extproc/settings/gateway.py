"""The sidecar itself: where it listens, how many workers it has, where its counters live.

Rule: an address here is a listening address of the sidecar; that of Envoy's listener is in `envoy.py`.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, model_validator

from din_extproc.admit.keys import NodeTokens, parse_hash
from din_extproc.control.topology import Address, SocketAddress, TlsTrust, UnixSocket
from din_extproc.domain.node import Endpoint
from din_extproc.edge.redis.topology import make_carrier
from din_extproc.settings.keys import KeyHash, KeyId
from din_extproc.settings.registry import RegistryListenSection
from din_extproc.settings.routes import HeaderName
from din_extproc.settings.section import AsTuple, ListenAddress, Section
from din_extproc.settings.tls import ServerTlsSection

is_host = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*").fullmatch
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_LONGEST_SOCKET = 100
"""Characters of a Unix socket's path, with room for a worker's number; the system's limit is 107."""


def _check_socket_path(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"{path!r}: a Unix socket has an absolute path")
    if len(path) > _LONGEST_SOCKET:
        raise ValueError(f"a Unix socket's path has at most {_LONGEST_SOCKET} characters")
    return path


class ExtProcSection(Section):
    """Where Envoy reaches the workers: either a Unix socket or an address."""

    socket: Annotated[str, AfterValidator(_check_socket_path)] | None = None
    address: ListenAddress | None = None
    tls: ServerTlsSection | None = None

    @model_validator(mode="after")
    def _check_one_given(self) -> "ExtProcSection":
        if (self.socket is None) == (self.address is None):
            raise ValueError("either `socket` or `address`, one of them")
        if self.tls is not None and self.socket is not None:
            raise ValueError("`tls` is for an `address`: a Unix socket never leaves the machine")
        return self


class ListenSection(Section):
    """One listener."""

    address: ListenAddress
    tls: ServerTlsSection | None = None


class ReaderKeySection(Section):
    """A key that opens pages of the admin port, by its hash."""

    id: KeyId
    hash: KeyHash


class AdminKeySection(ReaderKeySection):
    """A key of the admin port."""

    operate: bool = False
    """Its holder may also drain nodes, quarantine them, and give them requests again."""


def _make_tokens(keys: Iterable[ReaderKeySection]) -> NodeTokens:
    return NodeTokens({key.id: parse_hash(key.hash) or (b"", b"") for key in keys})


class AdminSection(ListenSection):
    """Health, metrics, state."""

    keys: Annotated[tuple[AdminKeySection, ...], AsTuple] = ()
    """As `din-extproc keys new` prints them. With any, only their holders see more than whether it lives and is ready. Without, who asks
    by a loopback name does; where `address` is no loopback one, also by an address or a name without a dot."""

    def opens(self, authorization: str) -> bool:
        """Whether who sends this may see everything."""
        return not self.keys or _make_tokens(self.keys).find_owner(authorization) is not None

    def operator(self, authorization: str) -> str | None:
        """Return the id of the key if its holder may change nodes; None: it may not."""
        return _make_tokens(key for key in self.keys if key.operate).find_owner(authorization)


class DashboardSection(Section):
    """The page for people at the admin port."""

    keys: Annotated[tuple[ReaderKeySection, ...], AsTuple, Field(min_length=1)]
    """As `din-extproc keys new` prints them."""

    def owner(self, authorization: str) -> str | None:
        """Return the owner of the key; None: unknown."""
        return _make_tokens(self.keys).find_owner(authorization)


class ExtAuthzSection(Section):
    """Answers to Envoys that only ask whether a request may pass, at the address of `ext_proc`."""

    longest_s: Annotated[float, Field(strict=False, ge=1, le=86_400)] = 3600.0
    """After this a request whose end was never told gives its slot back."""


class XdsSection(Section):
    """Where running Envoys get their pools, nodes and routes (xDS)."""

    address: ListenAddress
    tls: ServerTlsSection | None = None
    delta: bool = True
    """Envoys are rendered to ask for changes; otherwise for the state of the world each time."""


def _check_host(text: str) -> str:
    if is_host(text) is None:
        raise ValueError(f"{text!r} is not a host: a DNS name or an IP address, without a port")
    return text


class GatewaySection(Section):
    """`gateway:`."""

    node_number: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Inside every trace id. None: derived from the host's name."""
    ext_proc: ExtProcSection = ExtProcSection(socket="/run/din/ext_proc.sock")
    access_log: ListenSection = ListenSection(address=Endpoint("127.0.0.1", 50052))
    admin: AdminSection = AdminSection(address=Endpoint("127.0.0.1", 9090))
    dashboard: DashboardSection | None = None
    """None: there is none."""
    xds: XdsSection | None = None
    """None: Envoys know what their rendered files say."""
    ext_authz: ExtAuthzSection | None = None
    """None: no ext_authz service."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    log_exchanges: Literal["all", "failed", "none"] = "all"
    """Which finished exchanges have a line in the log, with the trace id."""
    route_cache_s: Annotated[float, Field(strict=False, ge=0, le=60)] = 2.0
    """How long a worker keeps which nodes of a pool can take requests of one length (512 tokens) and version; nodes that come, go or change
    empty it at once. 0: never."""
    session_header: HeaderName | None = None
    """The request header that names a session, such as `x-session-id`. With `scheduler: prefix_affinity` the requests of a session stay at
    one node. It goes before `prompt_cache_key` and `conversation` in the body, which name sessions, too."""
    scrape_s: Annotated[float, Field(strict=False, ge=0, le=60)] = 3.0
    """How often the metrics page of each listed node is read; 0: never."""
    registry: RegistryListenSection | None = None
    """None: no node can register."""
    reached_at: Annotated[str, AfterValidator(_check_host)] | None = None
    """The host under which Envoys elsewhere reach this sidecar, such as a Service of Kubernetes. None: Envoy is on the same machine."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "GatewaySection":
        if self.workers > 1 and self.ext_proc.socket is None:
            raise ValueError("more than one worker needs `ext_proc.socket`: each worker has a socket of its own")
        if self.reached_at is not None and self.ext_proc.address is None:
            raise ValueError("`reached_at` needs `ext_proc.address`: no Envoy elsewhere reaches a Unix socket")
        own = [self.access_log.address, self.admin.address, self.ext_proc.address, None if self.xds is None else self.xds.address]
        if self.registry is not None:
            own += [self.registry.address, self.registry.http_address]
        if any(count > 1 for address, count in Counter(own).items() if address is not None):
            raise ValueError("ext_proc, access_log, admin, xds and the registry listen on addresses of their own")
        return self

    @property
    def worker_addresses(self) -> tuple[Address, ...]:
        """Where each worker listens: the socket as configured for a single one, else with `.0`, `.1` and so on behind it."""
        if self.ext_proc.address is not None:
            return (SocketAddress(self.ext_proc.address.host, self.ext_proc.address.port),)
        path = self.ext_proc.socket or ""
        return tuple(UnixSocket(f"{path}.{number}" if self.workers > 1 else path) for number in range(self.workers))


def as_reached(endpoint: Endpoint, elsewhere: str | None = None, tls: TlsTrust | None = None) -> SocketAddress:
    """Where, and with which TLS, Envoy reaches what listens there: on the same machine, or from `elsewhere`, under that host."""
    return SocketAddress(elsewhere or _LOOPBACK.get(endpoint.host, endpoint.host), endpoint.port, tls)


def _check_redis_url(url: SecretStr) -> SecretStr:
    make_carrier(url.get_secret_value(), (), timeout_ms=1)  # reads the URL; connects only when it is started
    return url


class StoreSection(Section):
    """`store:`, the Redis that all replicas count in."""

    url: Annotated[SecretStr, Field(strict=False), AfterValidator(_check_redis_url)] = SecretStr("redis://127.0.0.1:6379/0")
    """`redis://`, `rediss://`, `unix://`, `redis+sentinel://` or `redis+cluster://`; user, password and database where needed."""
    timeout_ms: Annotated[int, Field(ge=1, le=10_000)] = 50
    lease_ms: Annotated[int, Field(ge=1000, le=600_000)] = 30_000
    """How long the places of requests in flight stay taken when the process that renews them has died."""
    one_slot: bool = False
    """In a Redis Cluster, all counters of the network on one master: needed for limits that all tenants share."""
    on_error: Literal["local_share", "open", "closed"] = "local_share"
    """When Redis can't be asked: each worker counts its share itself, everything passes, or nothing does."""

    @property
    def one_script(self) -> bool:
        """Whether one script can count for several tenants: not where their keys lie on several masters."""
        return self.one_slot or not self.url.get_secret_value().startswith("redis+cluster:")


class FailOpenSection(Section):
    """`fail_open:`, where requests go, unmetered and marked, while no worker answers."""

    pool: str
