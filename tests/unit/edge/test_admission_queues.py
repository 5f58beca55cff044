"""Several workers, each with a waiting room of its own, over the same counters: what becomes of the tenants' weights."""

import asyncio
import random
from collections import Counter

import pytest

from din_extproc.admit.ledger import Claim, Granted
from din_extproc.admit.local import LocalLedger
from din_extproc.admit.queue import QueueState
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import Budget, Queueing, RateLimits
from din_extproc.edge.admission_queue import AdmissionQueue
from din_extproc.edge.background import Background
from tests.support.waiting import turns

WEIGHTS = {"light": 1, "middle": 2, "heavy": 5}
SLOTS = 8
SHARED = (Budget("network", RateLimits(max_streams=SLOTS), shared=True),)
EXCHANGES = 1200
BOUND = 0.1
"""By how much of its weighted share, at most, a tenant's part differs: the README says so."""


class Bell:
    """What one process tells the others. What is freed the test rings itself."""

    def __init__(self, others: list["Bell"]) -> None:
        self._others = others
        self.room: AdmissionQueue
        others.append(self)

    def request_wakeup(self, tenant: str, lasting_ms: int) -> None:
        """Nobody is to be notified."""

    def announce_grant(self, tenant: str, cost: float) -> None:
        for each in self._others:
            if each is not self:
                asyncio.get_running_loop().call_soon(each.room.on_remote_grant, tenant, cost)


class Remote(LocalLedger):
    """Counters that are not at once at hand."""

    async def reserve(self, claim):
        await turns()
        return await super().reserve(claim)


class Workers:
    """Waiting rooms of several processes. What ends rings in all of them, in an order of the `ring_order` kind."""

    def __init__(self, number: int, ring_order: str) -> None:
        self.ledger = Remote(lambda: 0)
        self.chosen = random.Random(7)
        self.ring_order = ring_order
        start = Background().start
        bells: list[Bell] = []
        self.rooms = []
        for _ in range(number):
            bell = Bell(bells)
            bell.room = AdmissionQueue(self.ledger, bell, lambda: True, lambda: 0, start, QueueState())
            self.rooms.append(bell.room)
        self.granted: Counter[str] = Counter()
        self.made = 0
        self.enough = asyncio.Event()

    async def client(self, tenant: str) -> None:
        """Asks again as soon as it has its answer, wherever Envoy sends it."""
        while True:
            self.made += 1
            claim = Claim(f"r{self.made}", tenant, SHARED, self.chosen.randrange(50, 150), 1 << 40)
            room = self.chosen.choice(self.rooms)
            answer = await room.wait(claim, Priority.STANDARD, Queueing(1 << 30, 1000, WEIGHTS[tenant]), 1 << 30)
            assert isinstance(answer, Granted)
            self.granted[tenant] += claim.tokens
            if sum(self.granted.values()) >= EXCHANGES * 100:
                self.enough.set()
            await turns(self.chosen.randrange(1, 9))
            await self.ledger.settle(tenant, claim.request_id, claim.tokens)
            order = self.rooms if self.ring_order == "fixed" else self.chosen.sample(self.rooms, len(self.rooms))
            for each in order:
                each.on_freed(None)

    async def run(self, clients: int) -> dict[str, float]:
        """The part of all tokens that each tenant got."""
        lanes = [asyncio.ensure_future(self.client(tenant)) for tenant in WEIGHTS for _ in range(clients)]
        await self.enough.wait()
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        for room in self.rooms:
            await room.close()
        total = sum(self.granted.values())
        return {tenant: tokens / total for tenant, tokens in self.granted.items()}


@pytest.mark.parametrize("ring_order", ["fixed", "random"])
@pytest.mark.parametrize("number", [1, 2, 4])
async def test_each_worker_is_fair_by_itself_and_so_all_of_them_are(number, ring_order):
    shares = await Workers(number, ring_order).run(clients=24)
    total = sum(WEIGHTS.values())
    print(number, ring_order, {tenant: round(share * total, 2) for tenant, share in shares.items()})
    for tenant, weight in WEIGHTS.items():
        assert shares[tenant] / (weight / total) == pytest.approx(1, abs=BOUND)
