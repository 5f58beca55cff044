"""Warnings about budgets: once per period over all replicas, at 80 % and when it is spent or refuses."""

import logging
import time
from collections.abc import Iterator

import msgspec
import pytest

from din_extproc.admit.ledger import Claim
from din_extproc.audit.records import BudgetOrder
from din_extproc.edge.background import Background
from din_extproc.edge.http.budget_orders import BudgetForm
from din_extproc.edge.redis.budgets import TOP_UP
from din_extproc.edge.redis.ledger import RedisLedger
from din_extproc.roles.serve.budget_watch import BudgetWatch
from din_extproc.settings.settings import Settings
from tests.support.configs import read
from tests.support.exchanges import record
from tests.support.ledgers import linked
from tests.support.waiting import until
from tests.support.webhook_receiver import WebhookReceiver

BUDGETS = """
budgets:
  limits:
    - {name: all, period: month, tokens: 1000}
    - {name: each, period: month, tokens: 500, tenant: t, key: "*"}
  webhook: {url: %s, secret: 0123456789abcdef}
"""


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as made:
        yield made


@pytest.fixture
async def network(redis_servers, tmp_path, receiver):
    """Two replicas over one Redis, with what they recorded, and a function that spends."""
    settings = read(tmp_path, BUDGETS % receiver.url)
    assert isinstance(settings, Settings)
    assert settings.budgets is not None
    async with linked(redis_servers["valkey8"].url) as link:
        await link.call("FLUSHALL")
        await link.call("SCRIPT", "LOAD", TOP_UP.source)
        ledger, events = RedisLedger(link), []
        budgets = settings.budgets

        async def spend(request_id: str, tokens: int) -> None:
            claim = Claim(request_id, "t", (), tokens, 1000, budgets.windows("t", "k", "small", time.time()))
            await ledger.reserve(claim)
            await ledger.settle("t", request_id, tokens)

        yield [BudgetWatch(settings, link, events.append) for _ in range(2)], events, spend


def alerts(watches: list[BudgetWatch]) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for watch in watches:
        _, family = watch.collect_families()
        for labels, value in family.points:
            found[labels] = found.get(labels, 0) + value
    return found


async def test_each_level_is_reported_once_by_one_replica(network, caplog):
    watches, _, spend = network
    await spend("a", 390)
    for watch in watches:
        await watch.look()
    assert alerts(watches) == {}
    with caplog.at_level(logging.WARNING):
        await spend("b", 20)
        for watch in (*watches, *watches):
            await watch.look()
    assert alerts(watches) == {("each:k", "t", "80"): 1}
    assert [line for line in caplog.messages if line.startswith("budget each:k: 82 % of its month is spent")]
    await spend("c", 400)
    for watch in watches:
        await watch.look()
    assert alerts(watches) == {("each:k", "t", "80"): 1, ("each:k", "t", "100"): 1}, "what it refused counts as spent"
    used = dict(next(watches[0].collect_families()).points)
    assert used == {("all", ""): 0.41, ("each:k", "t"): 0.82}


async def test_a_warning_is_sent_to_the_webhook_once(network, receiver):
    watches, _, spend = network
    background = Background()
    for watch in watches:
        watch.start(background)
    await spend("a", 410)
    for watch in (*watches, *watches):
        await watch.look()
    await until(lambda: receiver.taken, "the webhook is called")
    await background.close()
    [(signature, body)] = receiver.taken
    event = msgspec.json.decode(body)
    assert signature.startswith("t=")
    assert (event["event"], event["level"], event["budget"], event["tenant"]) == ("budget_warning", 80, "each:k", "t")
    assert event["tokens"] == {"limit": 500, "spent": 410, "reserved": 0}


async def test_counters_of_identities_are_found_by_their_requests(network):
    watches, _, _ = network
    assert {row.budget for row in await watches[0].collect_rows("t")} == {"all", "each:k"}
    watches[0].on_exchange(record(tenant="t", key_id="jwt:alice", model="small"))
    assert {row.budget for row in await watches[0].collect_rows("")} == {"all", "each:k", "each:jwt%3Aalice"}
    assert await watches[0].collect_rows("nobody") == []


async def test_an_order_is_carried_out_and_recorded(network):
    watches, events, spend = network
    await spend("a", 500)
    row = await watches[1].apply_order(BudgetForm(budget="each:k", tokens=100, reason="end of quarter"), "ops")
    assert row is not None
    assert row.tokens is not None
    assert (row.tokens.limit, row.tokens.spent, row.tenant) == (600, 500, "t")
    (event,) = events
    assert isinstance(event, BudgetOrder)
    assert (event.budget, event.tenant, event.order, event.tokens, event.operator, event.reason) == (
        "each:k", "t", "top-up", 100, "ops", "end of quarter",
    )  # fmt: skip
    assert await watches[0].apply_order(BudgetForm(budget="nothing", tokens=1), "ops") is None
    reset = await watches[0].apply_order(BudgetForm(budget="each:k", reset=True), "ops")
    assert reset is not None
    assert reset.tokens is not None
    assert (reset.tokens.limit, reset.tokens.spent) == (1000, 500)
