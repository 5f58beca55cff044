"""Outcomes of requests and probes, and their effect on the breakers of nodes and pools."""

from typing import Any

import pytest
import yaml

from din_extproc.domain.health import BreakerSnapshots, BreakerState, HoldKind, NodeHold, ProbeResult, make_origin
from din_extproc.domain.membership import MembershipDelta
from din_extproc.domain.node import Endpoint, Node
from din_extproc.domain.usage import ExchangeRecord, FailedAttempt, Outcome, Usage
from din_extproc.edge.clock import SystemClock
from din_extproc.roles.serve.health import HealthMonitor
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.support.stack import node, tenant

CONFIG: dict[str, Any] = {
    "version": 1,
    "gateway": {"registry": {"address": "127.0.0.1:50060", "node_tokens_file": "tokens.yaml"}},
    "pools": {
        "chat": {"model": "m", "engine": "vllm", "traffic": "realtime", "nodes": [node("a", "10.0.0.1:8000"), node("b", "10.0.0.2:8000")]},
        "night": {"model": "n", "engine": "vllm", "traffic": "batch", "nodes": [node("z", "10.0.0.9:8000")]},
    },
    "tenants": [tenant("acme")],
    "health": {"least_answers": 4},
}


ORIGIN = make_origin("aaaaaaaa", b"a body")


class Watched:
    """A `HealthMonitor` that keeps what it published, on a clock that a test moves."""

    def __init__(self, folder, **health: Any) -> None:
        (folder / "tokens.yaml").write_text("{}")
        self._file = folder / "din.yaml"
        self.published: list[BreakerSnapshots] = []
        self.stopped: list[frozenset[str]] = []
        self.health = HealthMonitor(self._settings(health), self.published.append, self.stopped.append)
        self.now = SystemClock.monotonic()

    def reload(self, **health: Any) -> None:
        self.health.reload(self._settings(health))

    def _settings(self, health: dict[str, Any]) -> Settings:
        self._file.write_text(yaml.safe_dump(CONFIG | {"health": CONFIG["health"] | health}))
        return load(self._file, {})

    def record(self, outcome: Outcome, node_id: str = "a", **fields: Any) -> None:
        self.now += 0.2
        known = {
            "request_id": "r", "trace_id": "t", "tenant": "acme", "key_id": "k", "model": "m", "alias": "m", "pool": "chat", "rule": "",
            "node_id": node_id, "status": 200, "outcome": outcome, "stream": True, "usage": Usage(1, 1), "reserved_tokens": 2,
            "prompt_estimate": 1, "features": (), "fixed": 0, "attempts": 1, "degraded": False, "started_at": 0.0, "duration_ms": 10.0,
        }  # fmt: skip
        self.health.on_exchange(ExchangeRecord(**known | fields), self.now)

    def attempt(self, node_id: str = "a", reason: str = "UF", origin: str = "") -> None:
        self.now += 0.2
        self.health.on_attempt_failed(FailedAttempt(node_id, reason, 5.0, self.now, origin=origin), self.now)

    def state(self, node_id: str = "a") -> BreakerState:
        current = self.health.breakers.nodes.get_snapshot(node_id)
        return BreakerState.CLOSED if current is None else current.state

    def pool(self, name: str = "chat") -> BreakerState:
        current = self.health.breakers.pools.get_snapshot(name)
        return BreakerState.CLOSED if current is None else current.state


@pytest.mark.parametrize(("node_id", "failures"), [("a", 2), ("z", 5)])
def test_attempts_that_fail_in_a_row_open_a_node_by_the_traffic_of_its_pool(tmp_path, node_id, failures):
    watched = Watched(tmp_path, least_answers=50)
    for _ in range(failures - 1):
        watched.attempt(node_id)
    assert watched.state(node_id) is BreakerState.CLOSED
    watched.attempt(node_id)
    assert watched.state(node_id) is BreakerState.OPEN
    assert watched.published[-1].nodes[node_id].reason.endswith("consecutive failures, the last: UF")
    assert watched.health.opened == {node_id: watched.published[-1].nodes[node_id].reason}, "other replicas will get it"


def test_what_clients_cause_speaks_for_nothing(tmp_path):
    watched = Watched(tmp_path)
    for _ in range(10):
        watched.record(Outcome.CLIENT_CANCELLED, status=0, response_flags=("DC",))
        watched.record(Outcome.CLIENT_ERROR, status=400)
        watched.record(Outcome.UPSTREAM_TIMEOUT, status=504, response_flags=("UT",), deadline_exceeded=True)
        watched.record(Outcome.REFUSED, node_id="", status=429)
    assert (watched.state(), watched.pool(), watched.published) == (BreakerState.CLOSED, BreakerState.CLOSED, [])


