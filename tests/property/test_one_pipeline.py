"""ext_proc, ext_authz, `explain`, `replay` and `simulate` decide alike: the same route, pool, reservation and refusal."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Claim, Denied, Granted
from din_extproc.admit.local import LocalLedger
from din_extproc.domain.health import BreakerSnapshot, BreakerSnapshots, BreakerState
from din_extproc.domain.membership import NodeState
from din_extproc.domain.request import RequestHead
from din_extproc.domain.usage import Labels, Usage
from din_extproc.domain.verdict import ImmediateResponse, Refusal, Verdict
from din_extproc.edge.background import Background
from din_extproc.edge.registry.forms import HealthForm, MemberForm, NodeForm
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.flow import ext_authz
from din_extproc.flow.decision import Decision, Permit
from din_extproc.flow.dispatch import make_permit_verdict
from din_extproc.flow.ext_authz import ExtAuthzHandlerFactory
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.explain import explain as explain_module
from din_extproc.tools.explain.explain import explain
from din_extproc.tools.replay.replay import owner_finder
from din_extproc.tools.replay.rerun import ReplayedRequest, ReplayOutcome, ReplayRun, intent_of
from din_extproc.tools.simulate.plan import SimulationPlan
from din_extproc.tools.simulate.replica import SimulatedReplica, SimulatedWait
from din_extproc.tools.simulate.traffic import Arrival
from din_extproc.tools.virtual_time import VirtualClock, VirtualLedger
from tests.support.stack import key_of, node, tenant

PATH = "/v1/chat/completions"
HOUR_UTC = 12.0
CONFIG: dict[str, Any] = {
    "version": 1,
    "aliases": {"auto": {"models": ["*"]}, "bound": {"model": "small", "version": ">=2"}},
    "pools": {
        "s": {
            "model": "small", "engine": "vllm",
            "nodes": [
                node("s1", "10.0.0.1:80", version="1.0", max_seq_len=2000),
                node("s2", "10.0.0.2:80", version="2.0", max_seq_len=2000),
            ],
        },
        "b": {"model": "big", "engine": "vllm", "nodes": [node("b1", "10.0.1.1:80", max_seq_len=20_000)]},
        "x": {"model": "small", "engine": "vllm", "nodes": [node("x1", "10.0.2.1:80", version="2.0", max_seq_len=20_000)]},
    },
    "rules": [
        {"id": "long", "when": {"estimated_tokens": {"gt": 1000}}, "pool": "b", "fallback": "x"},
        {"id": "tier", "when": {"header": {"x-task-tier": ["gold"]}}, "pool": "s", "fallback": "b"},
        {"id": "rest", "when": {"priority": ["batch"]}, "pool": "x"},
    ],
    "tenants": [
        tenant("wide", rpm=1000, tpm=1_000_000),
        tenant("tight", rpm=2, tpm=1500),
        tenant("single", max_streams=1),
        tenant("one-model", models=("small",), rpm=1000, tpm=1_000_000),
    ],
}  # fmt: skip
OF_NODES = {"no_healthy_node", "context_length_exceeded", "version_mismatch", "model_not_found"}
"""What a proxy that chooses the node is not refused for."""
OF_LIMITS = {"rate_limit_exceeded", "concurrency_limit_exceeded", "request_exceeds_limit"}
"""What is not asked by `explain`."""


class Fate(NamedTuple):
    """What an entry point decided about one request, "" and None where it came no further."""

    rule: str = ""
    pool: str = ""
    tokens: int | None = None
    budgets: tuple[Any, ...] = ()
    refusal: str = ""


class Recorder:
    """A ledger port that keeps what it was asked."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self.claims: list[Claim] = []

    async def reserve(self, claim: Claim) -> Granted | Denied:
        self.claims.append(claim)
        return await self._ledger.reserve(claim)

    async def settle(self, tenant: str, request_id: str, tokens: int, cost: int = 0) -> bool:
        return await self._ledger.settle(tenant, request_id, tokens)

    def fate(self, seen: int, refusal: str = "", rule: str = "", pool: str = "") -> Fate:
        """`seen`: claims that belong to earlier requests."""
        claim = self.claims[-1] if len(self.claims) > seen else None
        return Fate(rule, pool, *((None, ()) if claim is None else (claim.tokens, claim.budgets)), refusal)


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, str], dict[str, Any]]:
    """Headers and body."""
    headers = {
        name: value
        for name, values in (
            ("x-task-tier", ["", "gold", "silver"]),
            ("x-din-model-version", ["", "", "", ">=2", "==1.0", ">=9"]),
            ("x-din-priority", ["", "batch", "critical"]),
        )
        if (value := draw(st.sampled_from(values)))
    }
    body = {
        "model": draw(st.sampled_from(["auto", "auto", "bound", "small", "big", "small@>=2", "unknown"])),
        "messages": [{"role": "user", "content": "word " * draw(st.sampled_from([1, 40, 300, 1500, 8000]))}],
        "stream": draw(st.booleans()),
    }
    output = draw(st.sampled_from([None, None, 1, 300, 5000, 50_000]))
    return headers, body if output is None else {**body, "max_tokens": output}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    file = tmp_path_factory.mktemp("pipeline") / "din.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    loaded = load(file, {})
    assert isinstance(loaded, Settings), str(loaded)
    return loaded


