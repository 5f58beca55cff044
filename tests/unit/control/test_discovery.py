"""One stream of discovery, as bytes: the order of its responses, and what is shown of its client."""

from collections import deque

import pytest

from din_extproc._proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest
from din_extproc.control.discovery import DiscoveryStream
from din_extproc.control.snapshot import SERVED, Resource, Snapshot
from tests.support.xds_client import ASSIGNMENT, CLUSTER, ROUTES, XdsClient


def moment(routes: str = "1", **pools: str) -> Snapshot:
    """A moment with these pools; each one's text is the version of its cluster and of its nodes, `1.1`."""
    clusters, assignments = {}, {}
    for name, text in pools.items():
        cluster, _, nodes = text.partition(".")
        clusters[name] = Resource.of(name, CLUSTER, f"cluster {name} {cluster}".encode())
        assignments[name] = Resource.of(name, ASSIGNMENT, f"nodes {name} {nodes}".encode())
    resources = {CLUSTER: clusters, ASSIGNMENT: assignments, ROUTES: {"din": Resource.of("din", ROUTES, f"routes din {routes}".encode())}}
    return Snapshot(resources, {kind: str(sorted(each.version for each in resources[kind].values())) for kind in SERVED})


def content(snapshot: Snapshot) -> dict[str, dict[str, bytes]]:
    """What a client that has it all has, without the packing."""
    return {kind: {name: bare(each) for name, each in found.items()} for kind, found in snapshot.resources.items()}


def bare(resource: Resource) -> bytes:
    return resource.packed[resource.packed.index(b"\x12") + 2 :]


class Names(dict):
    """The name of a resource of these tests, by its content."""

    def __missing__(self, value: bytes) -> str:
        return value.split()[1].decode()


class Link:
    """A stream and its client, without anything between them."""

    def __init__(self, snapshot: Snapshot, *, delta: bool, refuses: frozenset[bytes] = frozenset()) -> None:
        self.stream = DiscoveryStream(snapshot, delta=delta)
        self.client = XdsClient(delta, Names(), refuses)
        self.under_way: deque[bytes] = deque()
        for request in self.client.opening():
            self.under_way += self.stream.receive(request)

    def answer_all(self) -> None:
        while self.under_way or self.client.held_back:
            if self.under_way:
                self.answer_one()
            else:
                for answer in self.client.give_up():
                    self.under_way += self.stream.receive(answer)

    def answer_one(self) -> None:
        for request in self.client.take(self.under_way.popleft()):
            self.under_way += self.stream.receive(request)

    def publish(self, snapshot: Snapshot) -> None:
        self.under_way += self.stream.publish(snapshot)

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.client.order]


@pytest.fixture(params=[True, False], ids=["delta", "state of the world"])
def delta(request) -> bool:
    return request.param


def test_a_client_gets_clusters_then_their_nodes_then_routes(delta):
    link = Link(moment(p="1.1", q="1.1"), delta=delta)
    link.answer_all()
    assert link.kinds() == [CLUSTER, ASSIGNMENT, ROUTES]
    assert link.client.has == content(link.stream.snapshot)
    assert link.stream.settled


def test_a_change_of_everything_comes_in_the_order_of_dependence(delta):
    link = Link(moment(p="1.1"), delta=delta)
    link.answer_all()
    link.client.order.clear()
    link.publish(moment("2", p="2.2"))
    assert len(link.under_way) == 2
    link.answer_all()
    assert link.kinds() == [CLUSTER, ASSIGNMENT, ROUTES]


def test_a_cluster_goes_last_when_no_route_leads_there_any_more(delta):
    link = Link(moment("1", old="1.1"), delta=delta)
    link.answer_all()
    link.client.order.clear()
    link.publish(moment("2", new="1.1"))
    link.answer_all()
    names = [(kind, set(sent), set(removed)) for kind, sent, removed in link.client.order]
    added = {"new"} if delta else {"new", "old"}
    gone = (CLUSTER, set(), {"old"}) if delta else (CLUSTER, {"new"}, {"old"})
    assert names[0] == (CLUSTER, added, set())
    kinds = [kind for kind, _, _ in names]
    assert kinds.index(ROUTES) < names.index(gone)
    assert link.client.has == content(link.stream.snapshot)