def test_errors_and_ends_inside_a_stream_speak_against_the_node(tmp_path):
    watched = Watched(tmp_path)
    watched.record(Outcome.UPSTREAM_ERROR, error="internal_error")
    watched.record(Outcome.UPSTREAM_TRUNCATED)
    assert watched.state() is BreakerState.OPEN


def test_a_failure_that_envoy_reported_as_an_attempt_counts_once(tmp_path):
    watched = Watched(tmp_path)
    watched.attempt()
    watched.record(Outcome.UPSTREAM_ERROR, status=503)
    assert watched.state() is BreakerState.CLOSED
    assert watched.health.breakers.nodes.get_consecutive_failures("a") == 1


def test_where_envoy_tells_no_attempts_what_fails_for_good_counts(tmp_path):
    watched = Watched(tmp_path)
    watched.record(Outcome.UPSTREAM_ERROR, status=503)
    watched.record(Outcome.UPSTREAM_ERROR, status=0, response_flags=("UF",))
    assert watched.state() is BreakerState.OPEN


def test_a_pool_opens_by_what_clients_saw_and_not_by_attempts_that_another_node_made_good(tmp_path):
    watched = Watched(tmp_path)
    for _ in range(8):
        watched.attempt()
        watched.record(Outcome.COMPLETED, node_id="b", attempts=2)
    assert (watched.state(), watched.pool()) == (BreakerState.OPEN, BreakerState.CLOSED)
    for _ in range(4):
        watched.record(Outcome.NOT_DISPATCHED, node_id="", status=503, response_flags=("UH",))
    assert watched.pool() is BreakerState.OPEN


def test_a_request_that_moved_in_flight_speaks_against_the_pool_that_it_left(tmp_path):
    watched = Watched(tmp_path)
    for _ in range(4):
        watched.record(Outcome.COMPLETED, node_id="z", pool="night", model="n", moved_from="chat")
    assert (watched.pool("chat"), watched.pool("night")) == (BreakerState.OPEN, BreakerState.CLOSED)


def test_probes_alone_open_a_node_and_say_how_it_does(tmp_path):
    watched = Watched(tmp_path, breaker=False)
    watched.attempt()
    watched.attempt()
    assert watched.state() is BreakerState.CLOSED, "requests do not count"
    watched.health.on_probe(ProbeResult("a", ok=True, ttft_ms=31.0))
    watched.health.on_probe(ProbeResult("a", ok=None, reason="status 404"))
    assert watched.health.make_health_form("a").ttft_ms == 31.0
    for _ in range(2):
        watched.health.on_probe(ProbeResult("a", ok=False, reason="no token within 5 s"))
    assert watched.state() is BreakerState.OPEN
    form = watched.health.make_health_form("a")
    assert (form.state, form.ttft_ms, form.probe) == (BreakerState.OPEN, 31.0, "no token within 5 s")
    watched.health.on_probe(ProbeResult("stranger", ok=False))
    assert watched.health.make_health_form("stranger") is None


def test_a_breaker_that_another_replica_opened_is_open_here_and_not_published_back(tmp_path):
    watched = Watched(tmp_path)
    watched.health.on_remote_open("a", "2 consecutive failures (reported by r2)")
    assert watched.state() is BreakerState.OPEN
    assert watched.health.opened == {}


def test_a_node_that_registers_again_after_it_was_gone_begins_with_a_tenth(tmp_path):
    watched = Watched(tmp_path)
    new = Node("g", Endpoint("10.0.0.7", 8000), "m", "1", "bf16", "", 1, 8192, 8)
    watched.health.on_membership(MembershipDelta({"chat": (new,)}, {}))
    assert watched.published == [], "one that is new to the network takes its part at once"
    watched.health.on_membership(MembershipDelta({}, {"chat": ("g",)}))
    assert watched.health.get_probe_target("g") is None
    watched.health.on_membership(MembershipDelta({"chat": (new,)}, {}))
    current = watched.published[-1].nodes["g"]
    assert (current.state, current.share(current.since)) == (BreakerState.RAMPING, 0.1)


