"""Four workers of two sidecars at three times a budget, with killed workers, a Redis that crashes, and the end of a month in between.

Nothing that is admitted exceeds the budget of its month, and what the counters hold equals the audit log to the token.
"""

import asyncio
import contextlib
import fcntl
import itertools
import struct
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from din_extproc.admit.local import LocalLedger
from din_extproc.admit.spending import SpendingCounters
from din_extproc.audit.records import SettlementRecord
from din_extproc.domain.usage import ExchangeRecord, Usage
from din_extproc.edge.redis.guard import GuardedLedger, OnError
from din_extproc.edge.redis.ledger import RedisLedger
from din_extproc.flow.audit_records import make_ending_record
from din_extproc.flow.settlement import SettlementService
from tests.support.budget_worker import COST, PRICES, TOKENS
from tests.support.exchanges import record
from tests.support.ledgers import linked
from tests.support.servers import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.chaos

CHANGE_MS = int(datetime(2027, 2, 1, tzinfo=ZoneInfo("Europe/Berlin")).timestamp() * 1000)
WORKERS, MEAN = 8, 69
ATTEMPTS = 3 * TOKENS // MEAN
"""Of a month: three times what its budget admits."""


class Network:
    """The workers of two sidecars, and the accounting of each."""

    def __init__(self, server: RedisServer, clock: Path, ledgers: list[RedisLedger], guards: list[GuardedLedger]) -> None:
        self.server, self.clock, self.ledgers = server, clock, ledgers
        self.settlers = [SettlementService(guard) for guard in guards]
        self.audit: list[SettlementRecord] = []
        self.answers: Counter[str] = Counter()
        self.children: list[asyncio.subprocess.Process] = []
        self.reading: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()

    def set_clock(self, now_ms: int) -> None:
        """Move the only clock, between two requests."""
        with self.clock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(struct.pack("q", now_ms))
            file.flush()
            for ledger in self.ledgers:
                ledger.read_clock(now_ms)

    async def add_worker(self, attempts: int) -> None:
        number = next(self._numbers)
        command = [sys.executable, "-m", "tests.support.budget_worker", self.server.url, str(self.clock), f"w{number}", str(attempts)]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        self.children.append(child)
        self.reading.append(asyncio.create_task(self._read(child, self.settlers[number % 2])))

    async def _read(self, child: asyncio.subprocess.Process, settler: SettlementService) -> None:
        """Settle what a worker has admitted: its sidecar's other process learns of it from Envoy, whatever becomes of the worker."""
        assert child.stdout is not None
        async for line in child.stdout:
            verdict, *parts = line.decode().split()
            self.answers[verdict] += 1
            if verdict == "granted" and line.endswith(b"\n"):
                exchange = finished(*parts)
                self.audit.append(make_ending_record(exchange))
                await settler.settle([exchange])

    async def seen(self, answers: int) -> None:
        await until(lambda: sum(self.answers.values()) >= answers, lambda: dict(self.answers))

    async def kill(self, count: int) -> None:
        for child in [each for each in self.children if each.returncode is None][:count]:
            child.kill()
            await child.wait()

    async def finish(self) -> None:
        await asyncio.gather(*self.reading)
        for child in self.children:
            await child.wait()

    def spent(self, month: int, tenant: str = "") -> tuple[int, int]:
        """Return tokens and cost of a month in the audit log: 0 is the first one."""
        own = [each for each in self.audit if (each.at * 1000 >= CHANGE_MS) == bool(month) and tenant in {"", each.tenant}]
        return sum(each.prompt_tokens + each.completion_tokens for each in own), sum(each.cost for each in own)


