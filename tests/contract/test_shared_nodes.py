"""The shared node table on a real Redis: registrations at one replica reach the others; lost entries come back."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
from msgspec.structs import replace

from din_extproc.domain.membership import Heartbeat, NodeState, Registration
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.edge.redis.nodes import NODE_SCRIPTS, NodeStore
from din_extproc.edge.redis.subscription import ChannelSubscription
from din_extproc.edge.redis.topology import make_carrier, make_locator
from din_extproc.edge.registry.registrar import Registered, Registrar
from din_extproc.registry.claims import CatalogEntry
from din_extproc.registry.row import DenialReason, NodeRecord, RegistryDenial
from din_extproc.registry.table import NodeEventKind, NodeTable
from tests.support.servers import FLAVOURS, RedisServer
from tests.support.waiting import repeatedly, until

POOL = Pool(name="chat", model="m", served_model="m", engine="vllm", scheduler="round_robin", nodes=())
LIVES_S = 3600.0
SOON_S = 0.05
"""How long a node lives without another word: for ever, unless a test lets it die."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="module", params=FLAVOURS)
def each_server(request) -> Iterator[RedisServer]:
    with RedisServer(flavour=request.param) as running:
        yield running


@pytest.fixture(params=["listening", "deaf"])
def listens(request) -> bool:
    """A deaf replica never hears the channel: it has to ask."""
    return request.param == "listening"


def registration(name="a", port=8000, epoch=1, **fields) -> Registration:
    node = Node(
        id=name,
        endpoint=Endpoint("10.0.0.1", port),
        model="m",
        version="1.0",
        dtype="bf16",
        compute_capability="",
        tp_world_size=1,
        max_seq_len=8192,
        max_concurrency=8,
    )
    return Registration(node=node, engine="vllm", epoch=epoch, **fields)


def ready(sequence: int, **fields) -> Heartbeat:
    return Heartbeat(state=NodeState.READY, sequence=sequence, **fields)


@contextlib.asynccontextmanager
async def replica(server: RedisServer, network: str, *, listens: bool = True, timeout_ms: int = 5000) -> AsyncIterator[Registrar]:
    link = make_carrier(server.url, NODE_SCRIPTS, timeout_ms=timeout_ms)
    store = NodeStore(link, network)
    registrar = Registrar(NodeTable((POOL,), {}), store, network="", heartbeat_s=0.1, dead_after_s=LIVES_S)
    registrar.events = []
    registrar.watchers.add(registrar.events.extend)
    await link.start()
    tasks = [asyncio.create_task(repeatedly(lambda: _tend(registrar)))]
    if listens:
        began = asyncio.Event()

        def begin() -> None:
            registrar.on_subscribed()
            began.set()

        tasks.append(asyncio.create_task(ChannelSubscription(make_locator(server.url), store.channel, registrar.on_message, begin).run()))
        await began.wait()
    await registrar.sync()
    try:
        yield registrar
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await link.close()


async def _tend(registrar: Registrar) -> None:
    await registrar.sync()
    await registrar.sweep()


@contextlib.contextmanager
def dying(registrar: Registrar) -> Iterator[None]:
    """Nodes that this replica learns of meanwhile send no further heartbeat in time."""
    registrar.dead_after_s = SOON_S
    yield
    registrar.dead_after_s = LIVES_S


def routed(registrar: Registrar) -> set[str]:
    return {node.id for node in registrar.table.snapshot().joined.get("chat", ())}


async def join(registrar: Registrar, name="a", **fields) -> str:
    outcome = await registrar.register(registration(name, **fields))
    assert isinstance(outcome, Registered), outcome
    assert isinstance(await registrar.heartbeat(name, outcome.lease, ready(1)), NodeRecord)
    return outcome.lease


async def test_an_update_at_one_replica_reaches_the_others(each_server, listens, request):
    async with replica(each_server, request.node.name) as one, replica(each_server, request.node.name, listens=listens) as two:
        lease = await join(one)
        await until(lambda: routed(two) == {"a"}, "the node reaches the other replica")
        assert isinstance(await two.heartbeat("a", lease, ready(2, waiting=7)), NodeRecord)
        await until(lambda: one.table.rows["a"].beat.waiting == 7, "a beat reaches the first")
        await two.drain("a", "maintenance")
        await until(lambda: one.table.get_member("a", one.get_now()).state is NodeState.DRAINING, "the drain reaches the first")
        assert await one.deregister("a", "done", lease) is None
        await until(lambda: not two.table.rows, "the node is gone everywhere")
        kinds = [event.kind for event in two.events]
        assert (kinds[0], kinds[-1]) == (NodeEventKind.JOINED, NodeEventKind.LEFT)
        assert NodeEventKind.CHANGED in kinds


