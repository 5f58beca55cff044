"""State of one xDS subscription: a client's resources of one type, the last response, and its ACK or NACK. No bytes, no clock.

Invariant: at most one response is outstanding; later changes are sent together after its ACK or NACK. A rejected response is not sent
again until its content changes.

Sources: https://www.envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol
"""

from collections.abc import Iterable, Mapping
from enum import Enum, auto

from msgspec import Struct

from din_extproc.control.snapshot import CLUSTER, Resource, Snapshot

EVERYTHING = "*"
_MOST_NAMES = 10_000
"""Maximum resource names of a subscription."""


class SubscriptionPhase(Enum):
    """The state of a subscription: whether a response is outstanding."""

    IDLE = auto()
    OFFERED = auto()


class AckStatus(Enum):
    """Meaning of a request for the latest response."""

    NOTHING = auto()
    """No nonce: a plain subscription."""
    YES = auto()
    NO = auto()
    AGAIN = auto()
    """The nonce of a response that was answered already: it changes what is asked for."""
    LATE = auto()
    """The nonce of a response that a newer one has replaced."""


_NEXT = {
    (SubscriptionPhase.IDLE, AckStatus.NOTHING): SubscriptionPhase.IDLE,
    (SubscriptionPhase.IDLE, AckStatus.AGAIN): SubscriptionPhase.IDLE,
    (SubscriptionPhase.IDLE, AckStatus.LATE): SubscriptionPhase.IDLE,
    (SubscriptionPhase.OFFERED, AckStatus.NOTHING): SubscriptionPhase.OFFERED,
    (SubscriptionPhase.OFFERED, AckStatus.YES): SubscriptionPhase.IDLE,
    (SubscriptionPhase.OFFERED, AckStatus.NO): SubscriptionPhase.IDLE,
    (SubscriptionPhase.OFFERED, AckStatus.LATE): SubscriptionPhase.OFFERED,
}


class XdsOffer(Struct, frozen=True):
    """One response."""

    nonce: str
    version: str
    """Of all resources of the type together."""
    resources: tuple[Resource, ...]
    removed: tuple[str, ...]
    """Names. Only clients that take changes can be told so; the others see what is missing."""
    names_sent: tuple[str, ...]
    """Names of the resources that are new to the client or have changed."""


