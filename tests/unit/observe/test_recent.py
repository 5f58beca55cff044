"""The last minutes, as the dashboard shows them: bounded, and forgotten in time."""

from msgspec.structs import replace

from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.observe.dashboard_data import DashboardData, NodeRow, diff_dashboards
from din_extproc.observe.recent import POINTS, STEP_S, Recent, TrafficStats

DONE = ExchangeRecord(
    request_id="r", trace_id="t" * 32, tenant="acme", key_id="k", model="m", alias="fast", pool="p", rule="light", node_id="n",
    status=200, outcome=Outcome.COMPLETED, stream=True, usage=Usage(10, 5), reserved_tokens=20, prompt_estimate=10, features=(), fixed=0,
    attempts=1, degraded=False, started_at=1000.0, duration_ms=500.0, first_token_ms=80.0,
)  # fmt: skip


def test_traffic_is_that_of_the_last_minute_by_rule_alias_and_tenant():
    recent = Recent()
    for second in range(0, 60, 10):
        recent.on_exchange(DONE, float(second))
    recent.on_exchange(replace(DONE, outcome=Outcome.UPSTREAM_ERROR, degraded=True, alias="deep"), 59.0)
    recent.on_exchange(replace(DONE, outcome=Outcome.REFUSED, model="", rule="", alias="", usage=Usage(0, 0)), 59.0)
    traffic = recent.get_traffic(59.0)
    assert traffic["rules"] == {"light": TrafficStats(7, 105, failed=1, degraded=1)}
    assert traffic["aliases"]["deep"] == TrafficStats(1, 15, failed=1, degraded=1)
    assert traffic["tenants"] == {"acme": TrafficStats(8, 105, failed=1, refused=1, degraded=1)}
    assert recent.get_traffic(85.0)["rules"]["light"].requests == 4
    assert recent.get_traffic(500.0)["tenants"] == {}


def test_a_node_s_line_has_a_mean_per_step_gaps_where_nothing_began_and_an_end():
    recent = Recent()
    recent.on_exchange(DONE, 0.0)
    recent.on_exchange(replace(DONE, first_token_ms=120.0), 1.0)
    assert recent.get_first_tokens("n", 2.0) == ()
    assert recent.get_first_tokens("n", STEP_S) == (100,)
    recent.on_exchange(DONE, 3.0 * STEP_S)
    assert recent.get_first_tokens("n", 4.0 * STEP_S) == (100, None, None, 80)
    assert recent.get_first_tokens("n", 1e6) == (None,) * POINTS
    assert recent.get_first_tokens("nobody", 0.0) == ()


def test_events_are_refusals_failures_and_degradations_with_their_trace_ids_and_no_more_than_fit():
    recent = Recent()
    recent.on_exchange(DONE, 0.0)
    assert not recent.events
    recent.on_exchange(replace(DONE, outcome=Outcome.REFUSED, refusal="model_not_found", model=""), 0.0)
    recent.on_exchange(replace(DONE, outcome=Outcome.UPSTREAM_TIMEOUT, status=504), 0.0)
    recent.on_exchange(replace(DONE, degraded=True), 0.0)
    assert [(event.what, event.code) for event in recent.events] == [
        ("refused", "model_not_found"), ("upstream_timeout", "504"), ("degraded", "200"),
    ]  # fmt: skip
    assert {event.trace_id for event in recent.events} == {"t" * 32}
    for _ in range(500):
        recent.on_exchange(replace(DONE, degraded=True), 0.0)
    assert len(recent.events) == 60


def test_names_without_end_are_counted_together():
    recent = Recent()
    for number in range(3000):
        recent.on_exchange(replace(DONE, alias=f"a{number}"), 0.0)
    aliases = recent.get_traffic(0.0)["aliases"]
    assert len(aliases) <= 1001
    assert sum(each.requests for each in aliases.values()) == 3000


def node(name: str, **fields) -> NodeRow:
    return NodeRow(name, ("p",), "ready", 1.0, "m", "1", "bf16", "vllm", 8, **fields)


def test_a_change_holds_what_is_new_other_or_gone():
    def board(*nodes: NodeRow) -> DashboardData:
        return DashboardData(0.0, 10, 60, "", "f", (), 0, {}, (), nodes, {}, {}, (), (), None)

    found = diff_dashboards(board(node("a"), node("b"), node("c")), board(node("a"), node("b", running=3), node("d")))
    assert [row.id for row in found.nodes] == ["b", "d"]
    assert found.gone == ("c",)
    assert found.board.nodes == ()


def test_an_exchange_is_found_by_the_beginning_of_its_trace_id_until_two_thousand_others_came():
    recent = Recent()
    for number in range(3):
        recent.on_exchange(replace(DONE, trace_id=f"bench-1-{number}", sent_ms=3.0, node_ended_ms=499.0, decided_ms=0.5), 0.0)
    found = recent.get_times("bench-1-")
    assert [times.trace_id for times in found] == ["bench-1-0", "bench-1-1", "bench-1-2"]
    assert (found[0].sent_ms, found[0].first_token_ms, found[0].node_ended_ms, found[0].ended_ms) == (3.0, 80.0, 499.0, 500.0)
    for _ in range(2046):
        recent.on_exchange(DONE, 0.0)
    assert [times.trace_id for times in recent.get_times("bench-1-")] == ["bench-1-1", "bench-1-2"]