def finished(request_id: str, tenant: str, prompt: str, output: str, at_ms: str) -> ExchangeRecord:
    """The exchange of a request whose answer was shorter than expected as often as not."""
    used = Usage(int(prompt), int(output) // (1 + int(prompt) % 2))
    exchange = record(
        request_id=request_id, tenant=tenant, usage=used, reserved_tokens=int(prompt) + int(output),
        started_at=int(at_ms) / 1000, sent_ms=1.0, duration_ms=0.0,
    )  # fmt: skip
    return record(**{name: getattr(exchange, name) for name in exchange.__struct_fields__} | {"cost": PRICES.costs(exchange)[0]})


@contextlib.asynccontextmanager
async def network(server: RedisServer, folder: Path):
    clock = folder / "clock"
    clock.write_bytes(struct.pack("q", CHANGE_MS - 60_000))
    async with contextlib.AsyncExitStack() as stack:
        links = [await stack.enter_async_context(linked(server.url, timeout_ms=2000)) for _ in range(2)]
        ledgers = [RedisLedger(link) for link in links]
        guards = [
            GuardedLedger(link, ledger, LocalLedger(lambda: 0), OnError.LOCAL_SHARE, f"accounts {number}", decides=False)
            for number, (link, ledger) in enumerate(zip(links, ledgers, strict=True))
        ]
        for guard in guards:
            await guard.start()
        made = Network(server, clock, ledgers, guards)
        made.set_clock(CHANGE_MS - 60_000)
        try:
            yield made, links[0]
        finally:
            await made.kill(len(made.children))
            await asyncio.gather(*made.reading)
            for guard in guards:
                await guard.close()


async def test_budgets_hold_through_kills_a_crash_of_redis_and_the_end_of_a_month(tmp_path):
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        async with network(server, tmp_path) as (running, link):
            for _ in range(WORKERS):
                await running.add_worker(2 * ATTEMPTS // WORKERS)
            await running.seen(ATTEMPTS // 8)
            await running.kill(2)
            for _ in range(2):
                await running.add_worker(2 * ATTEMPTS // WORKERS)
            await running.seen(ATTEMPTS // 4)
            await asyncio.to_thread(server.restart)
            await running.seen(ATTEMPTS)
            running.set_clock(CHANGE_MS)
            await running.seen(ATTEMPTS + ATTEMPTS // 8)
            await running.kill(1)
            await running.add_worker(2 * ATTEMPTS // WORKERS)
            await running.finish()
            counters = await settled(running, link)
            assert running.answers["refused"] > running.answers["granted"], "the demand was three times the budget"
            for month, (tokens, cost, held_tokens, held_cost) in counters.items():
                assert (tokens, cost) == running.spent(month)
                assert tokens + held_tokens <= TOKENS
                assert cost + held_cost <= COST
                assert held_tokens <= 3 * 118, "no more than what killed workers had just been granted"
                assert tokens > TOKENS / 2, "and it can be used"
            for tenant in ("a", "b"):
                numbers = struct.unpack(">14d", await link.call("GET", f"din:{{t={tenant}}}:spend:budget:own:{tenant}"))
                assert [int(numbers[at]) for at in (2, 8)] == [running.spent(month, tenant)[0] for month in (0, 1)]


async def settled(running: Network, link) -> dict[int, tuple[int, int, int, int]]:
    """Return tokens and cost of each month, spent and still reserved, once the counters hold what the audit log does."""

    async def read() -> dict[int, tuple[int, int, int, int]]:
        numbers = struct.unpack(">14d", await link.call("GET", "din:{n}:spend:budget:all"))
        found = SpendingCounters(*map(int, numbers))
        held = found.used_tokens - found.tokens, found.used_cost - found.cost
        return {0: (found.before_tokens, found.before_cost, 0, 0), 1: (found.tokens, found.cost, *held)}

    async def equal() -> bool:
        counters = await read()
        return all(counters[month][:2] == running.spent(month) for month in counters)

    async def describe() -> str:
        return f"{await read()} {running.spent(0)} {running.spent(1)} {running.answers}"

    try:
        await until(equal)
    except AssertionError:
        raise AssertionError(await describe()) from None
    return await read()
