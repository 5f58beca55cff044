"""The Lua scripts and their twin in Python: the same random calls at the same times, the same answers and the same state."""

import asyncio
import struct
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from din_extproc.admit.budget import RETENTION_MS, WINDOW_SECONDS, BudgetCounters
from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.ledger import Claim, Denied, Granted, Settlement
from din_extproc.admit.spending import SpendingCounters
from din_extproc.domain.spending import SpendingWindow
from din_extproc.domain.tenant import Budget, RateLimits
from din_extproc.edge.redis.calls import Charge
from din_extproc.edge.redis.ledger import RedisLedger
from din_extproc.edge.redis.link import Link
from tests.support.ledgers import NOON_MS, linked
from tests.support.servers import FLAVOURS

SCOPES = ("tenant", "model:m", "network", "network:model:m")
TENANT = "fin{ance}:1"
OWNERS = (b"din:{t=fin%7Bance%7D%3A1}:", b"din:{n}:")
"""What the keys of the tenant begin with, and those that all tenants share."""

numbers = st.builds(
    RateLimits,
    rpm=st.none() | st.integers(1, 12),
    tpm=st.none() | st.sampled_from([1, 7, 1000, 90_001]) | st.integers(1, 10**9),
    max_streams=st.none() | st.integers(1, 4),
)
ceilings = st.tuples(numbers, st.sampled_from([True, True, True, False]))
"""Limits, and whether they are enforced."""
waits = st.sampled_from([0, 1, 999, 1000, 5000, 59_999, 60_000, 61_000, 120_000, 86_400_000, -3000, -7_200_000]) | st.integers(0, 70_000)
ids = st.sampled_from(["a", "b", "c", "d", "e", "f"])
tokens = st.sampled_from([0, 1, 500, 1000]) | st.integers(0, 2000) | st.integers(0, 2 * 10**9)
leases = st.sampled_from([10_000, 30_000, 300_000])
"""None so short that its key expires by the clock of Redis, which runs on, before an example is over."""
periods = st.lists(
    st.tuples(
        st.sampled_from([10_000, 100_000, 86_400_000]),
        st.integers(0, 1),
        st.just(0) | st.integers(1, 4000),
        st.just(0) | st.integers(1, 9000),
        st.booleans(),
    ),
    max_size=2,
)
"""Of each counter: the length of its periods in ms, how many of them the caller's clock is late, tokens, cost, and whether it is hard."""
steps = st.one_of(
    st.tuples(st.just("reserve"), ids, st.lists(ceilings, min_size=1, max_size=4), tokens, leases),
    st.tuples(st.just("reserve"), ids, st.lists(ceilings, max_size=2), tokens, leases, periods),
    st.tuples(st.just("reserve_each"), st.lists(ids, min_size=2, max_size=5), st.lists(ceilings, max_size=3), tokens, leases, periods),
    st.tuples(st.just("settle"), ids, st.none() | tokens),
    st.tuples(st.just("settle_all"), st.lists(st.tuples(ids, st.none() | tokens), max_size=6)),
    st.tuples(st.just("release"), ids),
    st.tuples(st.just("renew"), ids, leases),
)


