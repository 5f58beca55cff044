"""A configuration over modelled nodes in virtual time: the same twice, and another where it should be."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from din_extproc.audit.chain import sign_entry
from din_extproc.audit.records import SettlementRecord
from din_extproc.audit.report import make_segment_name
from din_extproc.cli.app import app
from din_extproc.settings.problems import ConfigRejected
from din_extproc.tools.simulate.report import lines
from din_extproc.tools.simulate.simulate import Simulated, SimulateOptions, SimulationRefused, simulate
from din_extproc.tools.simulate.stats import Outcomes
from tests.support.stack import node, tenant

CONFIG: dict[str, Any] = {
    "version": 1,
    "gateway": {"ext_proc": {"socket": "/tmp/x.sock"}, "access_log": {"address": "127.0.0.1:1"}},
    "store": {"url": "redis://127.0.0.1:1"},
    "aliases": {"any": {"models": ["*"]}},
    "pools": {
        "small": {"model": "s", "engine": "vllm", "nodes": [node(f"s{number}", f"10.0.0.{number}:8000") for number in (1, 2)]},
        "big": {"model": "b", "engine": "vllm", "nodes": [node("b1", "10.0.1.1:8000")]},
    },
    "rules": [
        {"id": "light", "when": {"estimated_tokens": {"lt": 500}}, "pool": "small", "fallback": "big"},
        {"id": "rest", "when": "always", "pool": "big"},
    ],
    "tenants": [tenant("acme"), tenant("other", rpm=60)],
    "health": {"probe": False},
}
WORKLOAD: dict[str, Any] = {
    "seconds": 120,
    "warm_up_s": 10,
    "requests": [
        {"name": "light", "rate": 4, "model": "any", "prompt_tokens": {"median": 200, "spread": 0.2}, "output_tokens": 50},
        {"name": "heavy", "rate": 0.5, "model": "any", "prompt_tokens": {"median": 2000, "spread": 0.2}, "output_tokens": 100},
    ],
}
STALL = [{"node": "s1", "kind": "stall", "at_s": 30, "for_s": 60}]


class Simulator:
    """Runs variants of the two files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def simulate(self, config: dict | None = None, workload: dict | None = None, **options: Any) -> Simulated:
        ran = self.asked(config, workload, **options)
        assert isinstance(ran, Simulated), str(ran)
        return ran

    def asked(self, config: dict | None = None, workload: dict | None = None, **options: Any) -> Simulated | ConfigRejected:
        din, load = self.folder / "din.yaml", self.folder / "workload.yaml"
        din.write_text(yaml.safe_dump({**copy.deepcopy(CONFIG), **(config or {})}, sort_keys=False))
        load.write_text(yaml.safe_dump({**copy.deepcopy(WORKLOAD), **(workload or {})}, sort_keys=False))
        return simulate(SimulateOptions(config=din, workload=load, **options), {})

    def outcomes(self, config: dict | None = None, workload: dict | None = None, **options: Any) -> Outcomes:
        return self.simulate(config, workload, **options).rows[0].outcomes


@pytest.fixture
def simulator(tmp_path: Path) -> Simulator:
    return Simulator(tmp_path)


def one(**fields: Any) -> dict[str, Any]:
    """A workload of one sort of requests."""
    return {"requests": [{"name": "one", "rate": 4, "model": "any", "prompt_tokens": 200, "output_tokens": 50, **fields}]}


def test_the_same_files_and_seed_give_the_same_figures_and_another_seed_gives_others(simulator: Simulator) -> None:
    workload = {"failures": STALL, "gateways": 3}
    assert simulator.simulate(workload=workload) == simulator.simulate(workload=workload)
    assert simulator.outcomes(workload=workload) != simulator.outcomes(workload={**workload, "seed": 2})


def test_requests_go_where_the_rules_say_and_figures_add_up(simulator: Simulator) -> None:
    found = simulator.outcomes()
    assert found.sources["light"].pools == {"small": 1.0}
    assert found.sources["heavy"].pools == {"big": 1.0}
    assert found.errors == 0
    assert found.requests == sum(source.requests for source in found.sources.values())
    assert found.requests_per_s == pytest.approx(4.5, rel=0.15)
    assert 200 / 8000 + 0.003 < found.first_token_s.p50 < 3 * 200 / 8000, "its own prefill, and the step of the batch that it joins"
    assert found.per_token_s.p50 == pytest.approx(1 / 60, rel=0.15)


