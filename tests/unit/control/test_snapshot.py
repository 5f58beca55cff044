"""What Envoys are served: assignments out of nodes, versions out of content."""

from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment as AsEnvoyReadsIt
from google.protobuf import any_pb2
from google.protobuf.json_format import MessageToDict

from din_extproc._proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from din_extproc.control.assignment import make_assignment
from din_extproc.control.endpoint_metadata import WHOLE_WITH_ONE
from din_extproc.control.snapshot import ASSIGNMENT, CLUSTER, ROUTES, Assigner, Blueprint, Pair, Resource
from din_extproc.domain.node import Endpoint, Node


def node(name: str, address: str = "10.0.0.1:8000", version: str = "2025.3.1") -> Node:
    return Node(
        id=name, endpoint=Endpoint.parse(address), model="m", version=version, dtype="bf16",
        compute_capability="9.0", tp_world_size=1, max_seq_len=8192, max_concurrency=4,
    )  # fmt: skip


def plan(*pools: str, fail_open: str | None = None) -> Blueprint:
    clusters = tuple(Resource.of(pool, CLUSTER, pool.encode()) for pool in pools)
    return Blueprint(clusters, Resource.of("din", ROUTES, b"routes"), fail_open)


def paired(*pairs: tuple[str, str], pools: str = "pqr") -> Blueprint:
    """A plan of these pools and pairs."""
    made = tuple(Pair(Resource.of("+".join(pair), CLUSTER, b"pair"), *pair) for pair in pairs)
    plain = plan(*pools)
    return Blueprint(plain.clusters, plain.routes, None, made)


def read(resource: Resource) -> ClusterLoadAssignment:
    packed = any_pb2.Any.FromString(resource.packed)
    assert packed.type_url == ASSIGNMENT
    return ClusterLoadAssignment.FromString(packed.value)


def test_an_assignment_names_its_nodes_with_what_their_answers_are_marked_with():
    snapshot = Assigner().make_snapshot(plan("p"), {"p": (node("a"), node("b", "[fd00::7]:8001"))})
    made = read(snapshot.resources[ASSIGNMENT]["p"])
    assert made.cluster_name == "p"
    (locality,) = made.endpoints
    first, second = locality.lb_endpoints
    assert MessageToDict(first.endpoint.address) == {"socketAddress": {"address": "10.0.0.1", "portValue": 8000}}
    assert MessageToDict(second.endpoint.address) == {"socketAddress": {"address": "fd00::7", "portValue": 8001}}
    marks = {"node_id": "a", "model": "m", "version": "2025.3.1", "dtype": "bf16", "pool": "p"}
    assert MessageToDict(first.metadata) == {"filterMetadata": {"din": marks}}


def test_nodes_of_the_fail_open_pool_bear_the_mark_of_answers_that_nobody_admitted():
    assigner = Assigner()
    nodes = {"p": (node("a"),), "q": (node("b"),)}
    snapshot = assigner.make_snapshot(plan("p", "q", fail_open="p"), nodes)
    marked = [b"limits_bypassed" in snapshot.resources[ASSIGNMENT][pool].packed for pool in "pq"]
    assert marked == [True, False]
    snapshot = assigner.make_snapshot(plan("p", "q", fail_open="q"), nodes)
    assert [b"limits_bypassed" in snapshot.resources[ASSIGNMENT][pool].packed for pool in "pq"] == [False, True]


def test_every_cluster_has_an_assignment_be_it_empty():
    snapshot = Assigner().make_snapshot(plan("p", "q"), {"p": (node("a"),), "stranger": (node("b"),)})
    assert snapshot.resources[ASSIGNMENT].keys() == snapshot.resources[CLUSTER].keys() == {"p", "q"}
    assert not any(locality.lb_endpoints for locality in read(snapshot.resources[ASSIGNMENT]["q"]).endpoints)


