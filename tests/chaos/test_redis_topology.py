"""Limits over Redis behind Sentinels and over a Redis Cluster: masters fail, slots move, nobody is let through uncounted."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Self

import pytest
import redis

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable
from din_extproc.admit.local import LocalLedger
from din_extproc.domain.tenant import Budget, RateLimits
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.cluster import ClusterLinks
from din_extproc.edge.redis.guard import GuardedLedger, OnError
from din_extproc.edge.redis.ledger import SCRIPTS, RedisLedger
from din_extproc.edge.redis.link import Link
from din_extproc.edge.redis.topology import make_carrier
from tests.support.servers import FLAVOURS, RedisServer, free_port

pytestmark = pytest.mark.chaos
CEILING = RateLimits(rpm=2, tpm=1000, max_streams=2)
NAMES = ["a:b", "a", "{a}", "}", "", " ", "ü", "A" * 300, *(f"tenant {n}" for n in range(40))]


def claim(request_id: str, tenant: str = "finance", limits: RateLimits = CEILING) -> Claim:
    budgets = (Budget("tenant", limits), Budget("model:m", limits), Budget("key:{k}", limits))
    return Claim(request_id, tenant, budgets, 10, 30_000)


@contextlib.asynccontextmanager
async def connected(url: str):
    runner = make_carrier(url, SCRIPTS, timeout_ms=500)
    assert await runner.start(wait_s=5), runner.state.reason
    try:
        yield runner
    finally:
        await runner.close()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - what is waited for is another process's state
            await asyncio.sleep(0.05)


@pytest.fixture
def cluster() -> Iterator[list[RedisServer]]:
    """Three masters that know each other."""
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(3):
            options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "2000")
            servers.append(stack.enter_context(RedisServer(*options)))
        clients = [stack.enter_context(contextlib.closing(redis.Redis(port=server.port))) for server in servers]
        bounds = [0, 5461, 10923, 16384]
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for server in servers[1:]:
            bus = server.options[server.options.index("--cluster-port") + 1]
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)
        while not all(client.cluster("info")["cluster_state"] == "ok" for client in clients):
            time.sleep(0.02)
        yield servers


def seeds(servers: list[RedisServer]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


async def test_all_limits_of_a_request_are_one_call_whatever_the_tenant_is_called(cluster):
    async with connected(seeds(cluster)) as runner:
        ledger = RedisLedger(runner)
        for name in NAMES:
            answers = [await ledger.reserve(claim(f"r{n}", name)) for n in range(3)]
            assert [isinstance(answer, Granted) for answer in answers] == [True, True, False]
            await ledger.release(name, "r0")
            assert await RedisLedger(runner).settle(name, "r0", 500)
        held = [await link.call("DBSIZE") for link in runner._links.values()]
        assert len(held) == 3
        assert all(held)


async def test_limits_that_tenants_share_are_one_call_too_where_all_keys_have_one_slot(cluster):
    common = Budget("network", RateLimits(rpm=5, tpm=1000, max_streams=5), shared=True)
    async with connected(seeds(cluster)) as runner:
        ledger = RedisLedger(runner, names=Names(one_slot=True))
        answers = []
        for number, name in enumerate(NAMES[:8]):
            answers.append(await ledger.reserve(Claim(f"r{number}", name, (Budget("tenant", CEILING), common), 10, 30_000)))
        assert [isinstance(answer, Granted) for answer in answers] == [True] * 5 + [False] * 3
        assert await RedisLedger(runner, names=Names(one_slot=True)).settle(NAMES[0], "r0", 5)
        held = [await link.call("DBSIZE") for link in runner._links.values()]
        assert sorted(held)[:2] == [0, 0], "one master holds all"
        with pytest.raises(LimitsUnavailable, match="CROSSSLOT"):
            await RedisLedger(runner).reserve(Claim("r", "finance", (Budget("tenant", CEILING), common), 10, 30_000))


async def test_a_slot_that_moved_is_followed_and_learned(cluster):
    async with connected(seeds(cluster)) as runner:
        assert isinstance(runner, ClusterLinks)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(contextlib.closing(redis.Redis(port=server.port))) for server in cluster]
            number = clients[0].execute_command("CLUSTER KEYSLOT", "{t=finance}")
            new = next(i for i, server in enumerate(cluster) if runner._owners[number] is not runner._links["127.0.0.1", server.port])
            node = clients[new].execute_command("CLUSTER MYID").decode()
            for client in (clients[new], *clients):
                client.execute_command("CLUSTER SETSLOT", number, "NODE", node)
        ledger = RedisLedger(runner)
        assert isinstance(await ledger.reserve(claim("r1")), Granted)

        async def learned() -> bool:
            return runner._owners[number] is runner._links["127.0.0.1", cluster[new].port]

        await until(learned)
        assert isinstance(await ledger.reserve(claim("r2")), Granted)
        assert isinstance(await ledger.reserve(claim("r3")), Denied)


async def test_while_a_slot_is_on_its_way_nothing_passes_uncounted_and_what_has_moved_is_found(cluster):
    async with connected(seeds(cluster)) as runner:
        ledger = RedisLedger(runner)
        for name in ("first", "second"):
            assert isinstance(await ledger.reserve(claim(name)), Granted)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(contextlib.closing(redis.Redis(port=server.port))) for server in cluster]
            number = clients[0].execute_command("CLUSTER KEYSLOT", "{t=finance}")
            old = next(i for i, server in enumerate(cluster) if runner._owners[number] is runner._links["127.0.0.1", server.port])
            new = (old + 1) % 3
            clients[new].execute_command("CLUSTER SETSLOT", number, "IMPORTING", clients[old].execute_command("CLUSTER MYID").decode())
            clients[old].execute_command("CLUSTER SETSLOT", number, "MIGRATING", clients[new].execute_command("CLUSTER MYID").decode())
            clients[old].execute_command("MIGRATE", "127.0.0.1", cluster[new].port, "", 0, 5000, "KEYS", *clients[old].keys())
        with pytest.raises(LimitsUnavailable, match="TRYAGAIN"):
            await ledger.reserve(claim("meanwhile"))
        guard = GuardedLedger(runner, ledger, LocalLedger(lambda: 0), OnError.CLOSED, "here")
        await guard.release("finance", "first")
        assert await guard.settle("finance", "second", 5)
        assert await guard.settle("finance", "first", 5)
        await guard._settle_pending()
        assert guard._owed, "Redis redirects no script that names an absent key: the settlement waits until the slot has moved"
        with contextlib.ExitStack() as stack:
            owner = stack.enter_context(contextlib.closing(redis.Redis(port=cluster[new].port)))
            owner.execute_command("CLUSTER SETSLOT", number, "NODE", owner.execute_command("CLUSTER MYID").decode())
        await guard._settle_pending()
        assert not guard._owed
        assert not await ledger.settle("finance", "first", 5), "settled meanwhile"
        assert not await ledger.settle("finance", "second", 5), "likewise"


async def test_a_master_that_is_gone_is_unavailable_for_its_tenants_only(cluster):
    async with connected(seeds(cluster)) as runner:
        ledger = RedisLedger(runner)
        cluster[0].end()
        answers = await asyncio.gather(*(ledger.reserve(claim("r", name)) for name in NAMES), return_exceptions=True)
        assert any(isinstance(answer, Granted) for answer in answers)
        assert any(isinstance(answer, LimitsUnavailable) for answer in answers)
        assert all(isinstance(answer, Granted | LimitsUnavailable) for answer in answers)


async def test_a_cluster_that_is_not_there_is_reported():
    runner = make_carrier(f"redis+cluster://127.0.0.1:{free_port()}", SCRIPTS, timeout_ms=100)
    assert not await runner.start(wait_s=0.5)
    with pytest.raises(LimitsUnavailable):
        await RedisLedger(runner).reserve(claim("r"))
    await runner.close()


async def test_a_failover_is_followed():
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(RedisServer("--repl-diskless-sync-delay", "0"))
        replica = stack.enter_context(RedisServer("--replicaof", f"127.0.0.1 {master.port}"))
        config = "\n".join(
            (
                f"sentinel monitor limits 127.0.0.1 {master.port} 1",
                "sentinel down-after-milliseconds limits 300",
                "sentinel failover-timeout limits 2000",
            )
        )
        sentinel = stack.enter_context(RedisServer("--sentinel", config=config))
        watch = stack.enter_context(contextlib.closing(redis.Redis(port=sentinel.port)))

        async def replica_is_known() -> bool:
            return any(entry["master-link-status"] == "ok" for entry in watch.sentinel_slaves("limits"))

        await until(replica_is_known)
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/limits"
        async with connected(url) as runner:
            assert isinstance(runner, Link)
            assert runner.state.address == f"127.0.0.1:{master.port}"
            ledger = RedisLedger(runner)
            assert isinstance(await ledger.reserve(claim("r1")), Granted)
            assert await runner.call("WAIT", 1, 400) == 1
            master.end()

            async def elsewhere() -> bool:
                return runner.state.up and runner.state.address == f"127.0.0.1:{replica.port}"

            await until(elsewhere)
            assert isinstance(await ledger.reserve(claim("r2")), Granted)
            assert isinstance(await ledger.reserve(claim("r3")), Denied)


class MovingAddress:
    """A port that is forwarded to a server. Moved, it forwards new connections to another one, and the old connections stay."""

    def __init__(self, target: RedisServer) -> None:
        self.target = target
        self.connections = 0
        self._pipes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target.port)
        self._pipes |= {asyncio.create_task(self._pipe(reader, far_writer)), asyncio.create_task(self._pipe(far_reader, writer))}

    @staticmethod
    async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        finally:
            writer.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_failover_by_address_is_followed_at_the_first_refused_script(flavour):
    with RedisServer(flavour=flavour) as old, RedisServer(flavour=flavour) as new:
        async with MovingAddress(old) as address, connected(address.url) as runner:
            guard = GuardedLedger(runner, RedisLedger(runner), LocalLedger(lambda: 0), OnError.LOCAL_SHARE, "here")
            assert isinstance(await guard.reserve(claim("r1")), Granted)
            address.target = new
            with contextlib.closing(redis.Redis(port=old.port)) as admin:
                admin.execute_command("REPLICAOF", "127.0.0.1", new.port)
            with pytest.raises(LimitsUnavailable, match="READONLY"):
                await RedisLedger(runner).reserve(claim("r2"))
            assert isinstance(await guard.reserve(claim("r3")), Granted), "by the replica's own share until the link is back"

            async def is_up() -> bool:
                return runner.state.up

            await until(is_up)
            assert address.connections == 2, "one connection made anew, at once"
            assert isinstance(await RedisLedger(runner).reserve(claim("r4")), Granted)
            with contextlib.closing(redis.Redis(port=new.port)) as found:
                assert found.dbsize() > 0, "counted by the new master"


@pytest.mark.parametrize("url", ["redis+sentinel://host:1", "redis+sentinel:///service", "redis+cluster://", "http://host"])
def test_a_url_that_says_too_little_is_refused(url):
    with pytest.raises(ValueError, match=r"\w"):
        make_carrier(url, SCRIPTS, timeout_ms=50)
