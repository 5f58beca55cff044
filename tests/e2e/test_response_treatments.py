"""What a real Envoy makes of an answer that is held and replaced, or translated while it passes."""

import asyncio
import contextlib

import psutil
import pytest
from aiohttp import ClientSession, ClientTimeout, web

from din_extproc.domain.response import BufferedTranslation, Replacement, StreamTranslation
from din_extproc.domain.verdict import Send
from tests.support.waiting import until
from tests.support.wired import MIB, wired

pytestmark = pytest.mark.e2e

JSON = (("content-type", "application/json"),)


class Tagging:
    """Marks where one piece ended."""

    def feed(self, data: bytes) -> bytes:
        return data + b"|"

    def end(self) -> bytes:
        return b"END"


@contextlib.asynccontextmanager
async def treating(behaviour, treat):
    """The rig, whose node answers by `behaviour`, and a client."""
    async with wired() as made, ClientSession(timeout=ClientTimeout(60)) as client:

        async def decide(_head, _body):
            endpoints, given = (made.parts.nodes[0].endpoint,), (("x-given", "1"),)
            return Send("pool", endpoints, request_headers=(), response_headers=given, metadata={}, needs_response_head=True)

        made.handler_factory.decision, made.handler_factory.treat = decide, treat
        made.parts.nodes[0].behaviour = behaviour
        yield made, client
        await made.at_rest()


def pieces(_head):
    return StreamTranslation(Tagging(), (("content-type", "text/plain"),))


async def test_pieces_are_translated_as_they_come_and_the_end_adds_to_them():
    arrived = asyncio.Event()

    async def node(request):
        answer = web.StreamResponse(headers={"content-type": "application/x-ndjson", "content-length": "15"})
        await answer.prepare(request)
        for number in range(5):
            await answer.write(b"n=%d" % number)
            await arrived.wait()
        return answer

    async with treating(node, pieces) as (made, client), client.post(made.url, data=b"x") as answer:
        first, _ = await answer.content.readchunk()
        arrived.set()
        assert (first, answer.headers["content-type"], answer.headers["x-given"]) == (b"n=0|", "text/plain", "1")
        assert "content-length" not in answer.headers
        rest = await answer.read()
        assert rest.endswith(b"|END")
        assert (first + rest).replace(b"|", b"") == b"n=0n=1n=2n=3n=4END", "how later pieces are joined is the network's choice"


async def test_a_whole_answer_is_replaced_with_status_headers_and_length():
    async def node(_request):
        return web.Response(status=500, body=b"a" * 100_000, content_type="text/html")

    def treat(_head):
        return BufferedTranslation(lambda body: Replacement(400, JSON, b'{"was":%d}' % len(body)))

    async with treating(node, treat) as (made, client), client.post(made.url, data=b"x") as answer:
        assert (answer.status, await answer.read(), answer.headers["content-length"]) == (400, b'{"was":100000}', "14")
        assert (answer.content_type, answer.headers["x-given"]) == ("application/json", "1")


async def test_an_answer_without_a_body_can_be_given_one():
    async def node(_request):
        return web.Response(status=503)

    def treat(head):
        return BufferedTranslation(lambda body: Replacement(head.status, JSON, b"was:" + body))

    async with treating(node, treat) as (made, client), client.post(made.url, data=b"x") as answer:
        assert (answer.status, await answer.read()) == (503, b"was:")


async def test_a_treatment_that_fails_lets_the_answer_pass():
    async def node(_request):
        return web.Response(status=500, body=b"broken")

    async with treating(node, lambda _head: 1 / 0) as (made, client), client.post(made.url, data=b"x") as answer:
        assert (answer.status, await answer.read()) == (500, b"broken")


async def test_a_client_that_reads_slowly_slows_the_node_and_fills_nobodys_memory():
    sent = 0

    async def node(request):
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while sent < 400 * MIB:
                await answer.write(b"x" * 65_536)
                sent += 65_536
        return answer

    async with treating(node, pieces) as (made, client):
        envoy = psutil.Process(made.parts.envoy.process.pid)
        before = envoy.memory_info().rss + psutil.Process().memory_info().rss
        async with client.post(made.url, data=b"x") as answer:
            await answer.content.readany()
            reached = -1
            while sent != reached:
                reached = sent
                await asyncio.sleep(0.5)
            assert sent < 400 * MIB
            assert envoy.memory_info().rss + psutil.Process().memory_info().rss - before < 200 * MIB
            answer.close()


async def test_a_client_that_leaves_ends_the_translation_and_the_request_at_the_node():
    gone = asyncio.Event()

    async def node(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"x")
                await asyncio.sleep(0.02)
        except (ConnectionError, asyncio.CancelledError):
            gone.set()
            raise

    async with treating(node, pieces) as (made, client):
        async with client.post(made.url, data=b"x") as answer:
            await answer.content.readany()
            answer.close()
        await until(lambda: made.handler_factory.flows and made.handler_factory.flows[0].ends)
        await until(gone.is_set)
        assert made.handler_factory.flows[0].ends == 1
