"""Probe schedule: intervals, jitter, skipped and expedited probes."""

from itertools import pairwise

from din_extproc.health.probing import ProbeSchedule

NODES = [f"gpu-{number}" for number in range(40)]


def ask(probing: ProbeSchedule, begin: float, end: float, step: float = 0.1) -> list[tuple[float, str]]:
    probed, now = [], begin
    while now < end:
        probed += [(now, node_id) for node_id in probing.take_due(now)]
        now += step
    return probed


def test_every_node_is_asked_about_every_ten_seconds_and_not_in_step():
    probing = ProbeSchedule(10.0)
    probing.set_nodes(NODES, 0.0)
    probed = ask(probing, 0.0, 100.0)
    each = {node_id: [at for at, name in probed if name == node_id] for node_id in NODES}
    assert all(9 <= len(times) <= 13 for times in each.values())
    gaps = [later - earlier for times in each.values() for earlier, later in pairwise(times)]
    assert 7.9 <= min(gaps) <= 9.0
    assert 11.0 <= max(gaps) <= 12.2
    busiest = max(sum(1 for at, _ in probed if second <= at < second + 1) for second in range(100))
    assert busiest < len(NODES) / 3


def test_a_node_that_answers_requests_costs_no_probe():
    probing = ProbeSchedule(10.0)
    probing.set_nodes(["busy", "idle"], 0.0)
    probed = []
    for second in range(60):
        probing.record_answer("busy", float(second))
        probed += probing.take_due(float(second))
    assert "busy" not in probed
    assert probed.count("idle") >= 4
    assert probing.skipped >= 4
    assert [node_id for _, node_id in ask(probing, 60.0, 75.0)].count("busy") >= 1, "it is probed once it stops answering requests"


def test_a_failed_node_is_probed_early_even_if_it_answered_before():
    probing = ProbeSchedule(10.0)
    probing.set_nodes(["n"], 0.0)
    (first, _), *_ = ask(probing, 0.0, 12.0)
    probing.record_answer("n", first)
    probing.expedite("n", first + 1)
    assert [at for at, _ in ask(probing, first + 1, first + 4)] != []


def test_repeated_failures_do_not_postpone_the_probe():
    probing = ProbeSchedule(10.0)
    probing.set_nodes(["n"], 0.0)
    ask(probing, 0.0, 11.0)
    probed, now = 0, 11.0
    while now < 31.0:
        probing.expedite("n", now)
        probed += len(probing.take_due(now))
        now += 0.25
    assert 5 <= probed <= 12


def test_a_node_that_left_is_not_probed():
    probing = ProbeSchedule(1.0)
    probing.set_nodes(["a", "b"], 0.0)
    probing.set_nodes(["b"], 0.1)
    probing.expedite("a", 0.2)
    assert {node_id for _, node_id in ask(probing, 0.1, 5.0)} == {"b"}
