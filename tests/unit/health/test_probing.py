"""Which node is asked for a token when."""

from itertools import pairwise

from din_extproc.health.probing import ProbeSchedule

NODES = [f"gpu-{number}" for number in range(40)]


def ask(probing: ProbeSchedule, begin: float, end: float, step: float = 0.1) -> list[tuple[float, str]]:
    asked, now = [], begin
    while now < end:
        asked += [(now, node_id) for node_id in probing.due(now)]
        now += step
    return asked


def test_every_node_is_asked_about_every_ten_seconds_and_not_in_step():
    probing = ProbeSchedule(10.0)
    probing.use(NODES, 0.0)
    asked = ask(probing, 0.0, 100.0)
    each = {node_id: [at for at, name in asked if name == node_id] for node_id in NODES}
    assert all(9 <= len(times) <= 13 for times in each.values())
    gaps = [later - earlier for times in each.values() for earlier, later in pairwise(times)]
    assert 7.9 <= min(gaps) <= 9.0
    assert 11.0 <= max(gaps) <= 12.2
    busiest = max(sum(1 for at, _ in asked if second <= at < second + 1) for second in range(100))
    assert busiest < len(NODES) / 3


def test_a_node_that_answers_requests_costs_no_probe():
    probing = ProbeSchedule(10.0)
    probing.use(["busy", "idle"], 0.0)
    asked = []
    for second in range(60):
        probing.answered("busy", float(second))
        asked += probing.due(float(second))
    assert "busy" not in asked
    assert asked.count("idle") >= 4
    assert probing.saved >= 4
    assert [node_id for _, node_id in ask(probing, 60.0, 75.0)].count("busy") >= 1, "and is asked when it falls silent"


def test_a_node_in_doubt_is_asked_soon_even_if_it_answered_before():
    probing = ProbeSchedule(10.0)
    probing.use(["n"], 0.0)
    (first, _), *_ = ask(probing, 0.0, 12.0)
    probing.answered("n", first)
    probing.doubt("n", first + 1)
    assert [at for at, _ in ask(probing, first + 1, first + 4)] != []


def test_doubt_again_and_again_does_not_put_the_question_off():
    probing = ProbeSchedule(10.0)
    probing.use(["n"], 0.0)
    ask(probing, 0.0, 11.0)
    asked, now = 0, 11.0
    while now < 31.0:
        probing.doubt("n", now)
        asked += len(probing.due(now))
        now += 0.25
    assert 5 <= asked <= 12


def test_a_node_that_is_no_member_any_more_is_not_asked():
    probing = ProbeSchedule(1.0)
    probing.use(["a", "b"], 0.0)
    probing.use(["b"], 0.1)
    probing.doubt("a", 0.2)
    assert {node_id for _, node_id in ask(probing, 0.1, 5.0)} == {"b"}
