"""Clients and nodes that reset or half-close at every state of an exchange: it ends once, its neighbours do not notice, nothing stays."""

import asyncio
import json

import pytest
import pytest_asyncio

from tests.support.clients import Broken, Http1, Http2, connected
from tests.support.waiting import until
from tests.support.wired import MIB, BareNode, echo, reset, wired

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

BODY = b"the first half|and the second"
HALF = len(BODY) // 2
LEAVERS, STAYERS = 4, 2
PROTOCOLS = (Http1, Http2)
CLIENT_STATES = (
    "its own head is half sent",
    "a request without a body is being decided",
    "its body is half sent",
    "a request with a body is being decided",
    "the node works",
    "the answer is half here",
    "the answer is here",
)


class Stage:
    """A gateway and a node that stop where a test wants, until it lets them go on."""

    def __init__(self, made, node):
        self.made = made
        made.handler_factory.decision = self.decide
        node.behaviour = self.answer
        self.deciding = self.working = 0
        self.decide_now, self.answer_now, self.end_now = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.decide_now, self.answer_now, self.end_now):
            gate.set()
        made.forget()

    async def decide(self, _head, body):
        self.deciding += 1
        await self.decide_now.wait()
        return self.made.send(body)

    async def answer(self, asked):
        body = await asked.body()
        self.working += 1
        await self.answer_now.wait()
        half = len(body) // 2
        asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:half])
        await self.end_now.wait()
        asked.writer.write(body[half:])

    def stop_before(self, state):
        """Where the exchange has to wait, so that the state lasts."""
        for part, gate in (("decided", self.decide_now), ("works", self.answer_now), ("half here", self.end_now)):
            if part in state:
                gate.clear()

    def go_on(self):
        for gate in (self.decide_now, self.answer_now, self.end_now):
            gate.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house():
    node = BareNode()
    async with wired(node) as made:
        yield made, node


async def bring(client, state):
    """Bring a client to a state, as far as that is in its own hands."""
    if state == CLIENT_STATES[0]:
        await client.half_a_head()
        return
    if state == CLIENT_STATES[1]:
        await client.head("GET", None)
        return
    await client.head("POST", len(BODY))
    if state == CLIENT_STATES[2]:
        await client.piece(BODY[:HALF], last=False)
        return
    await client.piece(BODY, last=True)
    if state in CLIENT_STATES[-2:]:
        await client.status()
    if state == CLIENT_STATES[-1]:
        await client.body()


async def finish(client, state):
    """What a client that has stayed still gets."""
    if state == CLIENT_STATES[0]:
        return await client.ask("POST", BODY) if isinstance(client, Http2) else None
    if state == CLIENT_STATES[2]:
        await client.piece(BODY[HALF:], last=True)
    if state == CLIENT_STATES[-1]:
        return BODY[::-1]
    if state != CLIENT_STATES[-2]:
        assert await client.status() == 200
    return await client.body()


LEAVING = [(protocol, verb) for protocol in PROTOCOLS for verb in ("reset", "half_close", "close")] + [(Http2, "reset_stream")]


@pytest.mark.parametrize("state", CLIENT_STATES)
@pytest.mark.parametrize(("protocol", "leave"), LEAVING, ids=lambda value: value if isinstance(value, str) else value.__name__)
async def test_a_client_that_leaves_while(house, protocol, leave, state):
    made, node = house
    stage = Stage(made, node)
    stage.stop_before(state)
    async with connected(protocol, made.port, LEAVERS + STAYERS) as clients:
        everyone = await leave_on_stage(made, stage, clients, leave, state)
    await made.at_rest()
    assert len(made.handler_factory.flows) == everyone
    assert all(not flow.errors for flow in made.handler_factory.flows)


async def leave_on_stage(made, stage, clients, leave, state):
    """Play the scene. Returns how many exchanges there were."""
    begun = state != CLIENT_STATES[0]
    leavers, stayers = clients[:LEAVERS], clients[LEAVERS:]
    everyone = len(clients) if begun else 0
    await asyncio.gather(*(bring(client, state) for client in clients))
    await until(lambda: len(made.handler_factory.flows) == everyone)
    await until(lambda: stage.deciding == everyone or "half sent" in state)
    await until(lambda: stage.working == everyone or state in CLIENT_STATES[:4])

    if leave == "reset_stream" and not begun:
        leave = "half_close"  # there is no stream yet
    for client in leavers:
        await getattr(client, leave)()
    await until(lambda: sum(flow.ends for flow in made.handler_factory.flows) >= LEAVERS or not begun)

    stage.go_on()
    if begun:
        for client in stayers:
            assert await finish(client, state) == (b"" if "without" in state else BODY[::-1])
    if leave == "reset_stream":
        for client in leavers:
            assert await client.ask("POST", BODY) == (200, BODY[::-1])
        everyone += LEAVERS
    return everyone