def windows(now_ms, drawn) -> tuple[SpendingWindow, ...]:
    """Counters of the periods at this time, of the tenant and of all."""
    found = []
    for scope, (length, late, *limits, hard) in zip(("budget:own", "budget:all"), drawn, strict=False):
        start = (now_ms // length - late) * length
        starts = (start, start + length, start + 2 * length)
        found.append(SpendingWindow(scope, starts, *limits, scope == "budget:all", hard))
    return tuple(found)


def claim(request_id, limits, tokens, lease_ms, spending=()):
    pairs = zip(SCOPES, limits, strict=False)
    budgets = tuple(Budget(scope, numbers, scope.startswith("network"), enforced) for scope, (numbers, enforced) in pairs)
    return Claim(request_id, TENANT, budgets, tokens, lease_ms, spending, 3 * tokens if spending else 0)


class Both:
    """A Redis ledger and an in-memory ledger that get the same calls."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.redis, self.in_memory, self.now_ms = RedisLedger(link, NOON_MS), InMemoryLedger(), NOON_MS

    async def play(self, history) -> None:
        await self.link.call("FLUSHALL")
        for wait_ms, (verb, *parts) in history:
            self.wait(wait_ms)
            await getattr(self, verb)(*parts)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.redis.read_clock(self.now_ms)

    async def reserve(self, request_id, limits, tokens, lease_ms, drawn=()) -> Granted | Denied:
        asked = claim(request_id, limits, tokens, lease_ms, windows(self.now_ms, drawn))
        real = await self.redis.reserve(asked)
        asked = msgspec.structs.replace(asked, budgets=tuple(b for b in asked.budgets if b.limits != RateLimits()))
        assert real == self.in_memory.reserve(asked, self.now_ms) if asked.budgets or asked.spending else real
        return real

    async def settle(self, request_id, tokens) -> None:
        cost = 2 * (tokens or 0)
        assert await self.redis.settle(TENANT, request_id, tokens, cost) == self.in_memory.settle(
            TENANT, request_id, tokens, self.now_ms, cost
        )

    async def reserve_each(self, request_ids, *demand) -> None:
        """Several requests with the same budgets."""
        for request_id in request_ids:
            await self.reserve(request_id, *demand)

    async def settle_all(self, drawn) -> None:
        """Settle in one call; it takes those with the same budgets together, in the order of their first ones."""
        alike: dict[object, list[Settlement]] = {}
        for request_id, size in drawn:
            settlement = Settlement(TENANT, request_id, size, 2 * (size or 0))
            alike.setdefault((self._charges(request_id), size is None), []).append(settlement)
        expected = sum(
            self.in_memory.settle(TENANT, each.request_id, each.tokens, self.now_ms, each.cost)
            for group in alike.values()
            for each in group
        )
        assert await self.redis.settle_all([Settlement(TENANT, name, size, 2 * (size or 0)) for name, size in drawn]) == expected

    def _charges(self, request_id) -> object:
        record = self.in_memory.records.get((TENANT, request_id))
        if record is None:
            return None
        budgets = [(each.scope, each.limits.rpm is None, each.limits.tpm, each.limits.max_streams) for each in record.budgets]
        return tuple(budgets), tuple(window.scope for window in record.spending)

    async def release(self, request_id) -> None:
        await self.redis.release(TENANT, request_id)
        self.in_memory.release(TENANT, request_id, self.now_ms)

    async def renew(self, request_id, lease_ms) -> None:
        await self.redis.renew(TENANT, request_id, lease_ms)
        self.in_memory.renew(TENANT, request_id, lease_ms, self.now_ms)

    async def state_of_redis(self) -> dict:
        keys = await self.link.call("KEYS", "*")
        reads = [("ZRANGE", key, 0, -1, "WITHSCORES") if b"}:lease:" in key else ("GET", key) for key in keys]
        state = {}
        for key, found in zip(keys, await asyncio.gather(*(self.link.call(*read) for read in reads)), strict=True):
            if not found:  # expired since it was listed, so it no longer matters
                continue
            owner = next(owner for owner in OWNERS if key.startswith(owner))
            kind, _, name = key.removeprefix(owner).decode().partition(":")
            state[kind, name] = DECODERS[kind](found)
        return self._live(state)

    def state_in_memory(self) -> dict:
        state = {("count", scope): counters for (_, scope), counters in self.in_memory.counters.items()}
        state |= {("lease", scope): held for (_, scope), held in self.in_memory.leases.items()}
        state |= {("spend", scope): counters for (_, scope), counters in self.in_memory.spending.items()}
        for (_, request_id), record in self.in_memory.records.items():
            charges = tuple(n or 0 for budget in record.budgets for n in (budget.limits.tpm, budget.limits.max_streams))
            charges += (0, 0) * len(record.spending)
            state["request", request_id] = (
                record.expires_ms,
                record.tokens,
                record.settled + 2 * record.released,
                record.admitted_ms,
                charges,
            )
        return self._live(state)

    def _live(self, state: dict) -> dict:
        """Without what no longer matters: Redis forgets by its own clock, which this test does not move."""
        live = {}
        for key, value in state.items():
            if key[0] == "lease":
                live[key] = {request: expiry for request, expiry in value.items() if expiry > self.now_ms}
            elif key[0] == "spend":
                live[key] = value
            elif key[0] == "request":
                live[key] = value if value[0] > self.now_ms else None
            else:
                used = value.used if value.at_ms + RETENTION_MS > self.now_ms else 0
                live[key] = BudgetCounters(used, value.at_ms if used else 0, value.slide_window(self.now_ms).requests)
        return {key: value for key, value in live.items() if value and value != BudgetCounters()}


def decoded(value: bytes) -> BudgetCounters:
    used, at_ms, head, total = struct.unpack_from(">ddII", value)
    ring = value[24:]
    seconds = range(head - WINDOW_SECONDS + 1, head + 1) if ring else ()
    counts = [(second, int.from_bytes(ring[second % WINDOW_SECONDS * 3 :][:3], "big")) for second in seconds]
    counters = BudgetCounters(int(used), int(at_ms), tuple((second, count) for second, count in counts if count))
    assert counters.total == total
    return counters


def decoded_leases(pairs: list[bytes]) -> dict[str, int]:
    return {pairs[i].decode(): int(pairs[i + 1]) for i in range(0, len(pairs), 2)}


def decoded_record(value: bytes) -> tuple:
    expires_ms, tokens, state = struct.unpack_from(">ddB", value)
    note = msgspec.msgpack.decode(value[73 if value[73] > 127 else 81 :], type=tuple[Charge, ...])
    (admitted_ms,) = struct.unpack_from(">d", value, 65)
    return expires_ms, tokens, state, admitted_ms, tuple(part for charge in note for part in (charge.tpm, charge.max_streams))


def decoded_spending(value: bytes) -> SpendingCounters:
    return SpendingCounters(*(int(number) for number in struct.unpack(">14d", value)))


DECODERS = {"spend": decoded_spending, "count": decoded, "lease": decoded_leases, "request": decoded_record}


@pytest.fixture(scope="module", params=FLAVOURS)
def play(request, redis_servers) -> Iterator[Callable]:
    """Runs a coroutine function with a fresh pair; one loop and one link for all examples."""
    with asyncio.Runner() as runner:
        connected = linked(redis_servers[request.param].unix_url)
        link = runner.run(connected.__aenter__())
        yield lambda story: runner.run(story(Both(link)))
        runner.run(connected.__aexit__(None, None, None))


PROFILE = settings(max_examples=120)


@PROFILE
@given(history=st.lists(st.tuples(waits, steps), max_size=30))
def test_redis_and_in_memory_ledger_answer_alike_and_hold_the_same(play, history):
    async def story(both):
        await both.play(history)
        assert await both.state_of_redis() == both.state_in_memory()

    play(story)


@PROFILE
@given(
    history=st.lists(st.tuples(waits.filter(lambda ms: ms >= 0), steps), max_size=20),
    limits=st.lists(ceilings, min_size=1, max_size=4),
    size=tokens,
)
def test_after_any_history_retry_after_is_exact_to_the_millisecond(play, history, limits, size):
    async def story(both):
        await both.play(history)
        before = await both.state_of_redis()
        answer = await both.reserve("last", limits, size, 1000)
        if isinstance(answer, Granted) or answer.dimension == "oversize":
            return
        assert await both.state_of_redis() == before
        both.wait(answer.retry_after_ms - 1)
        assert isinstance(await both.reserve("last", limits, size, 1000), Denied)
        both.wait(1)
        assert isinstance(await both.reserve("last", limits, size, 1000), Granted)

    play(story)


@PROFILE
@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 400)), min_size=20, max_size=120), st.integers(1, 9), st.integers(400, 900)
)
def test_no_minute_ever_holds_more_requests_or_two_buckets_more_tokens_than_allowed(history, rpm, tpm):
    in_memory, now_ms, passed = InMemoryLedger(), NOON_MS, []
    for number, (wait_ms, size) in enumerate(history):
        now_ms += wait_ms
        if isinstance(in_memory.reserve(claim(str(number), [(RateLimits(rpm=rpm, tpm=tpm), True)], size, 1000), now_ms), Granted):
            if size % 3 == 0:  # reached no node
                in_memory.settle(TENANT, str(number), None, now_ms + size)
            else:
                passed.append((now_ms, size))
    for start, _ in passed:
        inside = [size for moment, size in passed if start <= moment < start + 60_000]
        assert len(inside) <= rpm
        assert sum(inside) <= 2 * tpm
