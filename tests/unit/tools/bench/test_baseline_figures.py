"""Figures of `bench baseline`: throughput, percentiles, and the cause of a slow gateway."""

import pytest

from din_extproc.domain.timing import GatewayTimes
from din_extproc.measure.answer import TimedAnswer
from din_extproc.tools.bench.baseline_figures import (
    BaselineLoad,
    BaselineRound,
    TimeShares,
    find_reason,
    make_figures,
    ratio_range,
    time_shares,
)
from din_extproc.tools.bench.history import BaselineComparison, find_changes, history_lines
from din_extproc.tools.bench.prompts import make_prompt


def answer(total: float = 100.0, first: float = 20.0, tokens: int = 9, trouble: str = "") -> TimedAnswer:
    return TimedAnswer(total, first, total, tokens, trouble=trouble)


def side(*totals: float, seconds: float = 1.0, trouble: str = "") -> list[BaselineRound]:
    return [BaselineRound(seconds, (answer(total, trouble=trouble),) * 4) for total in totals]


def times(trace: str, **fields: float) -> GatewayTimes:
    return GatewayTimes(trace, 0.0, "completed", **fields)


def test_figures_are_those_of_the_median_round():
    rounds = [
        BaselineRound(1.0, (answer(),) * 2),
        BaselineRound(9.0, (answer(),) * 2),
        BaselineRound(2.0, (answer(), answer(trouble="502"))),
    ]
    found = make_figures(rounds)
    assert (found.requests, found.tokens_per_s, found.requests_per_s, found.failed, found.errors) == (6, 4.5, 0.5, 1, {"502": 1})
    assert (found.ttft_p50_ms, found.tpot_p99_ms, found.total_ms) == (20.0, 10.0, 100.0)


def test_a_side_without_a_good_answer_has_no_times():
    found = make_figures(side(100.0, trouble="503"))
    assert (found.tokens_per_s, found.ttft_p50_ms, found.tpot_p50_ms, found.total_ms) == (0.0, None, None, None)


def test_the_spread_is_that_of_rounds_in_turn():
    assert ratio_range(side(1.0, 1.0), [*side(1.0, seconds=2.0), *side(1.0, seconds=0.8)]) == (0.5, 1.25)


def test_the_parts_of_a_request_add_up_to_what_the_client_saw():
    found = time_shares({"a": answer(100.0), "b": answer(200.0)}, [
        times("a", sent_ms=30.0, node_ended_ms=90.0, decided_ms=20.0, waited_ms=15.0),
        times("b", sent_ms=10.0, node_ended_ms=190.0, decided_ms=2.0),
        times("c", sent_ms=10.0, node_ended_ms=190.0, decided_ms=2.0),
    ])  # fmt: skip
    assert found == TimeShares(2, 7.5, 3.5, 19.0, 120.0)
    assert found.waited_ms + found.decided_ms + found.forwarded_ms + found.node_ms == 150.0


def test_no_reported_times_give_no_share():
    assert time_shares({"a": answer()}, []) is None
    assert time_shares({"a": answer()}, [times("a")]) is None


@pytest.mark.parametrize(
    ("found", "part", "words"),
    [
        (TimeShares(9, 300.0, 1.0, 5.0, 110.0), "queue", "wait 300.0 ms"),
        (TimeShares(9, 0.0, 200.0, 5.0, 110.0), "decision", "the route cache knew 10% of the nodes' rankings, which is little"),
        (TimeShares(9, 0.0, 1.0, 150.0, 110.0), "forwarding", "Envoy and the network take 150.0 ms"),
        (TimeShares(9, 0.0, 1.0, 5.0, 400.0), "node", "nodes of the pool take 400 ms a request, this one 100 ms"),
        (None, "unknown", "has no record of these requests"),
    ],
)
def test_whoever_takes_most_of_what_came_on_top_is_to_blame(found, part, words):
    named = find_reason(make_figures(side(100.0)), make_figures(side(400.0)), found, 0.1)
    assert named.part == part
    assert words in named.cause


def test_requests_that_fail_are_the_reason_before_anything_else():
    named = find_reason(make_figures(side(1.0)), make_figures(side(1.0, trouble="rate_limit_exceeded")), None, None)
    assert named.part == "errors"
    assert named.cause == "4 of 4 requests failed, 4 with rate_limit_exceeded"


def test_prompts_are_the_same_each_time_and_none_begins_another():
    first, again = ([make_prompt(number) for number in range(60)] for _ in range(2))
    assert first == again
    assert not any(other != one and other.startswith(one) for one in first for other in first)
    assert max(map(len, first)) > 4 * min(map(len, first))


def compared(**changed) -> BaselineComparison:
    direct, through = make_figures(side(100.0)), make_figures(side(100.0, seconds=1.25))
    fields = {
        "at": "2026-11-30T12:00:00+00:00", "release": "1.0", "configuration": "a" * 64, "url": "u", "model": "m", "pool": "p", "node": "n",
        "load": BaselineLoad(), "direct": direct, "through": through, "ratio": 0.8, "spread": (0.8, 0.8), **changed,
    }  # fmt: skip
    return BaselineComparison(**fields)


def test_only_the_same_asked_of_the_same_node_is_compared():
    faster = make_figures(side(100.0))
    kept = [
        compared(),
        compared(node="other"),
        compared(load=BaselineLoad(at_once=9)),
        compared(ratio=1.0, through=faster, configuration="b" * 64),
    ]
    found = find_changes(kept)
    assert [(each.ratio, each.throughput, each.differs) for each in found[:3]] == [(None, None, ())] * 3
    assert (found[3].ratio, found[3].throughput, found[3].differs) == (1.25, 1.25, ("configuration",))
    lines = history_lines(kept)
    assert lines[1].endswith("  -")
    assert lines[-1].endswith("ratio +25%, throughput +25% (configuration changed)")


def test_under_half_the_gateway_is_the_bottleneck_and_says_why():
    slow = compared(ratio=0.4, reason=find_reason(make_figures(side(100.0)), make_figures(side(400.0)), None, None))
    assert not slow.sound
    assert slow.verdict.startswith("the gateway is the bottleneck: 0.40 of the node's own throughput (0.80 to 0.80). unknown: ")
    assert compared().sound
    assert compared().lines()[-1] == "the network gives 0.80 of the node's own throughput (0.80 to 0.80)"
