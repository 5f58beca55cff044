"""Cost by configuration size: nodes and rules (whole decisions, in process), tenants (admission on a real Redis).

Rule: sizes are measured in turn, round by round, so that a slow moment of the machine meets both.
"""

import asyncio
import gc
import random
import tempfile
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import uvloop
import yaml

from din_extproc.admit.keys import ENTROPY_BYTES, KeyRing, make_key, parse_hash
from din_extproc.admit.ledger import Claim, Granted, RateLimitStatus
from din_extproc.domain.request import Priority, RequestHead
from din_extproc.domain.tenant import ApiKey, Budget, RateLimits, Tenant
from din_extproc.domain.verdict import Send
from din_extproc.edge.background import Background
from din_extproc.edge.redis.address import Address
from din_extproc.edge.redis.ledger import SCRIPTS, RedisLedger
from din_extproc.edge.redis.link import Link
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.flow.request import ExtProcHandler, WorkerContext
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.bench.contenders import chat_body, configuration
from tests.bench.field import BODY_BYTES, Effort, Field, Figures
from tests.bench.harness import cpu_s, median
from tests.support.servers import RedisServer
from tests.support.stack import key_of, node

_FEW = 10
_IN_FLIGHT = 64
_DECISIONS = 1_000
_ADMISSIONS = 4_000
_AT_ONCE = 16
HEAD = RequestHead(
    method="POST",
    path="/v1/chat/completions",
    headers={
        ":method": "POST",
        ":path": "/v1/chat/completions",
        "content-type": "application/json",
        "authorization": f"Bearer {key_of('acme')}",
    },
)


class Free:
    """A ledger that grants everything at once, so that only the decision is measured."""

    _granted = Granted(RateLimitStatus(limit_requests=100, remaining_requests=99, reset_requests_ms=600))

    async def reserve(self, _claim: Claim) -> Granted:
        return self._granted

    async def renew(self, _tenant: str, _request_id: str, _lease_ms: int) -> None:
        """Do nothing: nothing was reserved."""

    async def release(self, _tenant: str, _request_id: str) -> None:
        """Do nothing: nothing was reserved."""

    async def settle(self, _tenant: str, _request_id: str, _tokens: int, _cost: int = 0) -> bool:
        return True


def nodes(field: Field) -> Figures:
    """Measure decisions over many nodes of unequal load."""
    rounds, many = field.effort.rounds, field.effort.many_nodes
    sizes = sorted({_FEW, min(1_000, many), many})
    spent = _decisions({size: make_context(pools=_pool(size)) for size in sizes}, rounds)
    return {
        "decision_10k_nodes_vs_10": _ratio(spent[many], spent[_FEW]),
        **{f"decision_us_{size}_nodes": median(times) for size, times in spent.items()},
    }


def rules(field: Field) -> Figures:
    """Measure decisions with many rules of which only the last one matches."""
    rounds, many = field.effort.rounds, field.effort.many_rules
    spent = _decisions({size: make_context(rules=_rules(size)) for size in (_FEW, many)}, rounds)
    return {
        "decision_1k_rules_vs_10": _ratio(spent[many], spent[_FEW]),
        **{f"decision_us_{size}_rules": median(times) for size, times in spent.items()},
    }


def tenants(field: Field) -> Figures:
    """Key, reservation, release and settlement for tenants drawn at random, CPU of this process and of Redis."""
    many = field.effort.many_tenants
    spent = uvloop.run(_tenants((1, _FEW, 100, many), field.effort))
    whole = {size: [here + there for here, there in times] for size, times in spent.items()}
    figures = {"admit_100k_tenants_vs_10": _ratio(whole[many], whole[_FEW])}
    for name, size in (("1", 1), ("100", 100), ("100k", many)):
        figures[f"admit_sidecar_us_{name}_tenants"] = median(here for here, _ in spent[size])
        figures[f"admit_redis_us_{name}_tenants"] = median(there for _, there in spent[size])
    return figures


def _ratio(over: list[float], under: list[float]) -> float:
    return median(one / other for one, other in zip(over, under, strict=True))


def _pool(size: int) -> dict[str, Any]:
    many = [node(f"n{at}", f"10.{at >> 16}.{at >> 8 & 255}.{at & 255}:8000", max_seq_len=8192 + 1024 * (at % 3)) for at in range(size)]
    return {"fast": {"model": "physical", "engine": "vllm", "scheduler": "token_available", "nodes": many}}


