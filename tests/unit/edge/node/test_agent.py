"""A node's agent over real HTTP, between a scripted engine and a scripted registry."""

import asyncio
import logging

import aiohttp
import pytest

from din_extproc.domain.membership import NodeState, Registration
from din_extproc.domain.node import Endpoint, Node
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.node import agent as node_agent
from din_extproc.edge.node import engine_probe
from din_extproc.edge.node.agent import EnvoyLoad, NodeAgent
from din_extproc.edge.node.engine_probe import EngineProbe
from din_extproc.edge.registry.client import RegistryClient
from tests.support.fakes import FakeEngine, FakeRegistry

NODE = Node(
    id="gpu-1",
    endpoint=Endpoint("127.0.0.1", 8000),
    model="m",
    version="2025.3.1",
    dtype="bf16",
    compute_capability="9.0",
    tp_world_size=1,
    max_seq_len=8192,
    max_concurrency=8,
)


@pytest.fixture
async def engine():
    made = FakeEngine()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def registry():
    made = FakeRegistry()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as made:
        yield made


def agent_of(session, engine, *registries, token="", held=None):
    url = f"http://127.0.0.1:{engine.port}"
    probe = EngineProbe(session, "vllm", f"{url}/metrics", SystemClock.monotonic)
    client = RegistryClient(session, [each if isinstance(each, str) else each.url for each in registries], token)
    return NodeAgent(Registration(node=NODE, engine="vllm", weights_sha256="ab" * 32), url, "m", probe, client, held)


async def test_a_node_registers_as_soon_as_its_engine_serves_the_model_and_beats_with_real_numbers(session, engine, registry):
    engine.waiting, engine.running = 3, 2
    agent = agent_of(session, engine, registry)
    await agent.watch()
    assert agent.registered
    registration = registry.registrations[0]
    assert (registration["id"], registration["weights_sha256"], registration["engine"]) == ("gpu-1", "ab" * 32, "vllm")
    assert registration["free_memory_bytes"] > 0
    beat = registry.beats[0]
    assert (beat["state"], beat["waiting"], beat["running"], beat["sequence"]) == ("ready", 3, 2, 1)
    await agent.report()
    assert registry.beats[1]["sequence"] == 2


async def test_a_node_whose_engine_lists_nothing_yet_registers_as_loading_and_says_why(session, engine, registry, caplog):
    caplog.set_level(logging.INFO)
    engine.models = []
    agent = agent_of(session, engine, registry)
    await agent.watch()
    await agent.report()
    assert {(beat["state"], beat["reason"]) for beat in registry.beats} == {("loading", "the engine lists no model, not m")}
    assert "gpu-1 is loading: the engine lists no model, not m" in caplog.messages
    welcome, page = await agent.get_health()
    assert (welcome, page["state"], page["reason"]) == (False, "loading", "the engine lists no model, not m")
    engine.models = ["other"]
    await agent.watch()
    assert registry.beats[-1]["reason"] == "the engine lists other, not m"
    engine.models = ["other", "m"]
    await agent.watch()
    assert (registry.beats[-1]["state"], registry.beats[-1]["reason"]) == ("ready", "")


async def test_a_node_whose_engine_later_serves_another_model_says_so_at_once(session, engine, registry):
    agent = agent_of(session, engine, registry)
    await agent.watch()
    engine.models = ["other"]
    await agent.watch()
    assert [beat["state"] for beat in registry.beats] == ["ready", "loading"]
    assert agent.condition.reason == "the engine lists other, not m"


async def test_an_engine_that_dies_is_reported_at_once(session, engine, registry):
    agent = agent_of(session, engine, registry)
    await agent.watch()
    await engine.stop()
    await agent.watch()
    assert registry.beats[-1]["state"] == "loading"
    assert "can't be reached" in agent.condition.reason


async def test_an_engine_that_is_slow_is_busy_until_it_has_been_so_three_times(session, engine, registry, monkeypatch):
    monkeypatch.setattr(engine_probe, "_TIMEOUT_S", 0.05)
    agent = agent_of(session, engine, registry)
    await agent.watch()
    engine.silent = True
    states = []
    for _ in range(3):
        await agent.watch()
        states.append(agent.condition.state)
    assert states == [NodeState.READY, NodeState.READY, NodeState.LOADING]


