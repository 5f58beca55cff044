"""Which node is picked: strategies against a plain scan, and the filter's reasons."""

from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.node import Endpoint, Node
from din_extproc.domain.verdict import Code
from din_extproc.schedule.load import Falls, Load
from din_extproc.schedule.pick import STRATEGIES, Demand, Shape, fitting, fleet
from din_extproc.schedule.round_robin import RoundRobin
from din_extproc.schedule.token_available import TokenAvailable


def node(number: int, *, max_seq_len: int = 4096, version: str = "2025.3.1") -> Node:
    return Node(
        id=f"gpu-{number}",
        endpoint=Endpoint("10.0.0.1", 8000 + number),
        model="m",
        version=version,
        dtype="bf16",
        compute_capability="9.0",
        tp_world_size=1,
        max_seq_len=max_seq_len,
        max_concurrency=8,
    )


def demand(tokens: int, version: str = "", accepts=lambda _version: True, at_least: int | None = None) -> Demand:
    return Demand(tokens=tokens, at_least=tokens if at_least is None else at_least, version=version, accepts=accepts)


def test_round_robin_takes_every_node_in_turn_and_names_the_next_ones_for_a_retry():
    nodes = tuple(node(n) for n in range(3))
    strategy = RoundRobin(nodes, Load())
    picks = [[n.id for n in strategy.pick(2)] for _ in range(4)]
    assert picks == [["gpu-0", "gpu-1"], ["gpu-1", "gpu-2"], ["gpu-2", "gpu-0"], ["gpu-0", "gpu-1"]]


def test_a_single_node_is_never_named_twice():
    for make in STRATEGIES.values():
        strategy = make((node(0),), Load())
        assert [n.id for n in strategy.pick(3)] == ["gpu-0"]
        assert [n.id for n in strategy.pick(3)] == ["gpu-0"]


def test_token_available_takes_the_node_with_the_most_room():
    load = Load()
    strategy = TokenAvailable((node(0, max_seq_len=1000), node(1, max_seq_len=4000), node(2, max_seq_len=2000)), load)
    assert [n.id for n in strategy.pick(3)] == ["gpu-1", "gpu-2", "gpu-0"]
    load.take("gpu-1", 2500)
    assert [n.id for n in strategy.pick(2)] == ["gpu-2", "gpu-1"]
    load.give("gpu-1", 2500)
    assert strategy.pick(1)[0].id == "gpu-1"


def test_equal_nodes_take_turns():
    strategy = TokenAvailable(tuple(node(n) for n in range(4)), Load())
    assert sorted(strategy.pick(1)[0].id for _ in range(4)) == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]


@given(
    st.lists(st.integers(100, 5000), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000), st.booleans()), max_size=60),
)
def test_the_ranking_never_differs_from_a_plain_scan(lengths, steps):
    nodes = tuple(node(n, max_seq_len=length) for n, length in enumerate(lengths))
    load = Load()
    strategy = TokenAvailable(nodes, load)
    held: list[tuple[str, int]] = []
    for which, tokens, give in steps:
        if give and held:
            load.give(*held.pop(which % len(held)))
        else:
            taken = (nodes[which % len(nodes)].id, tokens)
            load.take(*taken)
            held.append(taken)
        margins = {n.id: n.max_seq_len - load.tokens_in_use(n.id) for n in nodes}
        picked = strategy.pick(2)
        assert margins[picked[0].id] == max(margins.values())
        assert len({n.id for n in picked}) == len(picked) == min(2, len(nodes))
        if len(picked) == 2:
            assert margins[picked[1].id] == sorted(margins.values())[-2]


def test_a_load_given_back_leaves_nothing_behind():
    load = Load()
    for _ in range(3):
        load.take("a", 7)
    for _ in range(3):
        load.give("a", 7)
    assert load.tokens == {}
    assert load.requests == {}


def test_a_reader_that_was_away_too_long_is_told_so():
    falls = Falls(limit=4)
    for name in "abcdef":
        falls.append(name)
    assert falls.since(0) is None
    assert falls.since(falls.end - 2) == ["e", "f"]
    assert falls.since(falls.end) == []


def test_the_filter_names_what_no_node_has():
    shapes = fleet((node(0, max_seq_len=1000, version="2025.3.1"), node(1, max_seq_len=2000, version="2025.4.0")))
    assert fitting(shapes, demand(1500)) == (Shape("2025.4.0", 2000),)
    too_long = fitting(shapes, demand(2001))
    assert too_long.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert "2000" in too_long.message
    wrong = fitting(shapes, demand(10, ">=2026", lambda version: version >= "2026"))
    assert wrong.code is Code.VERSION_MISMATCH
    assert "2025.3.1, 2025.4.0" in wrong.message
    assert fitting((), demand(1)).code is Code.NO_HEALTHY_NODE


def test_an_estimate_alone_refuses_nobody_but_a_certain_length_does():
    shapes = fleet((node(0, max_seq_len=1000), node(1, max_seq_len=2000)))
    assert fitting(shapes, demand(2100, at_least=1900)) == (Shape("2025.3.1", 2000),)
    assert fitting(shapes, demand(2100, at_least=2001)).code is Code.CONTEXT_LENGTH_EXCEEDED


def test_nodes_of_one_shape_stay_together_in_the_pools_order():
    nodes = (node(0), node(1, max_seq_len=1000), node(2))
    assert fleet(nodes) == {Shape("2025.3.1", 4096): (nodes[0], nodes[2]), Shape("2025.3.1", 1000): (nodes[1],)}