async def test_a_silent_node_dies_for_everybody_and_may_come_back(each_server, listens, request):
    async with replica(each_server, request.node.name) as one, replica(each_server, request.node.name, listens=listens) as two:
        lease = await join(one)
        await until(lambda: routed(two) == {"a"}, "joined")
        with dying(one):
            assert isinstance(await one.heartbeat("a", lease, ready(8)), NodeRecord)
        await until(lambda: not routed(one) and not routed(two), "both give it up")
        assert two.events[-1].kind is NodeEventKind.LEFT
        assert "not heard of" in two.events[-1].reason
        assert isinstance(await two.heartbeat("a", lease, ready(9)), NodeRecord)
        await until(lambda: routed(one) == {"a"}, "it is back")


async def test_a_replica_that_starts_late_has_the_full_view(server, request):
    async with replica(server, request.node.name) as one:
        for number in range(600):  # more than a page
            outcome = await one.register(registration(f"n{number}", port=1000 + number))
            assert isinstance(outcome, Registered)
        async with replica(server, request.node.name) as two:
            assert {member.registration.node.id for member in two.get_members()} == {f"n{number}" for number in range(600)}


async def test_networks_of_different_names_never_see_each_other(server, request):
    async with replica(server, request.node.name + "1") as one, replica(server, request.node.name + "2") as two:
        lease = await join(one)
        assert (await two.heartbeat("a", lease, ready(2))).kind is DenialReason.UNKNOWN
        await two.sync()
        assert not two.table.rows


async def test_one_address_has_one_living_node_even_when_two_replicas_are_asked_at_once(server, request):
    async with replica(server, request.node.name) as one, replica(server, request.node.name) as two:
        outcomes = await asyncio.gather(one.register(registration("a")), two.register(registration("b")))
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Registered", "RegistryDenial"]
        loser = next(outcome for outcome in outcomes if isinstance(outcome, RegistryDenial))
        assert "has this address" in loser.reason
        winner = "ab"[outcomes.index(next(outcome for outcome in outcomes if isinstance(outcome, Registered)))]
        with dying(one):
            assert isinstance(await one.heartbeat(winner, outcomes["ab".index(winner)].lease, ready(1)), NodeRecord)
        await until(lambda: not any(one.table.is_alive(name) for name in "ab"), "the first is dead")
        other = "b" if winner == "a" else "a"
        assert isinstance(await one.register(registration(other, epoch=2)), Registered), "a dead node's address is free"


async def test_two_registrations_of_one_id_leave_the_newest(server, request):
    async with replica(server, request.node.name) as one, replica(server, request.node.name, listens=False) as two:
        await join(one, epoch=5, port=8005)
        await join(two, epoch=6, port=8006)
        outcome = await one.register(registration(epoch=4, port=8004))
        assert outcome.kind is DenialReason.OUTDATED
        await until(lambda: one.table.rows["a"].registration.node.endpoint.port == 8006, "the newest is everywhere")


async def test_concurrent_heartbeats_at_two_replicas_count_or_get_a_reason(server, request):
    async with replica(server, request.node.name) as one, replica(server, request.node.name) as two:
        lease = await join(one)
        outcomes = await asyncio.gather(*((one, two)[number % 2].heartbeat("a", lease, ready(number)) for number in range(2, 30)))
        assert all(isinstance(outcome, NodeRecord) or outcome.kind is DenialReason.OUTDATED for outcome in outcomes)
        await until(lambda: one.table.rows["a"].revision == two.table.rows["a"].revision, "both agree")
        assert one.table.rows["a"].beat == two.table.rows["a"].beat