def breakers(opened: set[str]) -> BreakerSnapshots:
    return BreakerSnapshots({each: BreakerSnapshot(BreakerState.OPEN, 0.0, 30.0, 0.0, "it failed") for each in opened})


def head_of(tenant_id: str, headers: dict[str, str]) -> RequestHead:
    return RequestHead("POST", PATH, {"authorization": f"Bearer {key_of(tenant_id)}", **headers})


def run(coroutine: Any) -> Any:
    """Nothing here waits."""
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    return stop.value.value


def code_of(verdict: Verdict) -> str:
    return json.loads(verdict.body)["code"] if isinstance(verdict, ImmediateResponse) else ""


class Served(NamedTuple):
    """What ext_proc decided, and what its access log would bring back."""

    fate: Fate
    labels: Labels


def by_ext_proc(settings: Settings, tenant_id: str, asked: list[Any], opened: set[str]) -> list[Served]:
    ledger = Recorder(LocalLedger(lambda: 0))
    plane = RequestPlane(settings, ledger, Background(), DecisionCounters())
    plane.context.selector.on_breakers(breakers(opened))
    found = []
    for headers, body in asked:
        seen = len(ledger.claims)
        verdict = run(plane.context.create_handler().decide(head_of(tenant_id, headers), json.dumps(body).encode()))
        labels = msgspec.json.decode(verdict.metadata["labels"], type=Labels)
        found.append(Served(ledger.fate(seen, code_of(verdict), labels.rule, labels.pool), labels))
    return found


def by_ext_authz(settings: Settings, tenant_id: str, asked: list[Any], opened: set[str]) -> list[tuple[Fate, Permit | None, Labels]]:
    ledger = Recorder(LocalLedger(lambda: 0))
    plane = RequestPlane(settings, ledger, Background(), DecisionCounters())
    plane.context.selector.on_breakers(breakers(opened))
    factory, found = ExtAuthzHandlerFactory(plane.context), []
    for headers, body in asked:
        seen, permits = len(ledger.claims), []

        def keep(permit: Permit, *rest: Any, kept: list[Permit] = permits) -> Any:
            kept.append(permit)
            return make_permit_verdict(permit, *rest)

        with mock.patch.object(ext_authz, "make_permit_verdict", keep):
            verdict = run(factory.create_handler().decide(head_of(tenant_id, headers), json.dumps(body).encode()))
        permit = permits[0] if permits else None
        rule = "" if permit is None or permit.routed is None else permit.routed.rule
        pool = "" if permit is None or permit.target is None else permit.target.pool.name
        labels = msgspec.json.decode(verdict.metadata["labels"], type=Labels)
        found.append((ledger.fate(seen, code_of(verdict), rule, pool), permit, labels))
    return found


@contextmanager
def recorded_explanations() -> Iterator[list[Claim]]:
    claims: list[Claim] = []
    reserve = explain_module._Unlimited.reserve

    async def keep(self: Any, claim: Claim) -> Granted:
        claims.append(claim)
        return await reserve(self, claim)

    with mock.patch.object(explain_module._Unlimited, "reserve", keep):
        yield claims


def by_explain(settings: Settings, tenant_id: str, asked: list[Any], opened: set[str]) -> list[Fate]:
    form = HealthForm(state=BreakerState.OPEN, share=0.0, again_in_s=30.0)
    rows = [
        MemberForm(
            node=NodeForm(
                id=each.id, address=str(each.endpoint), model=each.model, version=each.version, dtype=each.dtype, engine="vllm",
                compute_capability="", tp_world_size=1, max_seq_len=each.max_seq_len, max_concurrency=each.max_concurrency,
            ),
            state=NodeState.READY, trust=1.0, reasons=(), beat=None, beat_age_s=None, stale=False, pools=(pool.name,),
            health=form if each.id in opened else None,
        )
        for pool in settings.pools
        for each in pool.nodes
    ]  # fmt: skip
    found = []
    for headers, body in asked:
        with recorded_explanations() as claims:
            explanation = explain(settings, tenant_id, json.dumps({"headers": headers, "body": body}).encode(), rows)
        claim = claims[-1] if claims else None
        pool = "" if not explanation.sent else explanation.fallback if explanation.degraded else explanation.pool
        rule = explanation.rule or "" if explanation.sent else ""
        found.append(Fate(rule, pool or "", *((None, ()) if claim is None else (claim.tokens, claim.budgets)), explanation.refusal or ""))
    return found