def test_a_threshold_that_moves_moves_the_requests_beyond_it(simulator: Simulator) -> None:
    low, high = simulator.simulate(tries=(("rules.0.when.estimated_tokens.lt", (100, 4000)),)).rows
    assert (low.outcomes.pools["small"].share, low.outcomes.pools["big"].share) == (0.0, 1.0)
    assert high.outcomes.pools["small"].share == 1.0
    assert high.outcomes.pools["big"].busy == 0.0


def test_a_breaker_leaves_a_stalled_node_alone_sooner_the_lower_its_threshold_and_not_at_all_when_it_is_off(simulator: Simulator) -> None:
    workload = {"failures": STALL, **one(patience_s=8)}
    pools = {**CONFIG["pools"], "small": {**CONFIG["pools"]["small"], "scheduler": "round_robin", "timeouts": {"first_byte_s": 2}}}
    tries = (("health.failover_threshold.standard", (1, 20)), ("health.breaker", (True, False)))
    quick, off, slow, still_off = (row.outcomes for row in simulator.simulate({"pools": pools}, workload, tries=tries).rows)
    assert quick.retried < slow.retried < off.retried
    assert off == still_off
    assert quick.breakers_opened >= 1
    assert off.breakers_opened == 0
    assert quick.seconds.p99 < off.seconds.p99


def test_a_pool_whose_every_node_is_gone_is_answered_for_by_the_fallback_and_comes_back(simulator: Simulator) -> None:
    down = [{"node": each, "kind": "down", "at_s": 30, "for_s": 30} for each in ("s1", "s2")]
    found = simulator.outcomes({"health": {"open_s": 5, "probe": False}}, {"failures": down})
    assert found.degraded > 0.1
    assert found.sources["light"].pools["big"] > 0.1
    assert found.sources["light"].pools["small"] > 0.3, "trials, then the ramp"
    assert found.errors < 0.05


def test_requests_whose_pool_answers_with_errors_move_in_flight_where_envoy_may_move_them(simulator: Simulator) -> None:
    failures = [{"node": each, "kind": "errors", "at_s": 30, "for_s": 60} for each in ("s1", "s2")]
    config = {"health": {"breaker": False, "probe": False}}
    moved, stayed = simulator.simulate(config, {"failures": failures}, tries=(("envoy.retry.to_fallback", (True, False)),)).rows
    assert moved.outcomes.errors == 0
    assert moved.outcomes.sources["light"].pools["big"] > 0.3
    assert moved.outcomes.degraded > 0.3
    assert stayed.outcomes.failed["upstream_error"] > 0.3 * stayed.outcomes.sources["light"].requests


def test_a_node_that_is_busy_is_left_alone_for_as_long_as_it_asks(simulator: Simulator) -> None:
    busy = [{"node": "s1", "kind": "busy", "at_s": 10, "for_s": 100, "retry_after_s": 5}]
    on, off = (
        simulator.outcomes({"health": {"breaker": breaker, "probe": False}}, {"failures": busy}).failed["upstream_busy"]
        for breaker in (True, False)
    )
    assert 10 <= on <= 40, "one request after each pause of five seconds"
    assert off > 2 * on


def test_the_timeout_of_a_whole_request_opens_no_breaker(simulator: Simulator) -> None:
    pools = {**CONFIG["pools"], "small": {**CONFIG["pools"]["small"], "timeouts": {"total_s": 0.2}}}
    found = simulator.outcomes({"pools": pools})
    assert found.failed["upstream_timeout"] > 100
    assert found.breakers_opened == 0


def test_probes_let_a_node_come_back_that_no_request_asks(simulator: Simulator) -> None:
    failures = [{"node": "s1", "kind": "errors", "at_s": 10, "for_s": 20}]
    for probe, opened in (({"every_s": 1, "timeout_s": 1}, True), (False, True)):
        found = simulator.outcomes({"health": {"open_s": 5, "probe": probe}}, {"failures": failures})
        assert bool(found.breakers_opened) is opened
        assert found.errors < 0.02, "another node is asked"
        assert found.retried > 0


def test_a_slow_node_gets_less_under_a_strategy_that_looks(simulator: Simulator) -> None:
    slow = [{"node": "s1", "kind": "slow", "at_s": 0, "for_s": 120, "factor": 10}]
    turns, looks = simulator.simulate(
        workload={"failures": slow}, tries=(("pools.small.scheduler", ("round_robin", "predicted_time")),)
    ).rows
    assert looks.outcomes.sources["light"].seconds.p95 < 0.5 * turns.outcomes.sources["light"].seconds.p95