async def test_while_redis_is_away_the_last_view_stays_and_is_called_stale(request):
    with RedisServer() as server:
        async with replica(server, request.node.name, timeout_ms=300) as one:
            lease = await join(one)
            with server.paused():
                await until(lambda: one.table.stale, "it is noticed")
                assert isinstance(await one.heartbeat("a", lease, ready(2, waiting=3)), NodeRecord)
                with dying(one):
                    await one.sweep()
                assert routed(one) == {"a"}
                assert one.get_members()[0].stale
            await until(lambda: not one.table.stale, "it is back")
            assert isinstance(await one.heartbeat("a", lease, ready(3)), NodeRecord)
            assert routed(one) == {"a"}


async def test_a_registry_that_comes_back_empty_forgets_only_who_is_silent(request):
    with RedisServer() as server:
        async with replica(server, request.node.name, timeout_ms=300) as one, replica(server, request.node.name, timeout_ms=300) as two:
            lease = await join(one)
            await join(one, "silent", port=9000)
            await until(lambda: routed(two) == {"a", "silent"}, "both are known")
            lost = max(row.revision for each in (one, two) for row in each.table.rows.values())
            server.restart()
            sequences = itertools.count(3)

            async def is_shared_again() -> bool:
                assert isinstance(await two.heartbeat("a", lease, ready(next(sequences))), NodeRecord)
                return min(each.table.rows["a"].revision for each in (one, two)) > lost

            await until(is_shared_again, "the one that beats is in the new table")
            with dying(one), dying(two):
                await until(lambda: routed(one) == routed(two) == {"a"}, "the silent one is given up, the other never")
            assert not any(event.kind is NodeEventKind.LEFT and event.member.registration.node.id == "a" for event in two.events)
            async with replica(server, request.node.name, timeout_ms=300) as three:
                assert set(three.table.rows) == {"a"}


async def test_a_node_that_lies_while_it_is_in_is_kept_out_everywhere(server, request):
    catalogue = {"m": {"1.0": CatalogEntry("bf16", 8192, "a" * 64)}}
    async with replica(server, request.node.name) as one, replica(server, request.node.name) as two:
        for each in (one, two):
            each.table.reload((POOL,), catalogue, each.get_now())
        await join(one, weights_sha256="a" * 64)
        await until(lambda: routed(two) == {"a"}, "it is in")
        refused = await two.register(registration(epoch=2, weights_sha256="b" * 64))
        assert refused.kind is DenialReason.UNTRUE
        await until(lambda: not routed(one) and not routed(two), "it is out")
        assert "b" * 64 in one.get_members()[0].reasons[-1]


async def test_garbage_on_the_channel_or_in_beats_harms_nobody(server, request):
    async with replica(server, request.node.name) as one:
        lease = await join(one)
        refused = await one.heartbeat("a", lease, replace(ready(2), kv_cache_usage=7.0))
        assert refused == RegistryDenial(DenialReason.IMPOSSIBLE, "kv_cache_usage 7.0 is not within 0 and 1")
        assert "kv_cache_usage" in one.get_members()[0].reasons[-1]
        assert isinstance(await one.heartbeat("a", lease, ready(3)), NodeRecord)
        assert (await one.heartbeat("a", "other", ready(4))).kind is DenialReason.UNKNOWN
        assert (await one.heartbeat("nobody", lease, ready(4))).kind is DenialReason.UNKNOWN


async def test_answers_that_differ_at_one_replica_quarantine_the_node_at_all_of_them(server, listens):
    network = f"compared-{listens}"
    async with replica(server, network) as one, replica(server, network, listens=listens) as other:
        await join(one)
        await until(lambda: other.table.get_pools("a") == ("chat",), "it is ready at both")
        await other.record_comparison("a", agreements=3)
        await one.record_comparison("a", disagreements=1, reason="other tokens")
        await until(lambda: other.table.rows["a"].evidence.disagreements > 0.9, "the other knows")
        assert other.table.rows["a"].state is NodeState.READY, "once may be chance"
        for each in (other, one):
            await each.record_comparison("a", disagreements=1, reason="other tokens")
        await until(lambda: {each.get_members()[0].state for each in (one, other)} == {NodeState.QUARANTINED}, "it is out at both")
        for each in (one, other):
            [member] = each.get_members()
            assert "quarantined, answers differ: other tokens" in member.reasons
            assert member.trust < 0.5
            assert each.table.get_pools("a") == ()
        await one.record_comparison("nobody", disagreements=1, reason="x")
