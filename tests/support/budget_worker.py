"""One worker process of a test: it asks for reservations against one budget, as fast as it can, and tells what it got.

Arguments: the URL of Redis, a file with the time in ms, the worker's name, and how many requests it makes. The file is locked while a
request is on its way to Redis, so that all requests have one clock. A line per answer: `granted ID TOKENS MS`, `refused` or `away`.
"""

import asyncio
import fcntl
import random
import struct
import sys
from pathlib import Path
from zoneinfo import ZoneInfo

from din_extproc.admit.ledger import Claim, Granted, LimitsUnavailable
from din_extproc.admit.local import LocalLedger
from din_extproc.domain.price import Price, PriceList
from din_extproc.domain.spending import BudgetPeriod, SpendingBudget, SpendingBudgets
from din_extproc.domain.usage import Usage
from din_extproc.edge.redis.guard import GuardedLedger, OnError
from din_extproc.edge.redis.ledger import RedisLedger
from tests.support.ledgers import linked
from tests.support.waiting import until

TOKENS, COST = 60_000, 100_000_000
BUDGETS = SpendingBudgets(
    (
        SpendingBudget(name="all", period=BudgetPeriod.MONTH, zone=ZoneInfo("Europe/Berlin"), tokens=TOKENS, cost=COST),
        SpendingBudget(name="own", period=BudgetPeriod.MONTH, zone=ZoneInfo("Europe/Berlin"), tokens=TOKENS, tenant="*"),
    )
)
PRICES = PriceList("EUR", {"m": (Price(since=0, input=1_000_000, output=2_000_000),)})
LEASE_MS = 30_000


async def work(url: str, clock: str, name: str, count: int) -> None:
    chance = random.Random(name)
    async with linked(url, timeout_ms=200) as link:
        shared = RedisLedger(link)
        guard = GuardedLedger(link, shared, LocalLedger(lambda: 0), OnError.LOCAL_SHARE, name)
        await guard.start()
        with Path(clock).open("rb") as file:  # noqa: ASYNC230 - eight bytes
            for number in range(count):
                prompt, output, tenant = chance.randrange(10, 60), chance.randrange(10, 60), chance.choice(("a", "b"))
                fcntl.flock(file, fcntl.LOCK_SH)
                file.seek(0)
                (now_ms,) = struct.unpack("q", file.read(8))
                shared.read_clock(now_ms)
                windows = BUDGETS.windows(tenant, "k", "m", now_ms / 1000)
                cost = PRICES.cost("m", now_ms / 1000, Usage(prompt, output), 0)
                claim = Claim(f"{name}-{number}", tenant, (), prompt + output, LEASE_MS, windows, cost)
                try:
                    answer = await guard.reserve(claim)
                    line = f"granted {claim.request_id} {tenant} {prompt} {output} {now_ms}" if isinstance(answer, Granted) else "refused"
                except LimitsUnavailable:
                    line = "away"
                fcntl.flock(file, fcntl.LOCK_UN)
                print(line, flush=True)
                if line == "away":
                    await until(lambda: link.state.up)
        await guard.close()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:4], int(sys.argv[4])))