def test_only_the_pool_that_changed_is_made_anew_and_only_its_version_is_another():
    assigner = Assigner()
    nodes = {"p": (node("a"), node("b", "10.0.0.2:1")), "q": (node("c", "10.0.0.3:1"),)}
    before = assigner.make_snapshot(plan("p", "q"), nodes)
    after = assigner.make_snapshot(plan("p", "q"), {**nodes, "p": (node("a", version="2026.1.0"), nodes["p"][1])})
    assert after.resources[ASSIGNMENT]["q"] is before.resources[ASSIGNMENT]["q"]
    assert after.resources[ASSIGNMENT]["p"].version != before.resources[ASSIGNMENT]["p"].version
    assert {each for each in after.versions if after.versions[each] != before.versions[each]} == {ASSIGNMENT}


def test_an_assignment_made_in_steps_is_the_one_made_at_once():
    steps, final = Assigner(), (node("a"), node("d", "10.0.0.4:1"), node("b", "10.0.0.2:1", "2"))
    for nodes in [(node("a"),), (), (node("a"), node("b", "10.0.0.2:1")), (node("b", "10.0.0.2:1"), node("a")), final]:
        stepped = steps.make_snapshot(plan("p"), {"p": nodes})
    assert stepped == Assigner().make_snapshot(plan("p"), {"p": final})


def test_the_same_content_has_the_same_version_in_another_process():
    resource = Resource.of("p", CLUSTER, b"content")
    assert resource.version == "ed7002b439e9ac84"


def test_a_blueprint_keeps_the_clusters_of_its_predecessor_that_it_has_not_itself():
    former, later = plan("p", "old"), plan("p", "new", fail_open="new")
    kept = later.keep_from(former)
    assert [cluster.name for cluster in kept.clusters] == ["p", "new", "old"]
    assert (kept.routes, kept.fail_open_pool) == (later.routes, "new")


def test_a_pair_s_cluster_has_the_nodes_of_both_pools_each_with_its_own_marks_and_the_second_ones_next_in_line():
    nodes = {"p": (node("a"),), "q": (node("b", "10.0.0.2:1"), node("c", "10.0.0.3:1"))}
    made = read(Assigner().make_snapshot(paired(("p", "q")), nodes).resources[ASSIGNMENT]["p+q"])
    assert made.cluster_name == "p+q"
    facts = [[each.metadata.filter_metadata["din"] for each in group.lb_endpoints] for group in made.endpoints]
    assert [[(each["node_id"], each["pool"]) for each in group] for group in facts] == [[("a", "p")], [("b", "q"), ("c", "q")]]
    assert [group.priority for group in AsEnvoyReadsIt.parse(made.SerializeToString()).endpoints] == [0, 1]


def test_a_pair_is_made_anew_when_one_of_its_pools_changes_and_only_then():
    assigner, plans = Assigner(), paired(("p", "q"), ("q", "r"), ("r", "q"))
    nodes = {"p": (node("a"),), "q": (node("b", "10.0.0.2:1"),), "r": ()}
    before = assigner.make_snapshot(plans, nodes).resources[ASSIGNMENT]
    assert read(before["q+r"]).endpoints[1].lb_endpoints == []
    after = assigner.make_snapshot(plans, {**nodes, "r": (node("d", "10.0.0.4:1"),)}).resources[ASSIGNMENT]
    assert after["p+q"] is before["p+q"]
    assert {name for name in after if after[name] is not before[name]} == {"r", "q+r", "r+q"}
    assert after["q+r"] == Assigner().make_snapshot(plans, {**nodes, "r": (node("d", "10.0.0.4:1"),)}).resources[ASSIGNMENT]["q+r"]


def test_a_pair_that_is_no_more_is_kept_as_long_as_its_pools():
    former, later = paired(("p", "q")), paired(("p", "r"), pools="pr")
    kept = later.keep_from(former)
    assert [pair.cluster.name for pair in kept.pairs] == ["p+r", "p+q"]
    snapshot = Assigner().make_snapshot(kept, {"p": (node("a"),), "q": (node("b", "10.0.0.2:1"),)})
    assert snapshot.resources[ASSIGNMENT].keys() == snapshot.resources[CLUSTER].keys() == {"p", "r", "q", "p+r", "p+q"}


def test_one_node_that_is_well_keeps_all_requests_of_its_pool() -> None:
    parsed = AsEnvoyReadsIt.parse(make_assignment("p", []))
    assert parsed.policy is not None
    assert parsed.policy.overprovisioning_factor == WHOLE_WITH_ONE