def test_switching_the_breaker_off_releases_nodes_and_pools_that_requests_had_opened(tmp_path):
    watched = Watched(tmp_path)
    for _ in range(5):
        watched.record(Outcome.UPSTREAM_ERROR, status=503)
    watched.health.on_remote_open("b", "reported by r2")
    watched.record(Outcome.UPSTREAM_BUSY, node_id="z", pool="night", status=429)
    for _ in range(3):
        watched.health.on_probe(ProbeResult("z", ok=False, reason="no token within 5 s"))
    assert (watched.state("a"), watched.state("b"), watched.pool()) == (BreakerState.OPEN,) * 3
    assert watched.state("z") is BreakerState.COOLING
    watched.reload(breaker=False)
    assert [watched.state(each) for each in "abz"] == [BreakerState.CLOSED] * 3
    assert watched.pool() is BreakerState.CLOSED
    assert {name: each.state for name, each in watched.published[-1].nodes.items()} == dict.fromkeys("abz", BreakerState.CLOSED)
    assert watched.published[-1].pools["chat"].state is BreakerState.CLOSED
    assert (watched.health.opened, watched.health.busy) == ({}, {}), "other replicas get it no longer"
    assert watched.health.snapshot()["nodes"] == {}
    watched.health.on_remote_open("b", "reported by r2, which has the old configuration still")
    watched.health.on_remote_busy("b", 5.0)
    assert watched.state("b") is BreakerState.CLOSED


def test_switching_probes_off_releases_whom_they_had_left_out_and_nobody_else(tmp_path):
    watched = Watched(tmp_path)
    watched.attempt("a")
    watched.attempt("a")
    for _ in range(2):
        watched.health.on_probe(ProbeResult("b", ok=False, reason="no token within 5 s"))
    assert (watched.state("a"), watched.state("b")) == (BreakerState.OPEN, BreakerState.OPEN)
    watched.reload(probe=False)
    assert (watched.state("a"), watched.state("b")) == (BreakerState.OPEN, BreakerState.CLOSED)
    for _ in range(9):
        watched.health.on_probe(ProbeResult("b", ok=False, reason="another replica asks still"))
    assert watched.state("b") is BreakerState.CLOSED


def test_without_the_breaker_whom_probes_left_out_stays_so_until_they_are_switched_off_too(tmp_path):
    watched = Watched(tmp_path)
    for _ in range(2):
        watched.health.on_probe(ProbeResult("b", ok=False, reason="no token within 5 s"))
    watched.reload(breaker=False)
    assert watched.state("b") is BreakerState.OPEN
    watched.reload(breaker=False, probe=False)
    assert watched.state("b") is BreakerState.CLOSED
    assert watched.published[-1].nodes["b"].state is BreakerState.CLOSED


def test_a_request_that_breaks_two_nodes_is_stopped_here_and_at_other_replicas(tmp_path):
    watched = Watched(tmp_path, breaker=False)
    watched.attempt("a", "UC", ORIGIN)
    watched.attempt("b", "503", ORIGIN)
    assert watched.stopped == []
    watched.attempt("b", "UR", ORIGIN)
    assert watched.stopped == [], "another node may answer it yet"
    watched.record(Outcome.UPSTREAM_ERROR, "b", status=502, response_flags=("UR",), origin=ORIGIN)
    assert watched.stopped == [frozenset({ORIGIN})]
    assert (watched.health.newly_stopped, watched.health.stopped) == ({ORIGIN}, frozenset({ORIGIN}))


def test_a_request_that_another_replica_stopped_is_stopped_and_not_published_back(tmp_path):
    watched = Watched(tmp_path)
    watched.health.on_remote_stopped((ORIGIN,))
    assert (watched.stopped, watched.health.newly_stopped) == ([frozenset({ORIGIN})], set())


def test_an_engines_500_counts_as_its_exchange_ended(tmp_path):
    watched = Watched(tmp_path)
    for number in range(9):
        watched.attempt("a", "500", f"{ORIGIN}{number}")
        watched.record(Outcome.CLIENT_ERROR, status=400, origin=f"{ORIGIN}{number}")
    assert watched.state() is BreakerState.CLOSED, "its answer was that the request is too long"
    for number in range(2):
        watched.attempt("a", "500", f"{ORIGIN}{number}")
        watched.record(Outcome.UPSTREAM_ERROR, status=502, origin=f"{ORIGIN}{number}")
    assert watched.state() is BreakerState.OPEN


def test_nodes_that_operators_hold_are_none_that_one_tenant_could_be_left_with(tmp_path):
    watched = Watched(tmp_path)
    watched.health.breakers.shared = True
    watched.health.holds.merge([NodeHold(node_id="b", kind=HoldKind.DRAIN, operator="root", at=1.0)])
    watched.health.on_holds(["b"])
    for number in range(9):
        watched.attempt("a", "503", f"{ORIGIN}{number}")
    assert watched.state("a") is BreakerState.CLOSED
