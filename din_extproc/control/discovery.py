"""One Envoy's stream of aggregated discovery: serialised requests in, serialised responses out, in the order that breaks nothing.

Invariant: clusters precede their nodes, and routes follow once the client has responded to both; a cluster is removed last, when no
route refers to it, and its nodes after it.
Nodes never wait for the answer to their cluster: Envoy gives it only when it has them, which makes it
the sign that the cluster can be used.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError
from msgspec import Struct

from din_extproc._proto.envoy.config.core.v3 import base_pb2
from din_extproc._proto.envoy.service.discovery.v3.discovery_pb2 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
    DiscoveryRequest,
    DiscoveryResponse,
)
from din_extproc.control.protobuf_fields import encode_field, encode_head
from din_extproc.control.snapshot import ASSIGNMENT, CLUSTER, ROUTES, SERVED, Resource, Snapshot
from din_extproc.control.subscription import SubscriptionPhase, XdsOffer, XdsSubscription

_RESOURCES = 2
"""The number of the field, in responses of both kinds."""
LABELS = {CLUSTER: "clusters", ASSIGNMENT: "endpoints", ROUTES: "routes"}
"""Readable names of the types."""


class TypeStatus(Struct, frozen=True):
    """Status of one type of a client."""

    acked: str
    """Version of the last ACK; "" before the first."""
    in_sync: bool
    """The client has acknowledged or rejected all current resources."""
    refusal: str
    """Error of the latest NACK; "" after an ACK."""


class ClientStatus(Struct, frozen=True):
    """Status of a client."""

    id: str
    cluster: str
    envoy: str
    """Its program and version."""
    protocol: str
    types: dict[str, TypeStatus]


class DiscoveryStream:
    """One stream.

    Args:
        snapshot: what is served.
        delta: the client uses the incremental (delta) protocol.
    """

    def __init__(self, snapshot: Snapshot, *, delta: bool) -> None:
        self.snapshot = snapshot
        self._delta = delta
        self._node = base_pb2.Node()
        self._subscriptions: dict[str, XdsSubscription] = {}
        self._offers = 0

    def receive(self, data: bytes) -> list[bytes]:
        """Handle a request. Return the responses that are due.

        Raises:
            ValueError: The message is malformed or has too many names.
        """
        try:
            request = (DeltaDiscoveryRequest if self._delta else DiscoveryRequest).FromString(data)
        except DecodeError as error:
            raise ValueError("not a discovery request") from error
        if request.HasField("node"):
            self._node = request.node  # later requests may leave it out
        if request.type_url not in SERVED:
            return []
        subscription = self._subscriptions.get(request.type_url)
        if subscription is None:
            subscription = self._subscriptions[request.type_url] = XdsSubscription(request.type_url, delta=self._delta)
        refusal = request.error_detail.message if request.HasField("error_detail") else None
        if isinstance(request, DeltaDiscoveryRequest):
            subscription.on_delta_request(
                request.resource_names_subscribe,
                request.resource_names_unsubscribe,
                request.initial_resource_versions,
                request.response_nonce,
                refusal,
            )
        else:
            subscription.on_request(request.resource_names, request.response_nonce, refusal)
        return list(self._find_due())

    def publish(self, snapshot: Snapshot) -> list[bytes]:
        """Replace the snapshot. Return the responses that are due."""
        self.snapshot = snapshot
        return list(self._find_due())

    @property
    def settled(self) -> bool:
        """The client has answered to all there is; what is no more may still have to be taken away."""
        return not any(self._is_behind(each, removals=False) for each in self._subscriptions.values())

    def status(self) -> ClientStatus:
        """For people."""
        node = self._node
        types = {
            LABELS[each.type_url]: TypeStatus(each.acked, not self._is_behind(each, removals=True), each.refusal)
            for each in self._subscriptions.values()
        }
        program = f"{node.user_agent_name} {node.user_agent_version}".strip()
        return ClientStatus(node.id, node.cluster, program, "delta" if self._delta else "state of the world", types)

    def _is_behind(self, subscription: XdsSubscription, *, removals: bool) -> bool:
        return subscription.phase is SubscriptionPhase.OFFERED or subscription.has_pending(self.snapshot, removals=removals)

    def _find_due(self) -> Iterator[bytes]:
        yield from self._make_next(CLUSTER, removals=False)
        yield from self._make_next(ASSIGNMENT, removals=False)
        for type_url in (ROUTES, CLUSTER, ASSIGNMENT):
            if any(each.phase is SubscriptionPhase.OFFERED for each in self._subscriptions.values()):
                return
            yield from self._make_next(type_url, removals=True)

    def _make_next(self, type_url: str, *, removals: bool) -> Iterator[bytes]:
        subscription = self._subscriptions.get(type_url)
        if subscription is None:
            return
        offer = subscription.make_offer(self.snapshot, str(self._offers + 1), removals=removals)
        if offer is None:
            return
        self._offers += 1
        if type_url == CLUSTER and ASSIGNMENT in self._subscriptions:
            # Envoy warms an updated cluster until it receives its endpoints again, changed or not.
            self._subscriptions[ASSIGNMENT].forget(offer.names_sent)
        yield _make_delta(type_url, offer) if self._delta else _make_state_of_the_world(type_url, offer)


def _make_state_of_the_world(type_url: str, offer: XdsOffer) -> bytes:
    response = DiscoveryResponse(version_info=offer.version, type_url=type_url, nonce=offer.nonce)
    parts = [response.SerializeToString()]
    for resource in offer.resources:
        parts += (encode_head(_RESOURCES, len(resource.packed)), resource.packed)
    return b"".join(parts)


def _make_delta(type_url: str, offer: XdsOffer) -> bytes:
    response = DeltaDiscoveryResponse(
        system_version_info=offer.version, type_url=type_url, nonce=offer.nonce, removed_resources=offer.removed
    )
    parts = [response.SerializeToString()]
    for resource in offer.resources:
        parts += _wrap_resource(resource)
    return b"".join(parts)


def _wrap_resource(resource: Resource) -> tuple[bytes, ...]:
    """The resource with its name and version, in pieces: it may be large."""
    label = encode_field(1, resource.version.encode()) + encode_field(3, resource.name.encode()) + encode_head(2, len(resource.packed))
    return encode_head(_RESOURCES, len(label) + len(resource.packed)), label, resource.packed