async def test_a_lease_that_the_registry_does_not_know_is_asked_for_anew(session, engine, registry):
    agent = agent_of(session, engine, registry)
    await agent.watch()
    registry.forget()
    await agent.report()
    first, second = registry.registrations
    assert second == first | {"free_memory_bytes": second["free_memory_bytes"]}
    assert registry.beats[-1] | {"sequence": 1, "lease": "lease-2"} == registry.beats[-1]


async def test_an_unreachable_registry_is_tried_again_and_another_replica_is_used_meanwhile(session, engine, registry):
    agent = agent_of(session, engine, "http://127.0.0.1:1", registry)
    await agent.watch()
    assert agent.registered
    other = FakeRegistry()
    alone = agent_of(session, engine, f"http://127.0.0.1:{registry.port}")
    await registry.stop()
    await alone.watch()
    assert not alone.registered
    await registry.start()
    await alone.report()
    assert alone.registered
    assert not other.beats


async def test_a_refused_node_says_why_once_and_waits_longer_each_time(session, engine, registry, caplog):
    registry.refuse = (422, "the weights have another sha256 in the catalogue")
    agent = agent_of(session, engine, registry)
    with caplog.at_level(logging.WARNING):
        await agent.watch()
        await agent.report()
        await agent.report()
    assert [record.getMessage() for record in caplog.records] == [
        "the registry refuses the node: the weights have another sha256 in the catalogue"
    ]
    assert not agent.registered


async def test_an_agent_whose_place_was_taken_by_a_later_one_stays_out(session, engine, registry):
    agent = agent_of(session, engine, registry)
    await agent.watch()
    registry.forget()
    registry.refuse_registrations = "a newer registration is in force"
    for _ in range(3):
        await agent.report()
    assert not agent.registered
    assert len(registry.registrations) == 1


async def test_the_token_is_sent_and_a_wrong_one_is_reported(session, engine, registry):
    registry.token = "secret"
    right, wrong = agent_of(session, engine, registry, token="secret"), agent_of(session, engine, registry, token="guess")
    await right.watch()
    await wrong.watch()
    assert (right.registered, wrong.registered) == (True, False)


async def test_a_drain_is_reported_waits_for_running_requests_and_ends_in_deregistration(session, engine, registry, monkeypatch):
    monkeypatch.setattr(node_agent, "_SETTLE_S", 0.05)
    engine.running = 1
    agent = agent_of(session, engine, registry)
    await agent.watch()
    draining = asyncio.create_task(agent.drain("test", 10.0))
    async with asyncio.timeout(5):
        await registry.parted.wait()
    assert registry.farewells == ["drain"]
    assert registry.beats[-1]["state"] == "draining"
    assert (await agent.get_health())[0] is False
    engine.running = 0
    await draining
    assert registry.farewells == ["drain", "deregister"]


async def test_a_drain_does_not_wait_for_ever(session, engine, registry):
    engine.running = 1
    agent = agent_of(session, engine, registry)
    await agent.watch()
    await agent.drain("test", 0.1)
    assert registry.farewells == ["drain", "deregister"]


async def test_a_registry_that_asks_for_a_drain_gets_one_and_may_call_the_node_back(session, engine, registry):
    agent = agent_of(session, engine, registry)
    await agent.watch()
    registry.drain = True
    await agent.report()
    assert agent.condition.state is NodeState.DRAINING
    registry.drain = False
    await agent.report()
    await agent.watch()
    assert agent.condition.state is NodeState.READY


async def test_health_shows_the_queue_as_it_is_now(session, engine, registry, monkeypatch):
    monkeypatch.setattr(node_agent, "_FRESH_S", 0.0)
    agent = agent_of(session, engine, registry)
    await agent.watch()
    engine.waiting = 7
    welcome, page = await agent.get_health()
    assert (welcome, page["waiting"], page["registered"]) == (True, 7, True)


async def test_what_the_envoy_in_front_holds_back_waits_too(session, engine, registry):
    engine.waiting, engine.running = 1, 2
    agent = agent_of(session, engine, registry, held=lambda: EnvoyLoad(in_flight=6, waiting=3))
    await agent.watch()
    assert (registry.beats[0]["waiting"], registry.beats[0]["running"], agent.in_flight) == (4, 2, 6)


async def test_a_heartbeat_names_the_adapters_that_the_engine_lists(session, engine, registry):
    engine.adapters = ["sql", "law"]
    agent = agent_of(session, engine, registry)
    await agent.watch()
    assert registry.beats[0]["adapters"] == ["law", "sql"]
