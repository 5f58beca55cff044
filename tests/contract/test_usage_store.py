"""Usage by day: counted from finished exchanges, added once on real Redis servers, read back whole."""

import pytest

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.usage import Outcome, Usage
from din_extproc.edge.redis.usage import USAGE, UsageStore, split_by_day
from din_extproc.observe.usage_book import UsageBook, UsageKey, UsageTotals, group_usage
from din_extproc.roles.serve.usage import UsageRecorder
from tests.support.exchanges import MIDNIGHT, record
from tests.support.ledgers import linked
from tests.support.servers import FLAVOURS, RedisServer
from tests.support.waiting import until


def test_an_exchange_counts_on_the_day_on_which_it_began_for_its_tenant_and_model():
    book = UsageBook()
    for each in (
        record(cost=1500, saved=20),
        record(outcome=Outcome.CLIENT_CANCELLED, usage=Usage(5, 1, estimated=True), would_refuse="rpm"),
        record(started_at=MIDNIGHT),
        record(refusal="rate_limit_exceeded", model="", usage=Usage(0, 0)),
        record(tenant=""),
    ):
        book.on_exchange(each)
    assert book.take_totals() == {
        UsageKey("2026-12-31", "finance", "m", "k"): UsageTotals(2, 1, 0, 1, 12, 4, 2, 6, cost=1500, saved=20),
        UsageKey("2027-01-01", "finance", "m", "k"): UsageTotals(1, 0, 0, 0, 7, 3, 2, 0),
        UsageKey("2026-12-31", "finance", "", "k"): UsageTotals(refused=1),
    }
    assert book.take_totals() == {}


@pytest.fixture(params=FLAVOURS)
async def link(request, redis_servers):
    async with linked(redis_servers[request.param].url) as connected:
        await connected.call("FLUSHALL")
        yield connected


async def test_a_repeated_portion_is_added_once_and_replicas_add_up(link):
    store = UsageStore(link, "")
    many = {UsageKey("2026-12-31", f"tenant-{n}", "m"): UsageTotals(1, 0, 0, 0, n, 1) for n in range(300)}
    first = list(split_by_day(many, 1))
    assert len(first) > 1
    for portion in (*first, *first, *split_by_day({UsageKey("2027-01-01", "x", "m"): UsageTotals(5)}, len(first) + 1)):
        await store.add("one", portion)
    await store.add("two", first[0])
    await link.call("SCRIPT", "FLUSH")
    found = await store.read_day("2026-12-31")
    assert len(found) == 300
    assert (found[UsageKey("2026-12-31", "tenant-250", "m")].requests, found[UsageKey("2026-12-31", "tenant-1", "m")].requests) == (1, 2)
    assert await store.read_day("2027-01-01") == {UsageKey("2027-01-01", "x", "m"): UsageTotals(5)}
    assert await UsageStore(link, "other").read_day("2026-12-31") == {}
    assert await link.call("TTL", "din:{usage}:2026-12-31") > 86_400 * 366


async def test_usage_that_could_not_be_written_is_written_when_redis_is_back():
    with RedisServer() as server:
        async with linked(server.url, timeout_ms=100) as link:
            await link.call("SCRIPT", "LOAD", USAGE.source)
            recorder = UsageRecorder(link, "")
            recorder.on_exchange(record())
            await recorder.flush()
            with server.paused():
                for _ in range(3):
                    recorder.on_exchange(record())
                    await recorder.flush()
            await until(lambda: link.state.up)
            for _ in range(2):
                await recorder.flush()
            (used,) = (await UsageStore(link, "").read_day("2026-12-31")).values()
            assert (used.requests, used.completion_tokens) == (4, 12), "be it counted or not before the pause, each counts once"


async def test_without_redis_the_store_says_so(link):
    await link.close()
    with pytest.raises(LimitsUnavailable):
        await UsageStore(link, "").read_day("2026-12-31")


async def test_usage_of_each_key_and_rule_is_kept_apart_and_adds_up_with_that_from_before_they_were(link):
    store = UsageStore(link, "")
    kept = (("one", "r", 2), ("jwt:eve", "", 3), ("", "r", 1), ("", "", 4))
    used = {UsageKey("2026-12-31", "finance", "m", key, rule): UsageTotals(requests=n, cost=10 * n) for key, rule, n in kept}
    for portion in split_by_day(used, 1):
        await store.add("r", portion)
    found = await store.read_day("2026-12-31")
    assert found == used
    assert group_usage(found.items(), ("tenant", "model")) == {("finance", "m"): UsageTotals(requests=10, cost=100)}
    by_owner = {group: sums.requests for group, sums in group_usage(found.items(), ("key", "identity", "rule")).items()}
    assert by_owner == {("", "", ""): 4, ("", "", "r"): 1, ("", "jwt:eve", ""): 3, ("one", "", "r"): 2}
