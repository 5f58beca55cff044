"""Which node is picked: strategies against a plain scan, and the filter's reasons."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from din_extproc.domain.membership import Heartbeat, HeartbeatReading, NodeState
from din_extproc.domain.node import Endpoint, LongTail, Node, Pool
from din_extproc.domain.usage import NodePace
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.schedule.load import ChangeLog, LoadModel, NodeLease
from din_extproc.schedule.pick import STRATEGIES, Demand, NodeShape, build_ranking, filter_shapes, group_by_shape
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.sample import SAMPLE_SIZE, sample
from tests.support.steps import lines_run

ASK = PlacementRequest(prompt_tokens=100, output_tokens=50, now=0.0, chance=7, prefix=99)


def node(number: int, *, max_seq_len: int = 4096, version: str = "2025.3.1", max_concurrency: int = 8) -> Node:
    return Node(
        id=f"gpu-{number}",
        endpoint=Endpoint("10.0.0.1", 1 + number),
        model="m",
        version=version,
        dtype="bf16",
        compute_capability="9.0",
        tp_world_size=1,
        max_seq_len=max_seq_len,
        max_concurrency=max_concurrency,
    )


def pool(scheduler, long_tail=None, **options):
    return Pool(
        name="p", model="m", served_model="m", engine="vllm", scheduler=scheduler, nodes=(), scheduler_options=options, long_tail=long_tail
    )


def strategy(name, nodes, load=None, **options):
    return build_ranking(pool(name, **options), tuple(nodes), load or LoadModel()).strategy


def taken(node_id, tokens=100, **more):
    return NodeLease(node_id, tokens, 0, **more)


def ids(picked):
    return [each.id for each in picked]


def reading(at=0.0, **fields):
    return HeartbeatReading(Heartbeat(state=NodeState.READY, sequence=1, **fields), at)


@pytest.mark.parametrize(("cached_share", "stays"), [(None, True), (0.0, False), (0.3, True), (0.9, True)])
def test_a_prefix_stays_at_a_busier_node_only_if_its_cache_brings_something(cached_share, stays):
    """The node is 1.3 times slower: within the headroom of 1.5, beyond the quarter of it that a cache without hits keeps."""
    nodes, load = [node(0), node(1)], LoadModel()
    ask = PlacementRequest(prompt_tokens=1000, output_tokens=0, now=0.0, prefix=99)
    for each in nodes:
        load.on_reading(each.id, reading(prefill_rate=1000.0))
    home = strategy("prefix_affinity", nodes, load, headroom=1.5).pick(1, ask)[0]
    load.on_reading(home.id, reading(prefill_rate=1000.0 / 1.3, cached_share=cached_share))
    assert (strategy("prefix_affinity", nodes, load, headroom=1.5).pick(1, ask)[0] is home) is stays


def test_a_prefix_stays_at_a_much_busier_node_while_its_cache_saves_more():
    nodes, load = [node(0), node(1)], LoadModel()
    ask = PlacementRequest(prompt_tokens=1000, output_tokens=0, now=0.0, prefix=99)
    for each in nodes:
        load.on_reading(each.id, reading(prefill_rate=1000.0))
    home = strategy("prefix_affinity", nodes, load).pick(1, ask)[0]
    load.on_reading(home.id, reading(prefill_rate=500.0))
    assert strategy("prefix_affinity", nodes, load).pick(1, ask)[0] is not home
    load.on_reading(home.id, reading(prefill_rate=500.0, cached_share=0.8))
    assert strategy("prefix_affinity", nodes, load).pick(1, ask)[0] is home


def demand(
    tokens: int, version: str = "", accepts=lambda _version: True, at_least: int | None = None, at_most: int | None = None
) -> Demand:
    return Demand(
        tokens=tokens,
        min_tokens=tokens if at_least is None else at_least,
        max_tokens=tokens if at_most is None else at_most,
        version=version,
        accepts=accepts,
    )


def test_near_a_boundary_the_node_that_surely_fits_is_preferred():
    shapes = (NodeShape("1", 4096), NodeShape("1", 8192))
    assert filter_shapes(shapes, demand(3000, at_most=3900)) == shapes
    assert filter_shapes(shapes, demand(3900, at_most=5000)) == shapes[1:]
    assert filter_shapes(shapes, demand(8000, at_least=5600, at_most=10_400)) == shapes[1:], "none surely fits: the longest"
    assert filter_shapes(shapes, demand(9000, at_least=6300, at_most=11_700)) == shapes[1:]
    assert isinstance(filter_shapes(shapes, demand(12_000, at_least=8400, at_most=15_600)), Refusal)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_single_node_is_never_named_twice(name):
    one = strategy(name, [node(0)])
    assert ids(one.pick(3, ASK)) == ["gpu-0"]
    assert ids(one.pick(3, ASK)) == ["gpu-0"]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("many", [3, 40])
def test_three_different_nodes_are_named_in_order(name, many):
    found = strategy(name, [node(n) for n in range(many)]).pick(3, ASK)
    assert len({each.id for each in found}) == 3


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_node_at_its_concurrency_comes_last_but_comes(name):
    load = LoadModel()
    nodes = [node(0, max_concurrency=1), node(1), node(2)]
    ranked = strategy(name, nodes, load)
    load.add_lease(taken("gpu-0", 1), 0.0)
    assert [ids(ranked.pick(3, replace(ASK, chance=n)))[-1] for n in range(5)] == ["gpu-0"] * 5


@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_idle_nodes_share_alike(name):
    nodes = [node(n) for n in range(5)]
    ranked = strategy(name, nodes)
    firsts = [ranked.pick(1, replace(ASK, chance=hash(f"r-{n}"), prefix=n + 1))[0].id for n in range(1000)]
    counts = [firsts.count(each.id) for each in nodes]
    assert min(counts) > 100, counts


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_cost_of_a_pick_does_not_grow_with_the_number_of_nodes(name):
    """Ten thousand nodes against ten, with loads and heartbeats in between; counted in lines of Python that are run."""

    def cost(count):
        load = LoadModel()
        nodes = tuple(node(n) for n in range(count))
        ranked = strategy(name, nodes, load)
        ticks = iter(range(sys.maxsize))

        def one():
            ask = replace(ASK, chance=next(ticks), prefix=next(ticks))
            has = taken(ranked.pick(3, ask)[0].id)
            load.add_lease(has, 0.0)
            load.on_reading(has.node_id, reading(tokens_in_use=100, running=1))
            load.remove_lease(has)

        one()
        return lines_run(lambda: [one() for _ in range(200)])

    assert cost(10_000) < 2 * cost(10)


def test_round_robin_takes_every_node_in_turn_and_names_the_next_ones_for_a_retry():
    ranked = strategy("round_robin", [node(n) for n in range(3)])
    picks = [ids(ranked.pick(2, ASK)) for _ in range(4)]
    assert picks == [["gpu-0", "gpu-1"], ["gpu-1", "gpu-2"], ["gpu-2", "gpu-0"], ["gpu-0", "gpu-1"]]


def test_token_available_takes_the_node_with_the_most_room():
    load = LoadModel()
    ranked = strategy("token_available", [node(0, max_seq_len=1000), node(1, max_seq_len=4000), node(2, max_seq_len=2000)], load)
    assert ids(ranked.pick(3, ASK)) == ["gpu-1", "gpu-2", "gpu-0"]
    load.add_lease(taken("gpu-1", 2500), 0.0)
    assert ids(ranked.pick(2, ASK)) == ["gpu-2", "gpu-1"]
    load.remove_lease(taken("gpu-1", 2500))
    assert ids(ranked.pick(1, ASK)) == ["gpu-1"]


def test_what_others_have_at_a_node_counts_and_own_requests_correct_it_until_the_next_heartbeat():
    load = LoadModel()
    ranked = strategy("token_available", [node(0), node(1)], load)
    load.add_lease(taken("gpu-0", 300), 0.0)
    load.on_reading("gpu-0", reading(tokens_in_use=300, running=1))  # the own one
    load.on_reading("gpu-1", reading(tokens_in_use=1000, running=2))  # somebody else's
    assert ids(ranked.pick(1, ASK)) == ["gpu-0"]
    load.add_lease(taken("gpu-0", 800), 0.0)
    assert load.node_load("gpu-0").tokens_in_use == 1100
    assert ids(ranked.pick(1, ASK)) == ["gpu-1"]
    load.on_reading("gpu-1", reading(tokens_in_use=4000, running=7))
    assert ids(ranked.pick(1, ASK)) == ["gpu-0"]
    load.on_reading("gpu-1", reading(tokens_in_use=0, running=0))
    assert ids(ranked.pick(1, ASK)) == ["gpu-1"]


def pace(node_id, *, at=0.0, p99_ms=1000.0, **more):
    return NodePace(node_id=node_id, at=at, p99_ms=p99_ms, seconds=1.0, **more)


def test_latency_ewma_takes_the_quick_node_until_enough_wait_there():
    load = LoadModel()
    ranked = strategy("latency_ewma", [node(0), node(1)], load)
    load.on_paces([pace("gpu-0", p99_ms=100), pace("gpu-1", p99_ms=390)])
    picks = []
    for _ in range(5):
        picks.append(ranked.pick(1, ASK)[0].id)
        load.add_lease(taken(picks[-1]), 0.0)
    assert picks == ["gpu-0", "gpu-0", "gpu-0", "gpu-1", "gpu-0"]


def test_a_stale_latency_fades_toward_what_is_usual():
    load = LoadModel()
    nodes = [node(0), node(1)]
    ranked = strategy("latency_ewma", nodes, load, half_life_s=10)
    load.on_paces([pace("gpu-0", p99_ms=100), pace("gpu-1", p99_ms=500)])
    seen = [[ranked.score(each, replace(ASK, now=now))[0] for each in nodes] for now in (0.0, 10.0, 20.0, 1000.0)]
    assert seen == [pytest.approx(pair) for pair in ([100, 500], [200, 400], [250, 350], [300, 300])]


def test_a_node_of_which_nothing_is_known_is_taken_for_a_usual_one():
    load = LoadModel()
    ranked = strategy("predicted_time", [node(n) for n in range(3)], load)
    for number, rate in ((0, 1000.0), (1, 3000.0)):
        load.on_reading(f"gpu-{number}", reading(prefill_rate=rate, decode_rate=50.0, running=1))
        load.on_reading(f"gpu-{number}", reading(running=0))
    order = ids(ranked.pick(3, PlacementRequest(3000, 1, 0.0)))
    assert order == ["gpu-1", "gpu-2", "gpu-0"]


def test_predicted_time_counts_prompt_output_and_those_in_line():
    load = LoadModel()
    nodes = [node(0, max_concurrency=2), node(1, max_concurrency=2)]
    ranked = strategy("predicted_time", nodes, load)
    load.on_reading("gpu-0", reading(prefill_rate=10_000.0, decode_rate=20.0, running=1, waiting=0))  # reads quickly, writes slowly
    load.on_reading("gpu-1", reading(prefill_rate=1_000.0, decode_rate=100.0, running=1, waiting=0))
    assert ids(ranked.pick(1, PlacementRequest(4000, 10, 1.0))) == ["gpu-0"]
    assert ids(ranked.pick(1, PlacementRequest(100, 500, 1.0))) == ["gpu-1"]
    load.add_lease(NodeLease("gpu-1", 8000, 500), 1.0)  # eight seconds of prompt before the next
    assert ranked.score(nodes[1], PlacementRequest(100, 500, 1.0))[0] > 8 + ranked.score(nodes[1], PlacementRequest(100, 500, 9.0))[0] - 1
    assert ids(ranked.pick(1, PlacementRequest(100, 100, 1.0))) == ["gpu-0"]


def test_predicted_time_learns_from_exchanges_where_there_is_no_agent():
    load = LoadModel()
    ranked = strategy("predicted_time", [node(0), node(1)], load)
    load.on_paces([pace("gpu-0", prefill_rate=500.0, stream_rate=10.0), pace("gpu-1", prefill_rate=500.0, stream_rate=30.0)])
    assert ids(ranked.pick(2, ASK)) == ["gpu-1", "gpu-0"]
    load.on_reading("gpu-0", reading(prefill_rate=500.0, decode_rate=90.0, running=1))  # what clients saw counts more
    load.on_reading("gpu-0", reading(running=0))
    assert ids(ranked.pick(2, ASK)) == ["gpu-1", "gpu-0"]


def test_a_full_key_value_memory_makes_a_node_wait_for_others_to_leave():
    load = LoadModel()
    ranked = strategy("predicted_time", [node(0), node(1)], load)
    load.on_reading("gpu-0", reading(tokens_in_use=9_950, kv_cache_usage=0.995, running=4))
    load.on_reading("gpu-1", reading(tokens_in_use=9_950, kv_cache_usage=0.5, running=4))
    assert ids(ranked.pick(1, ASK)) == ["gpu-1"]


def test_one_prefix_stays_at_one_node_in_every_process_and_moves_only_while_that_has_no_headroom():
    nodes = [node(n) for n in range(6)]
    first, second = LoadModel(), LoadModel()
    ranked, elsewhere = strategy("prefix_affinity", nodes, first), strategy("prefix_affinity", nodes[::-1], second)
    homes = {prefix: ranked.pick(1, replace(ASK, prefix=prefix))[0].id for prefix in range(1, 40)}
    assert homes == {prefix: elsewhere.pick(1, replace(ASK, prefix=prefix, chance=prefix))[0].id for prefix in range(1, 40)}
    assert len(set(homes.values())) == 6
    home = homes[1]
    for _ in range(6):
        first.add_lease(taken(home, 3000), 0.0)
    assert ranked.pick(1, replace(ASK, prefix=1))[0].id != home
    for _ in range(6):
        first.remove_lease(taken(home, 3000))
    assert ranked.pick(1, replace(ASK, prefix=1, now=60.0))[0].id == home


def test_a_node_that_goes_moves_only_its_own_prefixes():
    nodes = [node(n) for n in range(6)]
    before, after = strategy("prefix_affinity", nodes), strategy("prefix_affinity", nodes[1:])
    for prefix in range(1, 60):
        ask = replace(ASK, prefix=prefix)
        home = before.pick(1, ask)[0].id
        assert home in {"gpu-0", after.pick(1, ask)[0].id}


@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.lists(st.integers(100, 5000), min_size=1, max_size=SAMPLE_SIZE),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 3000), st.sampled_from(["take", "give", "hear", "learn"])), max_size=40),
)
def test_the_ranking_never_differs_from_a_plain_scan_of_the_scores(name, lengths, steps):
    nodes = tuple(node(n, max_seq_len=length, max_concurrency=3) for n, length in enumerate(lengths))
    load = LoadModel()
    ranked = strategy(name, nodes, load)
    held = []
    for at, (which, tokens, step) in enumerate(steps):
        node_id = nodes[which % len(nodes)].id
        if step == "give" and held:
            load.remove_lease(held.pop(which % len(held)))
        elif step == "hear":
            load.on_reading(node_id, reading(tokens_in_use=tokens, running=tokens % 4, prefill_rate=float(tokens), decode_rate=9.0))
        elif step == "learn":
            load.on_paces([pace(node_id, at=float(at), p99_ms=tokens, prefill_rate=float(tokens))])
        else:
            held.append(taken(node_id, tokens))
            load.add_lease(held[-1], float(at))
        ask = PlacementRequest(prompt_tokens=tokens, output_tokens=which, now=float(at), chance=at * 7919)
        scores = {each.id: (load.node_load(each.id).is_full(each), ranked.score(each, ask)[0]) for each in nodes}
        picked = [scores[each.id] for each in ranked.pick(3, ask)]
        assert picked == sorted(scores.values())[: len(picked)]
        assert len(picked) == min(3, len(nodes))


@given(st.integers(1, 10_000), st.integers(1, 16), st.integers())
def test_a_sample_has_different_members_of_the_population(population, size, chance):
    found = sample(population, size, chance)
    assert len(set(found)) == len(found) == min(population, size)
    assert 0 <= min(found) <= max(found) < population
    assert found == sample(population, size, chance)


def test_every_member_of_a_large_population_is_sampled_sooner_or_later():
    counts = [0] * 1000
    for chance in range(20_000):
        for index in sample(1000, SAMPLE_SIZE, chance):
            counts[index] += 1
    assert min(counts) > 80
    assert max(counts) < 260


TAIL = LongTail(over_s=10.0, share=0.25, timeout_ms=120_000)


def test_long_requests_hold_at_most_their_share_of_the_slots_and_then_are_refused():
    load = LoadModel()
    nodes = (node(0), node(1))
    gate = build_ranking(pool("token_available", TAIL), nodes, load).tail
    load.on_reading("gpu-0", reading(prefill_rate=1000.0, decode_rate=50.0, running=1))
    assert not gate.is_long(1000, 400)
    long = PlacementRequest(2000, 500, 0.0)
    assert gate.is_long(2000, 500)
    for _ in range(4):  # a quarter of eight slots, twice
        picked = gate.pick(3, long)
        load.add_lease(taken(picked[0].id, long=True), 0.0)
    assert {load.node_load(each.id).long_requests for each in nodes} == {2}
    refused = gate.pick(3, long)
    assert isinstance(refused, Refusal)
    assert refused.code is RefusalCode.INSUFFICIENT_GPU_CAPACITY
    assert refused.retry_after_ms
    load.remove_lease(taken("gpu-1", long=True))
    assert ids(gate.pick(3, long)) == ["gpu-1"]


def test_a_node_with_few_slots_has_one_for_a_long_request():
    gate = build_ranking(pool("round_robin", TAIL), (node(0, max_concurrency=2),), LoadModel()).tail
    assert ids(gate.pick(1, PlacementRequest(1, 10_000, 0.0))) == ["gpu-0"]


def test_a_load_given_back_leaves_nothing_behind():
    load = LoadModel()
    for _ in range(3):
        load.add_lease(taken("a", 7), 0.0)
    assert load.tokens_in_flight() == {"a": 21}
    for _ in range(3):
        load.remove_lease(taken("a", 7))
    assert load.tokens_in_flight() == {}
    assert load.node_load("a").requests_in_use == 0


def test_nodes_that_are_gone_are_forgotten_once_nothing_is_under_way_there():
    load = LoadModel()
    load.add_lease(taken("gone"), 0.0)
    load.on_reading("stays", reading(running=3))
    load.retain({"stays"})
    assert load.tokens_in_flight() == {"gone": 100}
    load.remove_lease(taken("gone"))
    before = load.node_load("gone")
    load.retain({"stays"})
    assert load.node_load("gone") is not before
    assert load.node_load("stays").requests_in_use == 3


def test_a_reader_that_was_away_too_long_must_read_everything():
    log = ChangeLog(limit=4)
    for name in "abcdef":
        log.append(name)
    assert log.read_from(0) is None
    assert log.read_from(log.end - 2) == ["e", "f"]
    assert log.read_from(log.end) == []


def test_the_filter_names_what_no_node_has():
    shapes = group_by_shape((node(0, max_seq_len=1000, version="2025.3.1"), node(1, max_seq_len=2000, version="2025.4.0")))
    assert filter_shapes(shapes, demand(1500)) == (NodeShape("2025.4.0", 2000),)
    too_long = filter_shapes(shapes, demand(2001))
    assert too_long.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED
    assert "2000" in too_long.message
    wrong = filter_shapes(shapes, demand(10, ">=2026", lambda version: version >= "2026"))
    assert wrong.code is RefusalCode.VERSION_MISMATCH
    assert "2025.3.1, 2025.4.0" in wrong.message
    assert filter_shapes((), demand(1)).code is RefusalCode.NO_HEALTHY_NODE


def test_an_estimate_alone_refuses_nobody_but_a_certain_length_does():
    shapes = group_by_shape((node(0, max_seq_len=1000), node(1, max_seq_len=2000)))
    assert filter_shapes(shapes, demand(2100, at_least=1900)) == (NodeShape("2025.3.1", 2000),)
    assert filter_shapes(shapes, demand(2100, at_least=2001)).code is RefusalCode.CONTEXT_LENGTH_EXCEEDED


def test_nodes_of_one_shape_stay_together_in_the_pools_order():
    nodes = (node(0), node(1, max_seq_len=1000), node(2))
    assert group_by_shape(nodes) == {NodeShape("2025.3.1", 4096): (nodes[0], nodes[2]), NodeShape("2025.3.1", 1000): (nodes[1],)}