def test_limits_refuse_as_in_service_and_each_of_many_tenants_has_its_own(simulator: Simulator) -> None:
    asks = {"warm_up_s": 0, **one(tenant="other")}
    alone = simulator.outcomes(workload=asks)
    assert alone.refused.keys() == {"rate_limit_exceeded"}
    assert alone.errors == pytest.approx(0.75, abs=0.05), "60 of 240 a minute"
    assert alone.tenants_refused == {"other": alone.refused["rate_limit_exceeded"]}
    assert simulator.outcomes(workload=one(tenant="other", tenants=1000)).errors == 0
    raised = simulator.outcomes(workload=asks, tries=(("tenants.1.limits.rpm", (120,)),))
    assert raised.errors == pytest.approx(0.5, abs=0.05)


def test_requests_that_may_wait_do_so_and_are_answered(simulator: Simulator) -> None:
    limits = {"rpm": 100_000, "tpm": 1_000_000, "max_streams": 4}
    refused, waited = (
        simulator.outcomes({"tenants": [{**tenant("acme"), "limits": limits, **queue}]}, one(rate=4))
        for queue in ({}, {"queue": {"max_wait_ms": 3000}})
    )
    assert refused.refused["concurrency_limit_exceeded"] > 0
    assert refused.waited == 0
    assert waited.waited > 0.1
    assert waited.errors < 0.5 * refused.errors
    assert waited.first_token_s.p99 > refused.first_token_s.p99


def test_requests_beyond_every_context_are_refused_and_long_answers_end_with_the_context(simulator: Simulator) -> None:
    assert simulator.outcomes(workload=one(prompt_tokens=20_000)).refused.keys() == {"context_length_exceeded"}
    found = simulator.outcomes(workload=one(rate=0.2, prompt_tokens=8000, output_tokens=5000))
    assert found.output_tokens_per_s == pytest.approx(192 * found.requests_per_s, rel=0.05)


def test_prompts_that_begin_alike_cost_less_where_nodes_remember_them(simulator: Simulator) -> None:
    prefixes = {"prefixes": {"system": {"number": 4, "tokens": [300, 400]}}}
    workload = {**prefixes, **one(prefixes="system", prompt_tokens=50)}
    forgets, remembers = simulator.simulate(workload=workload, tries=(("workload.nodes.small.prefixes", (0, 8)),)).rows
    assert remembers.outcomes.pools["small"].prefix_hits > 100
    assert remembers.outcomes.first_token_s.p50 < 0.5 * forgets.outcomes.first_token_s.p50


def test_bursts_and_days_keep_the_mean_and_move_the_tail(simulator: Simulator) -> None:
    slow = {"warm_up_s": 0, "nodes": {"small": {"prefill_rate": 2000}}}
    steady = simulator.outcomes(workload={**slow, **one(rate=8)})
    bursts = simulator.outcomes(workload={**slow, **one(rate=8, rhythm={"burst": 10, "burst_every_s": 20, "burst_s": 2})})
    assert bursts.requests == pytest.approx(steady.requests, rel=0.1)
    assert bursts.first_token_s.p99 > 1.5 * steady.first_token_s.p99
    at_night = simulator.outcomes(workload={**slow, "start_hour": 2, **one(rate=8, rhythm={"night": 0.1, "peak_hour": 14})})
    assert at_night.requests == pytest.approx(steady.requests * 0.2 / 1.1, rel=0.25)


def test_the_fewest_nodes_for_a_promise_are_found_and_one_fewer_breaks_it(simulator: Simulator) -> None:
    workload = {"nodes": {"small": {"decode_rate": 20, "max_num_seqs": 4}}, "slo": {"first_token_p99_s": 0.5}, **one(rate=6)}
    sized = simulator.simulate(workload=workload, size="small", most=32)
    [row] = sized.rows
    assert row.nodes is not None
    assert sized.kept
    assert f"{row.nodes} nodes of small are enough" in "\n".join(lines(sized))
    fewer = simulator.simulate(workload={**workload, "nodes": {"small": {**workload["nodes"]["small"], "count": row.nodes - 1}}})
    assert fewer.rows[0].slo_broken == ("first_token_p99_s",)
    never = simulator.simulate(workload={**workload, "slo": {"first_token_p99_s": 0.001}}, size="small", most=4)
    assert (never.rows[0].nodes, never.kept) == (None, False)
    with pytest.raises(SimulationRefused, match="promise"):
        simulator.simulate(workload=one(), size="small")


