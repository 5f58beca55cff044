"""The doctor's verdicts on reports: each fault has its own finding and remedy."""

import copy
from datetime import UTC
from pathlib import Path

import pytest
from msgspec import structs

from din_extproc.domain.health import NO_CREDIT_REASON
from din_extproc.domain.spending import BudgetPeriod, SpendingBudget, SpendingBudgets
from din_extproc.roles.operate.diagnosis import of_endpoints, of_envoy, of_exchanges, of_machine, of_redis, of_sidecar, of_timeouts
from din_extproc.route.table import RouteTable
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings

EXAMPLE = Path(__file__).parents[4] / "envoy" / "din.yaml"
REDIS = {"redis_version": "7.2.4", "maxmemory": "0", "maxmemory_policy": "noeviction"}
INFO = {"version": "abc/1.40.0/Clean/RELEASE/BoringSSL", "state": "LIVE"}
STATS = {"http.din.ext_proc.streams_started": 100, "cluster.din_ext_proc.membership_healthy": 2}


@pytest.fixture(scope="module")
def settings() -> Settings:
    loaded = load(EXAMPLE, {})
    assert isinstance(loaded, Settings)
    return loaded


def dump(settings: Settings) -> dict:
    listener = {
        "per_connection_buffer_limit_bytes": settings.body_limit + 65536,
        "filters": [{"typed_config": {"message_timeout": "5s", "stream_idle_timeout": "600s"}}],
    }
    names = [*(pool.name for pool in settings.pools), *(f"{pool}+{fallback}" for pool, fallback in settings.may_move_in_flight)]
    paths = [address.path for address in settings.worker_addresses]
    endpoints = [{"endpoint": {"address": {"pipe": {"path": path}}}} for path in paths]
    ours = {"cluster": {"name": "din_ext_proc", "load_assignment": {"endpoints": [{"lb_endpoints": endpoints}]}}}
    return {"configs": [{"listener": listener}, {"static": [ours, *({"cluster": {"name": name}} for name in names)]}]}


def status(settings: Settings) -> dict:
    return {
        "configuration": {"fingerprint": settings.fingerprint, "rejected_successor": ""},
        "limits": {"shared": True, "reason": ""},
        "exchanges": {"unsettled": 0, "given_up": 0},
        "membership": {
            "nodes": [{"node": {"id": "gpu-07"}, "state": "ready"}],
            "models": [{"model": "m", "state": "available", "nodes": 1, "available": 1, "share": 1.0, "pools": {}, "unavailable": []}],
        },
    }


def bad(findings) -> dict[str, str]:
    found = {each.what: each for each in findings if each.verdict != "ok"}
    assert all(each.change for each in found.values()), "what is not ok says what to change"
    return {what: each.verdict for what, each in found.items()}


def test_an_account_without_credit_is_a_failure_that_names_the_node(settings):
    poor = status(settings)
    poor["membership"]["nodes"][0]["health"] = {"state": "open", "reason": NO_CREDIT_REASON}
    [found] = [each for each in of_sidecar(poor, settings) if each.what == "accounts"]
    assert (found.verdict, "gpu-07" in found.finding, "credit" in found.change) == ("fail", True, True)


@pytest.mark.parametrize(
    ("state", "verdict", "finding", "change"),
    [
        ({}, "ok", "2 nodes at Service ai/vllm", ""),
        ({"problem": "not allowed (403)", "remedy": "bind a Role"}, "warn", "not allowed (403)", "bind a Role"),
        ({"problem": "there is no pod", "remedy": "check `service`", "nodes": 0}, "fail", "there is no pod", "check `service`"),
        ({"refused": {"169.254.169.254:80": "link-local"}}, "warn", "169.254.169.254:80 is refused: link-local", "Service ai/vllm"),
    ],
)
def test_a_source_of_nodes_that_fails_or_has_endpoints_that_are_refused_is_a_finding(settings, state, verdict, finding, change):
    source = {"source": "Service ai/vllm", "nodes": 2, "problem": "", "remedy": "", "refused": {}, **state}
    [found] = [each for each in of_sidecar({**status(settings), "discovery": {"p": source}}, settings) if each.what == "discovery of p"]
    assert (found.verdict, found.finding, change in found.change) == (verdict, finding, True)


