"""Nodes asked the same: who is blamed when they differ, and what a node that does not answer means."""

import json

import pytest
from aiohttp import web

from din_extproc.domain.agreement import Agreement
from din_extproc.domain.node import Endpoint, Node
from din_extproc.edge.double_check import DoubleChecker
from din_extproc.edge.http.port import HttpPort
from din_extproc.flow.double_check import CheckSampler, DoubleCheck, DoubleCheckPolicy
from tests.support.servers import free_port

SOUND, LIE = [" Paris", "."], [" London", "."]


class Engines:
    """Nodes on loopback that say what a test wants."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.asked: list[tuple[str, bytes, str]] = []
        self._ports: list[HttpPort] = []

    async def add(self, name: str, says: list[str] | int) -> None:
        async def answer(request: web.Request) -> web.Response:
            self.asked.append((name, await request.read(), request.headers["x-din-trace-id"]))
            if isinstance(says, int):
                return web.Response(status=says)
            content = [{"token": token, "logprob": -0.01, "top_logprobs": [{"token": token, "logprob": -0.01}]} for token in says]
            return web.json_response({"choices": [{"message": {"content": "".join(says)}, "logprobs": {"content": content}}]})

        number = free_port()
        port = HttpPort([web.post("/v1/chat/completions", answer)])
        await port.start(f"127.0.0.1:{number}")
        self._ports.append(port)
        self.nodes[name] = Node(name, Endpoint("127.0.0.1", number), "m", "1", "bf16", "", 1, 4096, 8)

    async def stop(self) -> None:
        for port in self._ports:
            await port.stop()


@pytest.fixture
async def engines():
    made = Engines()
    yield made
    await made.stop()


async def checked(engines: Engines, first: str):
    sampler = CheckSampler(DoubleCheckPolicy(1.0, 10_000, 8))
    checker = DoubleChecker(sampler, lambda _pool: tuple(engines.nodes.values()), lambda: "made-here-0001")
    sampler.waiting.append(DoubleCheck("t-1", "p", "/v1/chat/completions", b'{"x":1}', engines.nodes[first], 10))
    await checker.run_checks()
    found = checker.take_results()
    assert checker.take_results() == []
    return found


async def test_nodes_that_agree_are_two_questions_with_the_same_bytes(engines):
    for name in "abc":
        await engines.add(name, SOUND)
    (found,) = await checked(engines, "a")
    assert (found.agreement, found.node_id, found.blamed, found.tokens) == (Agreement.AGREE, "a", (), 2)
    assert [body for _, body, _ in engines.asked] == [b'{"x":1}'] * 2
    assert {trace for _, _, trace in engines.asked} == {"made-here-0001"}


@pytest.mark.parametrize("first", ["a", "b", "c"])
async def test_a_third_node_tells_who_is_the_odd_one(engines, first):
    await engines.add("a", SOUND)
    await engines.add("b", LIE)
    await engines.add("c", SOUND)
    (found,) = await checked(engines, first)
    if "b" in {found.node_id, found.second_node_id}:
        assert (found.agreement, found.at_token, found.blamed) == (Agreement.DIFFER, 0, ("b",))
        assert len(engines.asked) == 3
    else:
        assert found.agreement is Agreement.AGREE


@pytest.mark.parametrize("third", [None, 503, [" Rome", "."]])
async def test_two_that_differ_are_both_blamed_when_nobody_can_tell(engines, third):
    await engines.add("a", SOUND)
    await engines.add("b", LIE)
    if third is not None:
        await engines.add("c", third)
    found = [each for each in await checked(engines, "a") if each.agreement is Agreement.DIFFER]
    for each in found:
        assert set(each.blamed) == {each.node_id, each.second_node_id}


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_a_node_that_does_not_answer_is_no_difference(engines, status):
    await engines.add("a", SOUND)
    await engines.add("b", status)
    (found,) = await checked(engines, "a")
    assert (found.agreement, found.blamed) == (Agreement.UNANSWERED, ())


async def test_a_node_that_is_gone_is_no_difference_and_a_node_alone_is_nothing(engines):
    await engines.add("a", SOUND)
    assert await checked(engines, "a") == []
    engines.nodes["gone"] = Node("gone", Endpoint("127.0.0.1", free_port()), "m", "1", "bf16", "", 1, 4096, 8)
    (found,) = await checked(engines, "a")
    assert found.agreement is Agreement.UNANSWERED
    assert json.dumps(found.blamed) == "[]"