def past_of(labels: Labels, entry: str, at: int) -> ReplayedRequest:
    """As the audit log tells it."""
    assert labels.tags is not None
    assert labels.tags.entry == entry
    return ReplayedRequest(
        trace_id=str(at), tenant=labels.tenant, key_id=labels.key_id, began_ms=int(HOUR_UTC * 3_600_000), took_ms=60_000,
        usage=Usage(0, 1), media=0, cost=0, reserved=labels.reserved_tokens,
        intent=intent_of(labels.tags, labels.operation, labels.prompt_estimate, stream=labels.stream), entry=entry,
        fate=ReplayOutcome(labels.pool, labels.model, labels.rule),
    )  # fmt: skip


def by_replay(settings: Settings, record: list[ReplayedRequest], opened: set[str]) -> tuple[list[ReplayOutcome], list[Claim]]:
    rerun = ReplayRun(make_view(settings, {}), PoolMembership.from_pools(settings.pools), owner_finder(settings))
    ledger = rerun._context.ledger = Recorder(rerun._context.ledger)
    rerun._context.selector.on_breakers(breakers(opened))
    return rerun.fates(record), ledger.claims


def by_simulate(settings: Settings, tenant_id: str, record: list[ReplayedRequest], asked: list[Any], opened: set[str]) -> list[Fate]:
    start_ms = int(HOUR_UTC * 3_600_000)
    plan = SimulationPlan(
        view=make_view(settings, {}), pools=settings.pools, kinds={}, node_policies={}, pool_policies={}, start_ms=start_ms
    )
    counters, clock = InMemoryLedger(), VirtualClock(start_ms / 1000)
    replica = SimulatedReplica(plan, counters, clock)
    ledger = replica._context.ledger = Recorder(VirtualLedger(counters, clock))
    replica.selector.on_breakers(breakers(opened))
    who = next(Authenticated(tenant, key) for tenant, keys in settings.keys for key in keys if tenant.id == tenant_id)
    found = []
    for number, (past, (headers, _)) in enumerate(zip(record, asked, strict=True)):
        seen, intent = len(ledger.claims), past.intent
        assert intent is not None
        arrival = Arrival(
            at=0.0, source="", tenant=tenant_id, who=who, intent=intent, head=head_of(tenant_id, headers),
            prompt_tokens=intent.prompt_tokens, output_tokens=1,
        )  # fmt: skip
        decided = replica.decide(arrival, number, 0.0)
        assert not isinstance(decided, SimulatedWait)
        if isinstance(decided, Refusal):
            found.append(ledger.fate(seen, decided.code.code))
        else:
            assert isinstance(decided, Decision)
            found.append(ledger.fate(seen, "", decided.routed.rule, decided.target.pool.name))
    return found


@examples(max_examples=200)
@given(
    tenant_id=st.sampled_from([each["id"] for each in CONFIG["tenants"]]),
    asked=st.lists(requests(), min_size=1, max_size=3),
    opened=st.sets(st.sampled_from(["s1", "s2", "b1", "x1"]), max_size=3),
)
def test_all_entry_points_decide_alike(settings: Settings, tenant_id: str, asked: list[Any], opened: set[str]) -> None:
    served = by_ext_proc(settings, tenant_id, asked, opened)
    fates = [each.fate for each in served]

    record = [past_of(each.labels, "", at) for at, each in enumerate(served)]
    replayed, claims = by_replay(settings, record, opened)
    assert [(fate.rule, fate.pool, fate.refusal) for fate in replayed] == [(fate.rule, fate.pool, fate.refusal) for fate in fates]
    assert [(claim.tokens, claim.budgets) for claim in claims] == [(fate.tokens, fate.budgets) for fate in fates if fate.tokens is not None]

    assert by_simulate(settings, tenant_id, record, asked, opened) == fates

    for fate, explained in zip(fates, by_explain(settings, tenant_id, asked, opened), strict=True):
        if fate.refusal in OF_LIMITS:
            assert (explained.tokens, explained.budgets) == (fate.tokens, fate.budgets)
        else:
            assert explained == fate


@examples(max_examples=200)
@given(
    tenant_id=st.sampled_from([each["id"] for each in CONFIG["tenants"]]),
    asked=requests(),
    opened=st.sets(st.sampled_from(["s1", "s2", "b1", "x1"])),
)
def test_ext_authz_gives_the_verdict_of_ext_proc_without_the_nodes(
    settings: Settings, tenant_id: str, asked: Any, opened: set[str]
) -> None:
    [(fate, _)] = by_ext_proc(settings, tenant_id, [asked], opened)
    [(permitted, permit, labels)] = by_ext_authz(settings, tenant_id, [asked], opened)
    if fate.refusal not in OF_NODES:
        assert permitted == fate
    elif not permitted.refusal:
        assert permit is not None
        assert permit.target is None
    else:
        assert permitted.refusal in {*OF_LIMITS, "model_not_allowed"}

    [replayed], _ = by_replay(settings, [past_of(labels, "ext_authz", 0)], opened)
    assert (replayed.model, replayed.refusal) == ("" if permit is None else permit.model, permitted.refusal)
