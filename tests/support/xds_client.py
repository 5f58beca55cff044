"""A client of discovery as Envoy is one: asks for all clusters, then for their nodes, and keeps the responses. It answers to clusters
only when it has their nodes.

Rule: it uses only the protocol's messages, none of the product's classes.
"""

from dataclasses import dataclass, field

from google.protobuf import any_pb2

from din_extproc._proto.envoy.service.discovery.v3.discovery_pb2 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
    DiscoveryRequest,
    DiscoveryResponse,
)

_CONFIG = "type.googleapis.com/envoy.config."
CLUSTER, ASSIGNMENT = f"{_CONFIG}cluster.v3.Cluster", f"{_CONFIG}endpoint.v3.ClusterLoadAssignment"
ROUTES = f"{_CONFIG}route.v3.RouteConfiguration"
SERVICE = "/envoy.service.discovery.v3.AggregatedDiscoveryService"


@dataclass
class XdsClient:
    """One stream. `name_of`: returns the name of a serialised resource, which SotW responses do not carry."""

    delta: bool
    name_of: dict[bytes, str] = field(default_factory=dict)
    refuses: frozenset[bytes] = frozenset()
    """Serialised resources that it rejects."""
    has: dict[str, dict[str, bytes]] = field(default_factory=lambda: {CLUSTER: {}, ASSIGNMENT: {}, ROUTES: {}})
    nodes_for: set[str] = field(default_factory=set)
    """Clusters whose nodes it has requested."""
    order: list[tuple[str, frozenset[str], frozenset[str]]] = field(default_factory=list)
    """Of every response: its type, the received names, the removed names."""
    dangling: list[str] = field(default_factory=list)
    """Assignments that arrived before their cluster."""

    warming: set[str] = field(default_factory=set)
    """Clusters without nodes so far."""
    held_back: list[bytes] = field(default_factory=list)
    """Acknowledgements of clusters that are not warm."""

    @property
    def path(self) -> str:
        return f"{SERVICE}/{'Delta' if self.delta else 'Stream'}AggregatedResources"

    def opening(self) -> list[bytes]:
        """Return its first requests."""
        return [self._ask(CLUSTER, (), first=True), self._ask(ROUTES, ("din",))]

    def take(self, data: bytes) -> list[bytes]:
        """Handle a response and return the requests that follow."""
        response = (DeltaDiscoveryResponse if self.delta else DiscoveryResponse).FromString(data)
        kind = response.type_url
        sent = self._read_resources(response)
        removed = set(response.removed_resources) if isinstance(response, DeltaDiscoveryResponse) else set()
        if kind == CLUSTER and not self.delta:
            removed = self.has[kind].keys() - sent.keys()
        self.order.append((kind, frozenset(sent), frozenset(removed)))
        if kind == ASSIGNMENT:
            self.dangling += sorted(sent.keys() - self.has[CLUSTER].keys())
        refused = self.refuses & set(sent.values())
        kept, before = self.has[kind], dict(self.has[kind])
        wanted = self.nodes_for if kind == ASSIGNMENT else sent.keys()  # nodes of a cluster that went meanwhile are nobody's
        kept.update({name: value for name, value in sent.items() if value not in refused and name in wanted})
        for name in removed:
            kept.pop(name, None)
        answer = self._answer(kind, response.nonce, refused=bool(refused))
        if kind == ROUTES:
            return [answer]
        if kind == ASSIGNMENT:
            self.warming -= sent.keys()
            return [answer, *self._warm()]
        new = {name for name, value in sent.items() if value not in refused and value != before.get(name)}
        self.warming = (self.warming | new) & kept.keys()
        self.held_back.append(answer)
        return [*self._follow(), *self._warm()]

    def _warm(self) -> list[bytes]:
        """Return the delayed acknowledgements once no cluster is missing nodes."""
        if self.warming:
            return []
        held, self.held_back = self.held_back, []
        return held

    def give_up(self) -> list[bytes]:
        """Accept clusters without nodes, as Envoy does after a while."""
        self.warming.clear()
        return self._warm()

    def _read_resources(self, response) -> dict[str, bytes]:
        if isinstance(response, DeltaDiscoveryResponse):
            return {each.name: each.resource.value for each in response.resources}
        found = {}
        for packed in response.resources:
            assert isinstance(packed, any_pb2.Any) or packed.type_url == response.type_url
            found[self.name_of[packed.value]] = packed.value
        return found

    def _follow(self) -> list[bytes]:
        """Request the nodes of the current clusters."""
        before, self.nodes_for = self.nodes_for, set(self.has[CLUSTER])
        for name in before - self.nodes_for:
            self.has[ASSIGNMENT].pop(name, None)
        if before == self.nodes_for:
            return []
        if self.delta:
            request = DeltaDiscoveryRequest(
                type_url=ASSIGNMENT,
                resource_names_subscribe=sorted(self.nodes_for - before),
                resource_names_unsubscribe=sorted(before - self.nodes_for),
            )
            return [request.SerializeToString()]
        return [self._ask(ASSIGNMENT, sorted(self.nodes_for))]

    def _ask(self, kind: str, names, *, first: bool = False) -> bytes:
        if self.delta:
            request = DeltaDiscoveryRequest(type_url=kind, resource_names_subscribe=names)
        else:
            request = DiscoveryRequest(type_url=kind, resource_names=names)
        if first:
            request.node.id, request.node.cluster = "envoy-1", "din"
        return request.SerializeToString()

    def _answer(self, kind: str, nonce: str, *, refused: bool) -> bytes:
        if self.delta:
            request = DeltaDiscoveryRequest(type_url=kind, response_nonce=nonce)
        else:
            names = {CLUSTER: (), ASSIGNMENT: sorted(self.nodes_for), ROUTES: ("din",)}[kind]
            request = DiscoveryRequest(type_url=kind, response_nonce=nonce, resource_names=names)
        if refused:
            request.error_detail.message = "I will not have it"
        return request.SerializeToString()