def _rules(size: int) -> list[dict[str, Any]]:
    never = [{"id": f"r{at}", "when": {"header": {"x-task-tier": f"tier-{at}"}}, "pool": "long"} for at in range(size - 1)]
    return [*never, {"id": "rest", "when": "always", "pool": "fast"}]


def make_context(**sections: Any) -> WorkerContext:
    own = {
        "version": 1,
        "gateway": {"ext_proc": {"socket": "/unused.sock"}, "access_log": {"address": "127.0.0.1:1"}, "admin": {"address": "127.0.0.1:2"}},
        "store": {"url": "redis://127.0.0.1:1/0"},
    }
    content = configuration((7001, 7002), **({"rules": []} | sections)) | own
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "din.yaml"
        file.write_text(yaml.dump(content, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
        settings = load(file, {})
    assert isinstance(settings, Settings), str(settings)
    return RequestPlane(settings, Free(), Background(), DecisionCounters()).context


def _decisions(workers: dict[int, WorkerContext], rounds: int) -> dict[int, list[float]]:
    """Return microseconds of each round, by size."""
    body = chat_body(BODY_BYTES)
    running: dict[int, deque[ExtProcHandler]] = {size: deque() for size in workers}
    spent: dict[int, list[float]] = {size: [] for size in workers}
    for measured in (False, *(True for _ in range(rounds))):
        for size, worker in workers.items():
            gc.collect()
            began = time.process_time()
            for _ in range(_DECISIONS):
                decide(worker, body, running[size])
            if measured:
                spent[size].append((time.process_time() - began) / _DECISIONS * 1e6)
    return spent


def decide(worker: WorkerContext, body: bytes, running: deque[ExtProcHandler]) -> None:
    """Decide a request while the oldest of those in flight ends."""
    flow = worker.create_handler()
    verdict = _at_once(flow.decide(HEAD, body))
    assert isinstance(verdict, Send), verdict
    running.append(flow)
    if len(running) > _IN_FLIGHT:
        running.popleft().ended()


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a decision waited for something")


async def _tenants(sizes: Iterable[int], effort: Effort) -> dict[int, list[tuple[float, float]]]:
    """CPU per admission, here and in Redis, in microseconds: round by round."""
    spent: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    with RedisServer() as server:

        async def located() -> Address:
            return Address(host="127.0.0.1", port=server.port)

        link = Link(located, SCRIPTS, timeout_ms=20_000)
        assert await link.start()
        ledger = RedisLedger(link)
        populations = {size: _make_population(size) for size in spent}
        for size, (_, tenants_) in populations.items():
            await _admit(ledger, populations[size], range(len(tenants_)))
        for turn in range(effort.rounds):
            for size, population in populations.items():
                chosen = random.Random(turn).choices(range(size), k=_ADMISSIONS)
                gc.collect()
                here, there = time.process_time(), cpu_s(server.pid)
                await _admit(ledger, population, chosen)
                here, there = time.process_time() - here, cpu_s(server.pid) - there
                spent[size].append((here / _ADMISSIONS * 1e6, there / _ADMISSIONS * 1e6))
        await link.close()
    return spent


Population = tuple[KeyRing, list[tuple[str, str, tuple[Budget, ...]]]]
"""The keys; and of each tenant its id, its `authorization` and its budgets."""


def _make_population(size: int) -> Population:
    rng = random.Random(size)
    owners, members = [], []
    for at in range(size):
        name = f"tenant-{size}-{at}"
        made = make_key(name, rng.randbytes(ENTROPY_BYTES))
        hashed = parse_hash(made.hash)
        assert hashed is not None
        limits = RateLimits(rpm=1_000_000, tpm=1_000_000_000, max_streams=1_000)
        tenant = Tenant(name, ("*",), Priority.STANDARD, limits, {})
        owners.append((tenant, (ApiKey(name, *hashed),)))
        members.append((name, f"Bearer {made.text}", (Budget("tenant", limits),)))
    return KeyRing(owners), members


async def _admit(ledger: RedisLedger, population: Population, chosen: Iterable[int]) -> None:
    """Every one of the chosen tenants sends a request: a few at once."""
    keys, members = population
    waiting = iter(chosen)

    async def lane() -> None:
        for at in waiting:
            tenant, authorization, budgets = members[at]
            keys.authenticate(authorization, "", 0.0)
            request_id = f"{time.monotonic_ns():x}-{at:x}"
            granted = await ledger.reserve(Claim(request_id, tenant, budgets, 300, 30_000))
            assert isinstance(granted, Granted)
            await ledger.release(tenant, request_id)
            await ledger.settle(tenant, request_id, 200)

    await asyncio.gather(*(lane() for _ in range(_AT_ONCE)))