def test_a_gateway_in_good_health_has_nothing_to_change(settings):
    parts = (
        of_redis(REDIS, 0.4, 0.001, settings),
        of_envoy(INFO, dump(settings), settings),
        of_exchanges(STATS),
        of_sidecar(status(settings), settings),
        of_machine(65536),
        of_timeouts(settings),
    )
    assert [bad(part) for part in parts] == [{}] * 6


@pytest.mark.parametrize(
    ("info", "took_ms", "skew_s", "expected"),
    [
        ({"redis_version": "5.0.7"}, 1.0, 0.0, {"redis version": "fail"}),
        ({}, 30.0, 0.0, {"redis latency": "warn"}),
        ({}, 80.0, 0.0, {"redis latency": "fail"}),
        ({}, 1.0, -3.0, {"clock": "warn"}),
        ({}, 1.0, 8.0, {"clock": "fail"}),
        ({"maxmemory": "1000", "maxmemory_policy": "allkeys-lru"}, 1.0, 0.0, {"redis memory": "fail"}),
    ],
)
def test_of_redis(settings, info, took_ms, skew_s, expected):
    assert bad(of_redis(REDIS | info, took_ms, skew_s, settings)) == expected


@pytest.mark.parametrize(("info", "expected"), [({}, {"redis persistence": "warn"}), ({"aof_enabled": "1"}, {})])
def test_budgets_need_a_redis_that_remembers_them(settings, info, expected):
    budgeted = structs.replace(
        settings, budgets=SpendingBudgets((SpendingBudget(name="b", period=BudgetPeriod.MONTH, zone=UTC, tokens=1),))
    )
    assert bad(of_redis(REDIS | info, 1.0, 0.0, budgeted)) == expected


def test_an_envoy_that_runs_with_another_file_is_found_out(settings):
    other = copy.deepcopy(dump(settings))
    other["configs"][0]["listener"]["per_connection_buffer_limit_bytes"] = 1 << 20
    other["configs"][0]["listener"]["filters"][0]["typed_config"]["message_timeout"] = "0.200s"
    other["configs"][1]["static"].pop()
    old = {"version": "abc/1.35.1/Clean/RELEASE/BoringSSL", "state": "DRAINING"}
    expected = dict.fromkeys(("envoy version", "envoy state", "buffer limit", "message timeout", "pools"), "fail")
    assert bad(of_envoy(old, other, settings)) == expected


def test_an_envoy_that_knows_all_pools_and_not_the_pairs_between_which_requests_move_is_found_out(settings):
    assert settings.may_move_in_flight
    alone = dump(structs.replace(settings, routes=RouteTable({}, ())))
    assert bad(of_envoy(INFO, alone, settings)) == {"pools": "fail"}


def test_an_envoy_with_an_old_worker_address_is_to_be_rendered_again(settings):
    other = structs.replace(settings, gateway=settings.gateway.model_copy(update={"workers": 3}))
    [finding] = [each for each in of_envoy(INFO, dump(settings), other) if each.verdict != "ok"]
    assert (finding.what, finding.verdict) == ("workers' addresses", "fail")
    assert "ext_proc.sock.2" in finding.finding
    assert "render envoy.yaml again" in finding.change


def test_streams_that_could_not_be_opened_are_no_part_of_those_that_began():
    deaf = {"cluster.din_ext_proc.membership_healthy": 0, "http.din.ext_proc.streams_started": 8, "http.din.ext_proc.streams_failed": 14}
    workers, streams = of_exchanges(deaf)
    assert (workers.what, streams.what, streams.verdict, streams.finding) == ("workers", "ext_proc streams", "fail", "14 failed, 8 began")
    assert all("render envoy.yaml again" in each.change for each in (workers, streams))


