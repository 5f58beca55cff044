"""A thousand clients that leave at any moment of their decision, queue and counters included: nothing stays taken."""

import asyncio
import json
import random

import pytest
import yaml

from din_extproc.admit.local import LocalLedger
from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import Send
from din_extproc.edge.background import Background
from din_extproc.edge.inline_task import InlineTask
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.guard import PRESENCE, GuardedLedger, OnError
from din_extproc.edge.redis.ledger import SCRIPTS, RedisLedger
from din_extproc.edge.redis.topology import make_carrier
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.roles.serve.worker_queue import WorkerQueue
from din_extproc.settings.load import load
from tests.support.servers import RedisServer
from tests.support.stack import key_of, node, tenant

pytestmark = pytest.mark.chaos

CLIENTS = 1000
SEED = 20_301_130
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}).encode()
HEADS = {name: RequestHead("POST", "/v1/chat/completions", {"authorization": f"Bearer {key_of(name)}"}) for name in ("acme", "trial")}
CONFIG = {
    "version": 1,
    "pools": {"pool": {"model": "m", "engine": "vllm", "nodes": [node("a", "10.0.0.1:8000", max_concurrency=10_000)]}},
    "rules": [{"id": "all", "when": "always", "pool": "pool"}],
    "limits": {"max_streams": 60, "tpm": 1_000_000, "reserved_for_critical": 0.1},
    "tenants": [
        tenant("acme", max_streams=40) | {"queue": {"max_wait_ms": 500, "size": 300}},
        tenant("trial", max_streams=30, tpm=8000) | {"queue": {"max_wait_ms": 300, "size": 300}},
    ],
}


class Client:
    """One exchange: it is decided about until the client leaves, and ended then."""

    def __init__(self, plane: RequestPlane, name: str) -> None:
        self.flow = plane.context.create_handler()
        self.name = name
        self.sent = False
        self.faults: list[BaseException] = []
        self.drive = InlineTask(self.flow.decide(HEADS[name], BODY), self._decided, self.faults.append)

    def _decided(self, verdict) -> None:
        self.sent = isinstance(verdict, Send)

    async def leave(self, plane: RequestPlane, chance: random.Random) -> None:
        for _ in range(chance.choice((0, 0, 1, 2, 3, 5, 8))):
            await asyncio.sleep(0)
        if chance.random() < 0.7:
            await asyncio.sleep(chance.expovariate(1 / 0.05))
        self.drive.cancel()
        self.flow.ended()
        if self.sent:  # Envoy's access log tells how it ended
            await plane.context.ledger.settle(self.name, self.flow.request_id, 0)


async def test_a_thousand_cancels_at_random_await_points_leave_every_counter_at_zero(tmp_path):
    (tmp_path / "din.yaml").write_text(yaml.safe_dump(CONFIG))
    settings = load(tmp_path / "din.yaml", {})
    chance = random.Random(SEED)
    with RedisServer() as server:
        link = make_carrier(server.url, (*SCRIPTS, PRESENCE), timeout_ms=5000)
        assert await link.start(wait_s=5)
        ledger = GuardedLedger(link, RedisLedger(link, names=Names()), LocalLedger(lambda: 0), OnError.CLOSED, "here")
        background = Background()
        waits = WorkerQueue(settings, link, ledger, background)
        waits.reload(settings)
        plane = RequestPlane(settings, ledger, background, DecisionCounters(), waits.queue)
        clients = []
        for number in range(CLIENTS):
            clients.append(Client(plane, ("acme", "trial")[number % 2]))
            if number % 20 == 0:
                await asyncio.sleep(chance.random() / 100)
        await asyncio.gather(*(client.leave(plane, chance) for client in clients))
        await background.quiet(5)
        await asyncio.sleep(0.2)
        queue_counts = waits.queue.snapshot()
        leases = {key: await link.call("ZCARD", key) for key in await link.call("KEYS", "*:lease:*")}
        used = {key: (await link.call("GETRANGE", key, 0, 7)) for key in await link.call("KEYS", "*:count:*")}
        sent = sum(client.sent for client in clients)
        print(f"{CLIENTS} cancelled: {sent} were sent, queue {queue_counts}, leases {leases}")
        await waits.queue.close()
        await background.close()
        await link.close()
    assert not any(client.faults and not isinstance(client.faults[0], asyncio.CancelledError) for client in clients)
    assert 0 < sent < CLIENTS
    assert queue_counts["left"] > 0
    assert queue_counts["granted"] > 0
    assert plane.context.live == {}
    assert plane.context.selector.load.tokens_in_flight() == {}
    assert not any(leases.values())
    assert set(used.values()) <= {bytes(8)}, "no token is charged any more"