def test_a_record_is_sent_again_with_its_own_lengths(simulator: Simulator) -> None:
    folder = simulator.folder / "audit"
    folder.mkdir()
    written, mac = [], b"\0" * 32
    for number in range(40):
        known = {"request_id": f"r{number}", "trace_id": f"t{number}", "tenant": "acme", "key_id": "acme" if number else "gone"}
        answer = {"outcome": "completed", "status": 200, "prompt_tokens": 1000, "completion_tokens": 30, "duration_ms": 500.0}
        asked = {"asked_for": "any", "operation": "/v1/chat/completions", "prompt_estimate": 1000, "output_asked": None}
        where = {"model": "b", "alias": "any", "pool": "big", "rule": "rest"}
        line, mac = sign_entry(
            b"s" * 32, mac, number + 1, SettlementRecord(at=1_800_000_000.0 + number, **known, **answer, **asked, **where)
        )
        written.append(line)
    (folder / make_segment_name("gateway", 1)).write_bytes(b"".join(written))
    given = {"requests": [], "seconds": None, "warm_up_s": 0}
    ran = simulator.simulate(workload=given, record=(folder,))
    [row] = ran.rows
    assert (ran.skipped, ran.seconds) == (1, 40.0)
    assert row.outcomes.requests == 39
    assert row.outcomes.sources["any"].pools == {"big": 1.0}
    assert row.outcomes.output_tokens_per_s == pytest.approx(30 * 39 / 40, rel=0.1)
    assert simulator.simulate(workload=given, record=(folder,), speed=2.0).seconds == pytest.approx(20.5)


def test_one_run_is_reported_in_full_and_several_a_line_each(simulator: Simulator) -> None:
    whole = "\n".join(lines(simulator.simulate(workload={"slo": {"errors": 0.01}})))
    assert "all of it is kept" in whole
    assert "| small | 2 |" in whole
    assert "| light |" in whole
    result = lines(simulator.simulate(tries=(("pools.small.scheduler", ("round_robin", "token_available")), ("workload.gateways", (1, 2)))))
    assert result[2].startswith("| pools.small.scheduler | workload.gateways | requests/s |")
    assert [line.split(" | ")[:2] for line in result[4:]] == [
        [f"| {scheduler}", gateways] for scheduler in ("round_robin", "token_available") for gateways in ("1", "2")
    ]


def test_the_command_ends_with_0_when_what_is_promised_is_kept_with_1_when_not_and_with_2_for_a_wrong_call(simulator: Simulator) -> None:
    simulator.simulate()
    runner, files = CliRunner(), [str(simulator.folder / "workload.yaml"), "-c", str(simulator.folder / "din.yaml")]
    kept = runner.invoke(app, ["simulate", *files, "--slo", "errors=0.01", "--json", "--seconds", "30"])
    assert kept.exit_code == 0
    assert json.loads(kept.output)["rows"][0]["slo_broken"] == []
    broken = runner.invoke(
        app, ["simulate", *files, "--rate", "2", "--seconds", "30", "--slo", "first_token_p99_s=0.001", "--nodes", "small=3"]
    )
    assert broken.exit_code == 1
    assert "not kept: first_token_p99_s" in broken.output
    assert "| small | 3 |" in broken.output
    unsound = runner.invoke(app, ["simulate", *files, "--try", "pools.small.scheduler=round_rubin"])
    assert (unsound.exit_code, "round_rubin" in unsound.output) == (1, True)
    assert runner.invoke(app, ["simulate", *files, "--try", "nothing"]).exit_code == 2


@pytest.mark.parametrize("wrong", [
    ["--record", "audit", "--rate", "3"], ["--speed", "2"], ["--prompt", "100"], ["--output", "100"], ["--model", "m"], ["--tenant", "t"],
    ["--most", "3"],
])  # fmt: skip
def test_an_option_that_would_say_nothing_is_a_wrong_call(wrong):
    result = CliRunner().invoke(app, ["simulate", *wrong])
    assert (result.exit_code, wrong[-2] in result.output) == (2, True), result.output


def test_costs_are_reported_and_budgets_hold(simulator: Simulator) -> None:
    prices = {"currency": "EUR", "models": {"s": {"input": 1, "output": 2}, "b": {"input": 10, "output": 20}}}
    free = simulator.outcomes()
    found = simulator.simulate({"prices": prices})
    [row] = found.rows
    assert (free.cost, sum(row.outcomes.tenants_cost.values())) == (0, row.outcomes.cost)
    assert row.outcomes.cost > 0
    assert any(line.startswith("| cost; by tenant |") for line in lines(found))
    budgets = {"limits": [{"name": "day", "period": "day", "money": 0.01}]}
    limited = simulator.outcomes({"prices": prices, "budgets": budgets})
    assert limited.refused["budget_exceeded"] > 100
    assert limited.cost <= 10**7
