"""What is counted of decisions."""

from itertools import pairwise

from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.observe.instruments import DECISION_US


def test_a_decision_is_counted_in_the_bucket_of_its_time():
    counters = DecisionCounters()
    for seconds in (0.0, 16e-6, 150e-6, 155e-6, 1000.0):
        counters.on_decision(seconds, "")
    counters.on_decision(0.002, "rate_limit_exceeded")
    counts = counters.snapshot()
    assert counts["decisions_by_us"] == {16: 2, 152: 1, 181: 1, 2048: 1, "more": 1}
    assert (counts["sent"], counts["refused"]) == (5, {"rate_limit_exceeded": 1})


def test_each_bucket_is_at_most_a_quarter_wider_than_the_one_before():
    assert all(1 < upper / lower < 1.25 for lower, upper in pairwise(DECISION_US))