@pytest.mark.parametrize(("failed", "verdict"), [(1, "warn"), (19, "warn"), (20, "fail")])
def test_requests_that_came_while_the_sidecar_started_are_a_warning(failed, verdict):
    counts = {"streams_started": 3, "streams_failed": failed, "stream_msgs_received": 4}
    stats = STATS | {f"http.din.ext_proc.{name}": count for name, count in counts.items()}
    [finding] = [each for each in of_exchanges(stats) if each.change]
    assert (finding.what, finding.verdict) == ("ext_proc streams", verdict)


def test_what_attempts_ask_of_the_sidecar_counts_too():
    attempts = {"cluster.fast+local.ext_proc.streams_started": 7, "cluster.fast+local.ext_proc.message_timeouts": 2}
    late, *_ = of_exchanges({**STATS, "http.din.ext_proc.message_timeouts": 1, **attempts})
    assert (late.verdict, late.finding) == ("fail", "3 in 107 exchanges")


def test_an_envoy_without_our_filter_is_found_out(settings):
    assert {"buffer limit", "message timeout", "stream idle timeout", "pools"} <= bad(of_envoy(INFO, {"configs": []}, settings)).keys()


def test_of_exchanges_that_failed():
    counts = {"message_timeouts": 3, "rejected_header_mutations": 1, "clear_route_cache_ignored": 1, "streams_failed": 2}
    found = bad(of_exchanges(STATS | {f"http.din.ext_proc.{name}": count for name, count in counts.items()}))
    assert found == {
        "ext_proc message_timeouts": "fail",
        "ext_proc rejected_header_mutations": "fail",
        "ext_proc clear_route_cache_ignored": "fail",
        "ext_proc streams": "warn",
    }
    lost = {"cluster.din_ext_proc.membership_healthy": 0, "access_logs.grpc_access_log.logs_dropped": 4}
    assert bad(of_exchanges(STATS | lost)) == {"workers": "fail", "access log": "fail"}


@pytest.mark.parametrize(("breaker", "state", "verdict"), [("open", "unavailable", "fail"), ("half_open", "degraded", "warn")])
def test_of_a_model_whose_only_node_is_ejected(settings, breaker, state, verdict):
    sidecar_status = status(settings)
    sidecar_status["membership"]["nodes"][0]["health"] = {"state": breaker}
    lost = {"state": state, "available": 0, "share": 0.0, "unavailable": [{"node_id": "gpu-07", "share": 0.0, "reason": "no answer"}]}
    sidecar_status["membership"]["models"][0] |= lost
    assert bad(of_sidecar(sidecar_status, settings)) == {"nodes": "warn", "model m": verdict}


def test_of_an_envoy_that_does_not_know_a_node():
    assert bad([of_endpoints(())]) == {}
    assert bad([of_endpoints(("node gpu-9 (10.0.0.9:8000) of pool p",))]) == {"nodes in Envoy": "fail"}


def test_of_a_sidecar_that_struggles(settings):
    sidecar_status = status(settings)
    sidecar_status["configuration"]["rejected_successor"] = "din.yaml:3: unknown field"
    sidecar_status["limits"] = {"shared": False, "reason": "connection refused"}
    sidecar_status["exchanges"]["given_up"] = 2
    sidecar_status["membership"]["nodes"][0]["state"] = "dead"
    assert bad(of_sidecar(sidecar_status, settings)) == {
        "configuration": "fail",
        "limits": "fail",
        "settlement": "warn",
        "nodes": "warn",
    }
    other = status(settings) | {"configuration": {"fingerprint": "000000000000", "rejected_successor": ""}}
    assert bad(of_sidecar(other, settings)) == {"configuration": "warn"}


@pytest.mark.parametrize(
    ("log", "verdict"),
    [
        ({"records": 7, "dropped": 0, "failing": ""}, {}),
        ({"records": 7, "dropped": 3, "failing": ""}, {"audit log": "warn"}),
        ({"records": 7, "dropped": 0, "failing": "[Errno 28] No space left on device"}, {"audit log": "fail"}),
    ],
)
def test_of_the_audit_log(settings, log, verdict):
    assert bad(of_sidecar(status(settings) | {"audit": log}, settings)) == verdict


def test_of_a_machine_with_few_files():
    assert bad(of_machine(1024)) == {"open files": "warn"}
    assert bad(of_machine(None)) == {}
