"""The nodes of every pool, as they change under running decisions."""

from msgspec.structs import replace

from din_extproc.domain.membership import MembershipDelta
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.node_selector import InFlightFallback, NodeSelector, RequestSize
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.route.table import Routed
from din_extproc.route.versions import ANY
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest

SIZE = RequestSize(100, 100, 100)


def node(name, version="1.0", port=8000):
    return Node(
        id=name,
        endpoint=Endpoint("10.0.0.1", port),
        model="m",
        version=version,
        dtype="bf16",
        compute_capability="",
        tp_world_size=1,
        max_seq_len=8192,
        max_concurrency=8,
    )


def pool(name, *nodes):
    return Pool(name=name, model="m", served_model="m", engine="vllm", scheduler="round_robin", nodes=nodes)


def placed(selector, which, now=0.0):
    target = selector.select_target(Routed("", "m", "m", which, ANY, None, ANY), SIZE, now)
    return (
        target if isinstance(target, Refusal) else [each.id for each in selector.select_nodes(target, PlacementRequest(100, 10, now)).nodes]
    )


def test_a_change_reaches_the_next_decision_long_before_the_cache_would_forget():
    p = pool("p", node("s"))
    selector = NodeSelector(LoadModel(), PoolMembership.from_pools([p]).apply_delta(MembershipDelta({"p": (node("a"), node("b"))}, {})))
    assert sorted(placed(selector, p)) == ["a", "b", "s"]
    selector.on_membership(MembershipDelta({"p": (node("c"),)}, {"p": ("a",)}))
    assert sorted(placed(selector, p)) == ["b", "c", "s"]
    selector.reset(selector.members.with_pools([pool("p")]))
    assert sorted(placed(selector, p)) == ["b", "c"], "the configuration lost its own node, the others stay"
    selector.on_membership(MembershipDelta({}, {"p": ("b", "c")}))
    assert placed(selector, p).code is RefusalCode.NO_HEALTHY_NODE
    assert selector.members.get_versions("p") == frozenset()


def test_a_pool_that_did_not_change_keeps_its_turn():
    p, q = pool("p", node("a"), node("b")), pool("q", node("s"))
    selector = NodeSelector(LoadModel(), PoolMembership.from_pools([p, q]).apply_delta(MembershipDelta({"q": (node("c"),)}, {})))
    assert placed(selector, p)[0] == "a"
    selector.on_membership(MembershipDelta({}, {"q": ("c",)}))
    assert placed(selector, p)[0] == "b"


def test_versions_in_service_are_those_of_the_nodes_there_are():
    members = PoolMembership.from_pools([pool("p", node("a", "1.0"), node("b", "1.1"))])
    assert members.get_versions("p") == {"1.0", "1.1"}
    assert members.get_versions("unknown") == frozenset()
    assert members.get_nodes("unknown") == ()


def test_nodes_of_another_dtype_or_tensor_parallel_size_are_no_substitutes_and_envoy_s_retries_are_limited():
    nodes = (node("a"), node("b", port=8001), replace(node("c", port=8002), dtype="fp8"), replace(node("d", port=8003), tp_world_size=2))
    p = pool("p", *nodes)
    selector = NodeSelector(LoadModel(), PoolMembership.from_pools([p]))
    selector.in_flight = InFlightFallback(tries=2)
    target = selector.select_target(Routed("", "m", "m", p, ANY, None, ANY), SIZE, 0.0)
    picked = [selector.select_nodes(target, PlacementRequest(100, 10, 0.0)) for _ in range(8)]
    assert {(frozenset(each.id for each in found.nodes), found.most_tries) for found in picked} == {
        (frozenset("ab"), None),
        (frozenset("c"), 1),
        (frozenset("d"), 1),
    }