async def test_a_client_that_ends_its_body_before_the_length_it_promised(house):
    made, node = house
    Stage(made, node)
    async with connected(Http2, made.port, LEAVERS) as clients:
        for client in clients:
            await bring(client, CLIENT_STATES[2])
        await until(lambda: len(made.handler_factory.flows) == LEAVERS)
        for client in clients:
            await client.end_stream()
            with pytest.raises(Broken):
                await client.status()
    await made.at_rest()
    assert len(made.handler_factory.flows) == LEAVERS
    assert all(flow.asked == [] for flow in made.handler_factory.flows)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
async def test_a_client_that_leaves_when_half_of_its_eight_mib_has_come_here(house, protocol):
    made, node = house
    Stage(made, node)
    async with connected(protocol, made.port, 1) as (client,):
        await client.head("POST", 8 * MIB)
        await client.piece(bytes(8 * MIB), last=True)
        while not (half := [each for each in made.server.connections if each.grpc.held > MIB]):  # noqa: ASYNC110 - each turn counts
            await asyncio.sleep(0)
        half[0]._transport.pause_reading()
        await client.reset()
        await asyncio.sleep(0.05)  # some Envoys hear of it only when they are read from again
        half[0]._transport.resume_reading()
    await made.at_rest()
    assert len(made.handler_factory.flows) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
async def test_a_reply_of_eight_mib_whose_client_is_gone(house, protocol):
    made, node = house
    stage = Stage(made, node)
    stage.decide_now.clear()
    async with connected(protocol, made.port, 2) as (leaver, stayer):
        for client in (leaver, stayer):
            await client.head("POST", 8 * MIB)
            await client.piece(bytes(8 * MIB), last=True)
        await until(lambda: stage.deciding == 2)
        stage.go_on()
        await leaver.reset()
        assert await stayer.status() == 200
        assert await stayer.body() == bytes(8 * MIB)
    await made.at_rest()
    assert len(made.handler_factory.flows) == 2


LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n"
NOTHING, CUT, WHOLE = "nothing of it", "a part of it", "all of it"
NODE_STATES = {
    "a connection is there": (None, NOTHING, NOTHING),
    "a request's head is there": (b"", NOTHING, NOTHING),
    "a request is there": (b"", NOTHING, NOTHING),
    "its head is half sent": (LENGTH[:20], NOTHING, NOTHING),
    "its head is sent": (LENGTH, CUT, CUT),
    "its body is half sent": (LENGTH + b"x" * 50, CUT, CUT),
    "a chunk is half sent": (CHUNKED + b"64\r\n" + b"x" * 50, CUT, CUT),
    "its chunks lack their end": (CHUNKED + b"5\r\nhello\r\n", CUT, CUT),
    "a body without a length is sent": (ENDLESS + b"hello", WHOLE, WHOLE),
    "its answer is sent": (LENGTH + b"x" * 100, WHOLE, WHOLE),
}
"""What the node has sent; what the client gets when it then resets, and when it half-closes.

A body without a length ends where the connection ends: Envoy takes a reset for that too.
"""


def breaking(state, how):
    """A node's behaviour: requests that ask for it are broken off at this state."""

    async def behaviour(asked):
        sent = NODE_STATES[state][0]
        if "x-break" not in asked.headers:
            await echo(asked)
            return
        if sent is None:
            await asked.reader.read()  # what is to happen has happened
            return
        if state != "a request's head is there":
            await asked.body()
        asked.writer.write(sent)
        await asked.writer.drain()
        await asyncio.sleep(0.02)  # what was sent shall arrive before a reset overtakes it
        leave_as(how)(asked.writer)
        await asked.reader.read()

    return behaviour


def leave_as(how):
    return reset if how == "resets" else asyncio.StreamWriter.write_eof


async def outcome(client):
    """What a client got of its answer."""
    try:
        status, body = await client.ask("POST", BODY, x_break="now")
    except Broken:
        return CUT
    if status == 200:
        return WHOLE
    assert 500 <= status <= 504
    assert json.loads(body)["error"]
    return NOTHING


@pytest.mark.parametrize("state", NODE_STATES)
@pytest.mark.parametrize("how", ["resets", "half-closes"])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
async def test_a_node_that_breaks_off_when(house, protocol, how, state):
    made, node = house
    Stage(made, node)
    sent, *outcomes = NODE_STATES[state]
    node.behaviour = breaking(state, how)
    node.accepted = leave_as(how) if sent is None else lambda _writer: None
    if sent is None:
        node.hang_up()
    async with connected(protocol, made.port, LEAVERS + 1) as (neighbour, *clients):
        # An answer that is whole leaves a connection that the next request may be sent on: one by one, so that a retry gets a new one.
        got = [await outcome(client) for client in clients] if WHOLE in outcomes else await asyncio.gather(*map(outcome, clients))
        node.accepted = lambda _writer: None
        assert got == [outcomes[how == "half-closes"]] * LEAVERS
        assert await neighbour.ask("POST", BODY) == (200, BODY[::-1])
    await made.at_rest()
    assert len(made.handler_factory.flows) == LEAVERS + 1
    assert all(not flow.errors for flow in made.handler_factory.flows)