def test_a_cluster_that_is_sent_again_gets_its_nodes_again(delta):
    link = Link(moment(p="1.1", q="1.1"), delta=delta)
    link.answer_all()
    link.client.order.clear()
    link.publish(moment(p="2.1", q="1.1"))
    link.answer_all()
    assert [(kind, set(sent)) for kind, sent, _ in link.client.order] == [(CLUSTER, {"p"} if delta else {"p", "q"}), (ASSIGNMENT, {"p"})]


def test_one_changed_node_is_one_response_with_one_assignment(delta):
    link = Link(moment(p="1.1", q="1.1"), delta=delta)
    link.answer_all()
    link.client.order.clear()
    link.publish(moment(p="1.1", q="1.2"))
    link.answer_all()
    assert link.client.order == [(ASSIGNMENT, frozenset({"q"}), frozenset())]


def test_a_client_that_does_not_answer_has_one_response_at_most_and_then_the_newest(delta):
    link = Link(moment(p="1.1"), delta=delta)
    link.answer_all()
    for version in range(2, 50):
        link.publish(moment(p=f"1.{version}"))
    assert len(link.under_way) == 1
    assert not link.stream.settled
    link.answer_all()
    assert link.client.has == content(moment(p="1.49"))
    assert link.stream.settled


def test_a_refusal_keeps_the_old_one_is_shown_and_does_not_hold_up_the_rest(delta):
    broken = b"cluster p 2"
    link = Link(moment(p="1.1"), delta=delta, refuses=frozenset({broken}))
    link.answer_all()
    link.publish(moment("2", p="2.2"))
    link.answer_all()
    assert link.client.has[CLUSTER]["p"] == b"cluster p 1"
    assert link.client.has[ASSIGNMENT]["p"] == b"nodes p 2"
    assert link.client.has[ROUTES]["din"] == b"routes din 2"
    statuses = link.stream.status().types
    assert statuses["clusters"].refusal == "I will not have it"
    assert statuses["clusters"].acked != link.stream.snapshot.versions[CLUSTER]
    assert statuses["endpoints"].refusal == statuses["routes"].refusal == ""
    link.publish(moment("2", p="3.2"))
    link.answer_all()
    assert link.stream.status().types["clusters"].refusal == ""
    assert link.client.has == content(link.stream.snapshot)


def test_the_node_is_remembered_from_the_first_message(delta):
    link = Link(moment(p="1.1"), delta=delta)
    link.answer_all()
    status = link.stream.status()
    assert (status.id, status.cluster, status.protocol) == ("envoy-1", "din", "delta" if delta else "state of the world")
    assert {label: each.in_sync for label, each in status.types.items()} == {"clusters": True, "endpoints": True, "routes": True}
    served = link.stream.snapshot.versions
    expected = {"clusters": served[CLUSTER], "endpoints": served[ASSIGNMENT], "routes": served[ROUTES]}
    assert {label: each.acked for label, each in status.types.items()} == expected


def test_a_client_that_reconnects_with_current_resources_gets_nothing_new():
    snapshot = moment(p="1.1", q="1.1")
    stream = DiscoveryStream(snapshot, delta=True)
    known = {name: each.version for name, each in snapshot.resources[ASSIGNMENT].items()}
    request = DeltaDiscoveryRequest(type_url=ASSIGNMENT, resource_names_subscribe=known, initial_resource_versions=known)
    (data,) = stream.receive(request.SerializeToString())
    response = DeltaDiscoveryResponse.FromString(data)
    assert (list(response.resources), list(response.removed_resources)) == ([], [])
    assert response.system_version_info == snapshot.versions[ASSIGNMENT]


def test_a_type_that_is_not_served_is_not_answered_and_harms_nothing(delta):
    stream = DiscoveryStream(moment(p="1.1"), delta=delta)
    other = "type.googleapis.com/envoy.config.listener.v3.Listener"
    request = DeltaDiscoveryRequest(type_url=other) if delta else DiscoveryRequest(type_url=other)
    assert stream.receive(request.SerializeToString()) == []
    assert stream.settled


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05abc", b"\x1a\x02\xff\xfe"])
def test_garbage_is_an_error_of_this_stream(delta, data):
    stream = DiscoveryStream(moment(), delta=delta)
    with pytest.raises(ValueError, match="discovery request"):
        stream.receive(data)