class XdsSubscription:
    """Subscription to one type on one stream.

    Args:
        type_url: Type URL of the resources.
        delta: Incremental protocol; otherwise state of the world.
    """

    def __init__(self, type_url: str, *, delta: bool) -> None:
        self.type_url = type_url
        self.acked = ""
        """Version of the last ACK; "" before the first."""
        self.refusal = ""
        """Error of the latest NACK; "" after an ACK."""
        self.phase = SubscriptionPhase.IDLE
        self._delta = delta
        self._whole = not delta and type_url == CLUSTER
        """Every response names all there are: what is not named is removed."""
        self._fresh = True
        self._owed = False
        self._everything = False
        self._names: set[str] = set()
        self._has: dict[str, Resource | None] = {}
        """Resources sent to the client; None: reported as missing."""
        self._nonce = self._version = ""

    # -- requests of the client ------------------------------------------------------------------------------------------------------

    def on_request(self, names: Iterable[str], nonce: str, refusal: str | None) -> None:
        """A request for the state of the world: from now on these names and no others.

        Raises:
            ValueError: more names than a client of ours has.
        """
        if self._on_ack(nonce, refusal) is AckStatus.LATE:
            return  # its client is about to ask again
        wanted = set(names)
        naming_none_means_all = self.type_url == CLUSTER and (self._fresh or (self._everything and not self._names))
        everything = EVERYTHING in wanted or (naming_none_means_all and not wanted)
        wanted.discard(EVERYTHING)
        if (everything and not self._everything) or (self._whole and wanted != self._names):
            self._owed = True
        self._fresh = False
        self._everything = everything
        self._names = _check_length(wanted)
        if not everything:
            self._has = {name: resource for name, resource in self._has.items() if name in wanted}

    def on_delta_request(
        self, subscribe: Iterable[str], unsubscribe: Iterable[str], known: Mapping[str, str], nonce: str, refusal: str | None
    ) -> None:
        """A request for changes. `known`: what the client has from a former stream, versions by name.

        Raises:
            ValueError: more names than a client of ours has.
        """
        self._on_ack(nonce, refusal)
        added, dropped = set(subscribe), set(unsubscribe)
        if EVERYTHING in added or (self._fresh and not added and self.type_url == CLUSTER):
            self._owed = self._owed or not self._everything
            self._everything = True
        if self._fresh and known:
            self._owed = True  # what it has may be all there is: then the answer says no more than that
        if EVERYTHING in dropped:
            self._everything = False
        if self._fresh:
            self._has = {name: Resource(name, version, b"") for name, version in _check_count(known).items()}
        else:
            for name in added:
                self._has.pop(name, None)  # a new subscription is answered again
        self._fresh = False
        self._names = _check_length((self._names | added) - dropped - {EVERYTHING})
        if not self._everything:
            self._has = {name: resource for name, resource in self._has.items() if name in self._names}

    def _on_ack(self, nonce: str, refusal: str | None) -> AckStatus:
        status = self._classify_ack(nonce, refusal)
        self.phase = _NEXT[self.phase, status]
        if status is AckStatus.YES:
            self.acked, self.refusal = self._version, ""
        elif status is AckStatus.NO:
            self.refusal = refusal or "refused without a reason"
        return status

    def _classify_ack(self, nonce: str, refusal: str | None) -> AckStatus:
        if not nonce or not self._nonce:
            return AckStatus.NOTHING
        if nonce != self._nonce:
            return AckStatus.LATE
        if self.phase is SubscriptionPhase.IDLE:
            return AckStatus.AGAIN
        return AckStatus.YES if refusal is None else AckStatus.NO

    # -- responses to the client -----------------------------------------------------------------------------------------------------------

    def forget(self, names: Iterable[str]) -> None:
        """Mark resources to be sent again although unchanged."""
        for name in names:
            self._has.pop(name, None)

    def has_pending(self, snapshot: Snapshot, *, removals: bool) -> bool:
        """Return whether the client lacks a resource. `removals`: also whether it has one that was removed."""
        return self._owed or bool(self._find_changed(snapshot, removals=removals))

    def make_offer(self, snapshot: Snapshot, nonce: str, *, removals: bool) -> XdsOffer | None:
        """The next response, under way from now on. None: there is nothing to say, or one is under way.

        `removals` False: what is no more stays for now.
        """
        if self.phase is SubscriptionPhase.OFFERED:
            return None
        changed = self._find_changed(snapshot, removals=removals)
        if not changed and not self._owed:
            return None
        removed = tuple(sorted(name for name, resource in changed.items() if resource is None))
        resources = tuple(resource for resource in changed.values() if resource is not None)
        names = tuple(resource.name for resource in resources)
        self._has.update(changed)
        for name in removed:
            if name not in self._names:
                del self._has[name]
        if self._whole:
            resources = tuple(resource for resource in self._has.values() if resource is not None)
        self.phase, self._owed = SubscriptionPhase.OFFERED, False
        self._nonce, self._version = nonce, snapshot.versions[self.type_url]
        return XdsOffer(nonce, self._version, resources, removed, names)

    def _find_changed(self, snapshot: Snapshot, *, removals: bool) -> dict[str, Resource | None]:
        """Return the resources that the client does not have in this version. None: the resource was deleted."""
        there = snapshot.resources[self.type_url]
        changed: dict[str, Resource | None] = {}
        for name in self._names | there.keys() | self._has.keys() if self._everything else self._names:
            resource = there.get(name)
            if name not in self._has:
                if resource is not None or self._supports_removal(name):
                    changed[name] = resource
                continue
            had = self._has[name]
            if resource is None:
                if had is not None and removals and (self._delta or self._whole):
                    changed[name] = None
            elif had is None or had.version != resource.version:
                changed[name] = resource
        return changed

    def _supports_removal(self, name: str) -> bool:
        return self._delta and name in self._names


def _check_length(names: set[str]) -> set[str]:
    if len(names) > _MOST_NAMES:
        raise ValueError(f"more than {_MOST_NAMES} resources of one type are asked for")
    return names


def _check_count(known: Mapping[str, str]) -> Mapping[str, str]:
    _check_length(set(known))
    return known
