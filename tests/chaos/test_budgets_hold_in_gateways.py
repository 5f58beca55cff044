"""Two whole gateways at three times a budget: workers are killed, Redis crashes and comes back, and a month ends while answers are on
their way. Nothing is admitted beyond the budget of its month, and the counters equal the audit logs to the token.

What the requests in flight were reserved too little can exceed a budget, and nothing else.
The month's end is reached by setting the clocks, not by waiting.
"""

import contextlib
import heapq
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Self
from zoneinfo import ZoneInfo

import httpx
import psutil
import pytest
import redis

from din_extproc.admit.spending import SpendingCounters
from tests.chaos.test_clock_steps import STEPPED
from tests.support.columns import audited
from tests.support.servers import EngineSim, RedisServer
from tests.support.stack import Stack, key_of, node, tenant
from tests.support.waiting import eventually

pytestmark = pytest.mark.chaos

CHANGE_S = datetime(2027, 2, 1, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
MARGIN_S = 1800.0
"""By so much the clocks are before the month's end at first, and behind it afterwards."""
TOKENS, COST = 8000, 10**9
PRICE = {"input": 1, "output": 2, "request": 0.0001}
CLIENTS = 6
PATH = "/v1/chat/completions"
COUNTED = """
from din_extproc.edge.redis import ledger
ledger.RedisLedger._now = property(lambda _: ledger.bulks(int(time.time() * 1000))[1], lambda *_: None)
"""
"""Lets the scripts in Redis count by a gateway's clock, too."""


class Clock:
    """The one clock of both gateways."""

    def __init__(self, folder: Path) -> None:
        self._step = folder / "step"
        self.set(CHANGE_S - MARGIN_S)

    def set(self, at: float) -> None:
        """Set all clocks to seconds since the epoch; they go on from there."""
        new = self._step.with_suffix(".new")
        new.write_text(str(at - time.time()))
        new.replace(self._step)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of what is started from now on."""
    (tmp_path / "sitecustomize.py").write_text(STEPPED + COUNTED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("DIN_TEST_CLOCK", str(tmp_path / "step"))
    return Clock(tmp_path)


class Network:
    """Two gateways with four workers each over one Redis, and a fast and a slow engine."""

    def __init__(self, server: RedisServer, fast: EngineSim, slow: EngineSim) -> None:
        self.server, self.slow = server, slow
        config = {
            "pools": {
                "fast": {"model": "fast", "engine": "vllm", "nodes": [node("f", fast.address)]},
                "slow": {"model": "slow", "engine": "vllm", "nodes": [node("s", slow.address)]},
            },
            "tenants": [tenant("a"), tenant("b")],
            "store": {"timeout_ms": 200},
            "prices": {"currency": "EUR", "models": dict.fromkeys(("fast", "slow"), PRICE)},
            "budgets": {
                "time_zone": "Europe/Berlin",
                "limits": [
                    {"name": "all", "period": "month", "tokens": TOKENS, "money": COST / 1e9},
                    {"name": "own", "period": "month", "tenant": "*", "tokens": TOKENS},
                ],
            },
            "audit": {"folder": "audit", "replica": "gw-1", "keys": {"k": {"value": "1" * 64}}, "flush_ms": 20},
        }
        self.stacks = [Stack(config, server=server, gateway={"workers": 4}) for _ in range(2)]

    def worker(self, gateway: int) -> psutil.Process:
        """Return a worker of a gateway."""
        children = psutil.Process(self.stacks[gateway].sidecar.pid).children()
        return next(child for child in children if "--worker" in child.cmdline())

    def kill_worker(self, gateway: int) -> None:
        victim = self.worker(gateway)
        victim.kill()
        psutil.wait_procs([victim])

    def recorded(self, month: int, tenant: str = "") -> list[dict[str, Any]]:
        """Return a month's settled requests in both audit logs."""
        records = [each for stack in self.stacks for trace, each in audited(stack).items() if trace.startswith(f"month-{month}-")]
        return [each for each in records if tenant in {"", each["tenant"]}]

    def spent(self, month: int, tenant: str = "") -> tuple[int, int]:
        """Return tokens and cost of a month's requests in both audit logs."""
        own = self.recorded(month, tenant)
        return sum(each["prompt_tokens"] + each["completion_tokens"] for each in own), sum(each.get("cost", 0) for each in own)

    def underestimated(self, month: int) -> int:
        """Return how many tokens as many requests as can be in flight used beyond what was reserved for them, at most."""
        beyond = (each["prompt_tokens"] + each["completion_tokens"] - each["reserved_tokens"] for each in self.recorded(month))
        return sum(heapq.nlargest(CLIENTS + len(self.stacks), (max(0, tokens) for tokens in beyond)))

    def counters(self, scope: str = "{n}", name: str = "all") -> SpendingCounters:
        with redis.Redis(port=self.server.port) as connection:
            return SpendingCounters(*map(int, struct.unpack(">14d", connection.get(f"din:{scope}:spend:budget:{name}"))))


@pytest.fixture
def network(clock: Clock) -> Iterator[Network]:
    with (
        RedisServer("--appendonly", "yes", "--appendfsync", "always") as server,
        EngineSim(model="fast", decode_rate=5000.0, prefill_rate=1e6, max_num_seqs=64) as fast,
        EngineSim(model="slow", decode_rate=500.0, prefill_rate=1e6) as slow,
    ):
        running = Network(server, fast, slow)
        try:
            with ThreadPoolExecutor(2) as starting:  # Envoy ends with the thread that started it
                list(starting.map(Stack.start, running.stacks))
                yield running
        finally:
            for stack in running.stacks:
                stack.stop()


class Demand:
    """Clients of both gateways that ask for three times what a month's budget admits, and until `over` is set."""

    def __init__(self, network: Network, month: int) -> None:
        self.answers: Counter[str] = Counter()
        self.whole: set[str] = set()
        """Trace ids of the answers that arrived."""
        self.over = threading.Event()
        self._network, self._month, self._lock = network, month, threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()

    def seen(self, verdict: str, share: float) -> None:
        """Wait until answers of a kind were as many as a share of what the budget admits."""
        eventually(lambda: self.answers[verdict] >= share * TOKENS / 60, lambda: dict(self.answers))

    def _ask(self, number: int) -> None:
        tenant, stack = "ab"[number % 2], self._network.stacks[number % 4 // 2]
        with httpx.Client(base_url=stack.url, timeout=30, headers={"authorization": f"Bearer {key_of(tenant)}"}) as client:
            count = 0
            while not self.over.is_set() or self.answers["budget_exceeded"] < 2 * self.answers["granted"]:
                trace, count = f"month-{self._month}-{number:02d}-{count:06d}", count + 1
                body = {
                    "model": "fast",
                    "max_tokens": 30,
                    "ignore_eos": True,
                    "messages": [{"role": "user", "content": "word " * (count % 40)}],
                }
                outcome = "cut"
                with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                    reply = client.post(PATH, json=body, headers={"x-din-trace-id": trace})
                    outcome = "granted" if reply.status_code == 200 else reply.json()["error"]["code"]
                with self._lock:
                    self.answers[outcome] += 1
                    if outcome == "granted":
                        self.whole.add(trace)


@contextlib.contextmanager
def held_streams(network: Network) -> Iterator[list[str]]:
    """Streams through both gateways that have begun, and do not go on before the end of the block."""
    with contextlib.ExitStack() as stack:
        lines = []
        for number, gateway in enumerate(network.stacks):
            client = stack.enter_context(gateway.client("a"))
            body = {"model": "slow", "stream": True, "max_tokens": 100, "ignore_eos": True, "messages": [{"role": "user", "content": "hi"}]}
            headers = {"x-din-trace-id": f"month-0-held-{number:06d}"}
            reply = stack.enter_context(client.stream("POST", PATH, json=body, headers=headers))
            assert reply.status_code == 200
            lines.append(reply.iter_lines())
            next(lines[-1])
        network.slow.pause()
        ended: list[str] = []
        try:
            yield ended
        finally:
            network.slow.resume()
        ended += [[line for line in each if line][-1] for each in lines]


def test_budgets_hold_in_two_gateways_through_kills_a_crash_of_redis_and_the_end_of_a_month(network, clock):
    demands = [Demand(network, month) for month in range(2)]
    with held_streams(network) as ended:
        with demands[0] as demand:
            demand.seen("granted", 0.1)
            network.kill_worker(0)
            demand.seen("granted", 0.3)
            network.server.restart()
            demand.seen("granted", 0.5)
        clock.set(CHANGE_S + MARGIN_S)
        with demands[1] as demand:
            demand.seen("granted", 0.1)
            network.kill_worker(1)
            demand.seen("granted", 0.3)
    assert ended == ["data: [DONE]"] * 2, "they outlive the month, the workers and the Redis that they began with"
    whole = {trace for demand in demands for trace in demand.whole}
    eventually(lambda: whole <= {trace for stack in network.stacks for trace in audited(stack)}, "every answer is in an audit log")

    def sums() -> list[tuple[int, int]]:
        found = network.counters()
        return [(found.before_tokens, found.before_cost), (found.tokens, found.cost)]

    def recorded() -> list[tuple[int, int]]:
        return [network.spent(month) for month in range(2)]

    eventually(lambda: sums() == recorded(), lambda: f"{sums()} {recorded()} {[each.answers for each in demands]}")
    for month, ((tokens, cost), demand) in enumerate(zip(recorded(), demands, strict=True)):
        assert demand.answers["budget_exceeded"] >= 2 * demand.answers["granted"], "the demand was three times the budget"
        assert TOKENS / 2 < tokens <= TOKENS + network.underestimated(month)
        assert 0 < cost <= COST
    found = network.counters()
    assert found.used_tokens <= TOKENS + network.underestimated(1), "with what killed workers had just been granted"
    for name in ("a", "b"):
        own = network.counters(f"{{t={name}}}", f"own:{name}")
        assert [own.before_tokens, own.tokens] == [network.spent(month, name)[0] for month in range(2)]
    assert all(stack.status()["workers"]["restarts"] >= 1 for stack in network.stacks)
