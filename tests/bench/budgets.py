"""Admission with budgets against admission without: CPU of Redis and of the sidecar in the same run, round by round.

A request is read, routed and reserved, its verdict is made, and it is settled. Prices are set in all variants.
"""

import asyncio
import gc
import time
from typing import Any

import uvloop

from din_extproc.admit.ledger import Settlement
from din_extproc.domain.verdict import Send
from din_extproc.edge.redis.address import Address
from din_extproc.edge.redis.ledger import SCRIPTS, RedisLedger
from din_extproc.edge.redis.link import Link
from din_extproc.flow.request import WorkerContext
from din_extproc.roles.serve.accounting_plane import RECORDS_PER_ITERATION
from tests.bench.contenders import chat_body
from tests.bench.field import BODY_BYTES, Effort, Field, Figures
from tests.bench.growth import HEAD, make_context
from tests.bench.harness import cpu_s, median
from tests.support.servers import RedisServer

_ADMISSIONS, _AT_ONCE = 2_000, 16
_PRICES = {"currency": "EUR", "models": {"physical": {"input": 0.15, "output": 0.6}}}


def _budget(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "period": "month", "tokens": 10**12, "money": 10**6, **fields}


_LIMITS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "of_others": [_budget("other", tenant="acme", key="another")],
    "one": [_budget("own", tenant="acme")],
    "two": [_budget("own", tenant="acme"), _budget("all")],
}


def budgets(field: Field) -> Figures:
    """Measure admission without budgets, with one of another key, with one and with two; each of tokens and money."""
    spent = uvloop.run(_measure(field.effort))
    figures: Figures = {}
    for name, rounds in spent.items():
        for part, at in (("sidecar", 0), ("redis", 1)):
            figures[f"admit_{part}_us_budgets_{name}"] = median(each[at] for each in rounds)
            ratios = [one[at] / other[at] for one, other in zip(rounds, spent["none"], strict=True) if other[at]]
            figures[f"admit_{part}_budgets_{name}_vs_none"] = median(ratios)
    return figures


async def _measure(effort: Effort) -> dict[str, list[tuple[float, float]]]:
    """CPU per admission, here and in Redis, in microseconds: round by round."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in _LIMITS}
    with RedisServer() as server:

        async def located() -> Address:
            return Address(host="127.0.0.1", port=server.port)

        link = Link(located, SCRIPTS, timeout_ms=20_000)
        assert await link.start()
        ledger = RedisLedger(link)
        contexts = {name: make_context(prices=_PRICES, budgets={"limits": limits}) for name, limits in _LIMITS.items()}
        names = list(contexts)
        for turn in range(-1, 2 * effort.rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:  # no variant always comes after the same one
                context = contexts[name]
                context.ledger = ledger
                gc.collect()
                here, there = time.process_time(), cpu_s(server.pid)
                await _admit(context)
                here, there = time.process_time() - here, cpu_s(server.pid) - there
                if turn >= 0:
                    spent[name].append((here / _ADMISSIONS * 1e6, there / _ADMISSIONS * 1e6))
        await link.close()
    return spent


async def _admit(context: WorkerContext) -> None:
    """A number of requests, a few at once; they are settled as the accounting plane does it: several in one call."""
    waiting, body = iter(range(_ADMISSIONS)), chat_body(BODY_BYTES)
    ended: list[Settlement] = []

    async def lane() -> None:
        for _ in waiting:
            flow = context.create_handler()
            assert isinstance(await flow.decide(HEAD, body), Send)
            flow.ended(cut=False)
            ended.append(Settlement(flow.account, flow.request_id, 200, 100_000))
            if len(ended) >= RECORDS_PER_ITERATION:
                settling = ended[:]
                ended.clear()
                await context.ledger.settle_all(settling)

    await asyncio.gather(*(lane() for _ in range(_AT_ONCE)))
    await context.ledger.settle_all(ended)
