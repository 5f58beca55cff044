"""Streams through the whole gateway, whole and broken: what the client sees, what the node gets, and what the tenant is charged."""

import contextlib
import gzip
import json
import socket
import struct
import zlib
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from aiohttp import web

from tests.support.rig import Backend
from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, events, key_of, node, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
MODELS = ("steady", "slow", "pair")
DONE = "data: [DONE]\n\n"
ROOM = 500
"""Output tokens that every request here asks for: what a charge must stay far below when the answer was short."""


@pytest.fixture(scope="module")
def sims() -> Iterator[dict[str, EngineSim]]:
    made = {
        "steady": EngineSim(model="steady", decode_rate=2000.0, prefill_rate=1e6),
        "slow": EngineSim(model="slow", decode_rate=20.0, prefill_rate=1e6),
        # Their tokens are 10 ms apart: a reset throws away what Envoy has not read, and with it the first byte that forbids a retry.
        "pair": EngineSim(model="pair", decode_rate=100.0, prefill_rate=1e6),
        "spare": EngineSim(model="pair", decode_rate=100.0, prefill_rate=1e6),
    }
    with together(made) as running:
        yield running


@pytest.fixture(scope="module")
def zipped() -> Backend:
    return Backend("zipped")


@pytest.fixture(scope="module")
def stack(sims, zipped) -> Iterator[Stack]:
    addresses = {"steady": ("steady",), "slow": ("slow",), "pair": ("pair", "spare")}
    pools = {
        model: {
            "model": model,
            "engine": "vllm",
            "scheduler": "round_robin",
            "nodes": [node(name, sims[name].address) for name in names],
        }
        for model, names in addresses.items()
    }
    pools["zipped"] = {"model": "zipped", "engine": "vllm", "nodes": [node("zipped", zipped.endpoint)]}
    config = {
        "pools": pools,
        "rules": [{"id": name, "when": {"model": name}, "pool": name} for name in pools],
        "tenants": [tenant("acme")],
        "envoy": {"health_check": False, "outlier": {"consecutive_connect_failures": 1000}},
        "health": {"breaker": False},
    }
    with Stack(config) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(sims) -> Iterator[None]:
    for sim in sims.values():
        sim.forget()
    yield
    for sim in sims.values():
        sim.fail("")


def ask(model: str, **fields) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "tell me"}], "max_tokens": ROOM, "stream": True, **fields}


@contextlib.contextmanager
def accounted(stack: Stack, exchanges: int = 1) -> Iterator[SimpleNamespace]:
    """What the exchanges inside the block came to: `outcomes`, `prompt` and `completion` tokens. Afterwards no slot is taken."""
    before = stack.all_accounted()["counts"]
    accounts = SimpleNamespace()
    yield accounts
    after = stack.settled(sum(before["outcomes"].values()) + exchanges)["counts"]
    accounts.outcomes = {
        name: count - before["outcomes"].get(name, 0)
        for name, count in after["outcomes"].items()
        if count > before["outcomes"].get(name, 0)
    }
    accounts.prompt, accounts.completion = (after[f"{kind}_tokens"] - before[f"{kind}_tokens"] for kind in ("prompt", "completion"))
    stack.eventually(lambda: stack.redis_keys(":lease:") == [], "every slot is free")


def whole(stack: Stack, model: str, **fields) -> str:
    reply = stack.chat(ask(model, **fields))
    assert reply.status_code == 200, reply.text
    return reply.text


def cut(stack: Stack, model: str, **fields) -> str:
    """The part of a stream that came before its connection broke."""
    text = ""
    with stack.client() as client, client.stream("POST", PATH, json=ask(model, **fields)) as reply:
        parts = reply.iter_text()
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):  # noqa: PT012 - what came before it is the point
            for part in parts:
                text += part
    return text


def texts(answer: str) -> list[str]:
    return [event["choices"][0]["delta"].get("content") or "" for event in events(answer) if event.get("choices")]


# Usage


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}])
def test_who_did_not_ask_for_usage_sees_none_and_is_charged_exactly_all_the_same(stack, sims, options):
    with accounted(stack) as accounts:
        answer = whole(stack, "steady", **options)
    assert answer.endswith(DONE)
    assert all(event["choices"] and event.get("usage") is None for event in events(answer))
    [request] = sims["steady"].seen()[1]
    assert json.loads(request["body"])["stream_options"]["include_usage"] is True
    assert (accounts.prompt, accounts.completion) == (request["prompt_tokens"], request["completion_tokens"])


def test_who_asked_for_usage_sees_it_once(stack, sims):
    answer = whole(stack, "steady", stream_options={"include_usage": True})
    [usage] = [event["usage"] for event in events(answer) if event.get("usage")]
    assert usage["completion_tokens"] == sims["steady"].seen()[1][0]["completion_tokens"]
    assert json.loads(sims["steady"].seen()[1][0]["body"]) == ask("steady", stream_options={"include_usage": True})


def test_a_stream_without_usage_is_charged_by_what_was_counted(stack, sims):
    sims["steady"].fail("no_usage; truncate:after=12")
    with accounted(stack) as accounts:
        answer = whole(stack, "steady")
    assert len([text for text in texts(answer) if text]) == 12
    assert accounts.outcomes == {"upstream_truncated": 1}
    assert 12 <= accounts.completion < 40
    assert accounts.prompt > 0


def test_a_client_that_resets_after_five_deltas_pays_for_about_five(stack, sims):
    with accounted(stack) as accounts:
        leave_after(stack, 5)
    assert accounts.outcomes == {"client_cancelled": 1}
    assert 5 <= accounts.completion < 40
    assert 0 < accounts.prompt < 50


# Errors after the 200


@pytest.mark.parametrize("after", [0, 20])
@pytest.mark.parametrize("as_text", [False, True])
def test_an_error_event_is_a_failure_and_no_finish_is_made_up(stack, sims, after, as_text):
    sims["steady"].fail(f"error_event:after={after},message=engine died,text={str(as_text).lower()}")
    with accounted(stack) as accounts:
        answer = whole(stack, "steady")
    assert accounts.outcomes == {"upstream_error": 1}
    [error] = [event["error"] for event in events(answer) if "error" in event]
    assert error["message"] == "engine died"
    assert {"type", "code"} <= error.keys()
    assert not any(choice.get("finish_reason") for event in events(answer) for choice in event.get("choices", ()))
    assert (accounts.completion == 0) if not after else (20 <= accounts.completion < 60)


def test_a_null_error_beside_choices_is_none(stack, sims):
    harmless = 'data: {"error":null,"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    sims["steady"].ask("POST", "/_faults", {"faults": [{"kind": "insert", "after": 3, "body": harmless}]})
    with accounted(stack) as accounts:
        assert harmless in whole(stack, "steady")
    assert accounts.outcomes == {"completed": 1}


# Streams that stop


def test_a_stream_that_is_reset_half_way_is_reset_for_the_client_and_not_tried_again(stack, sims):
    sims["pair"].fail("reset:after=40")
    sims["spare"].fail("reset:after=40")
    with accounted(stack) as accounts:
        answer = cut(stack, "pair")
    assert len([text for text in texts(answer) if text]) <= 40
    assert DONE not in answer
    assert accounts.outcomes == {"upstream_truncated": 1}
    assert accounts.prompt > 0
    assert accounts.completion < 120
    assert sims["pair"].seen()[0]["requests"] + sims["spare"].seen()[0]["requests"] == 1


def test_a_stream_that_ends_cleanly_without_an_end_says_so_in_band(stack, sims):
    sims["steady"].fail("truncate:after=40")
    with accounted(stack) as accounts:
        answer = whole(stack, "steady")
    assert DONE not in answer
    *before, last = events(answer)
    assert last["error"]["code"] == "upstream_truncated"
    assert last["error"]["type"] != "invalid_request_error"
    assert len([text for text in texts(answer) if text]) == 40
    assert not any("error" in event for event in before)
    assert accounts.outcomes == {"upstream_truncated": 1}
    assert 40 <= accounts.completion < 120


def test_before_the_first_byte_another_node_is_asked_and_the_client_sees_one_stream(stack, sims):
    sims["pair"].fail("reset:count=1")
    with accounted(stack, 2) as accounts:
        answers = [stack.chat(ask("pair")) for _ in range(2)]  # by turns: one of them meets the fault
    for answer in answers:
        assert answer.status_code == 200
        assert len({event["id"] for event in events(answer.text)}) == 1
        assert answer.text.endswith(DONE)
    assert [answer.headers["x-din-node-id"] for answer in answers] == ["spare", "spare"]
    assert accounts.outcomes == {"completed": 2}
    assert accounts.completion == sims["spare"].seen()[0]["completion_tokens"]


def test_after_the_first_byte_nobody_else_is_asked(stack, sims):
    sims["pair"].fail("reset:after=3")
    sims["spare"].fail("reset:after=3")
    with accounted(stack) as accounts:
        cut(stack, "pair")
    assert sims["pair"].seen()[0]["requests"] + sims["spare"].seen()[0]["requests"] == 1
    assert accounts.outcomes == {"upstream_truncated": 1}


# Clients that leave


def leave_after(stack: Stack, deltas: int, model: str = "slow", **fields) -> None:
    """Send a request and reset the connection after so many deltas, or, with none, once the node works on it."""
    body = json.dumps(ask(model, **fields))
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key_of('acme')}\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        got = b""
        while got.count(b'"content":"') < deltas + bool(deltas):  # the first one names the role and is empty
            got += connection.recv(65536)
        if not deltas:
            stack.eventually(lambda: stack.status()["exchanges"]["open"] > 0, "the request is under way")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_work_of_the_node_and_frees_its_slot(stack, sims, stream):
    slow = sims["slow"]
    with accounted(stack) as accounts:
        leave_after(stack, 5 if stream else 0, stream=stream)
        stack.eventually(lambda: slow.seen()[0]["aborted"] == 1, "the node hears of it")
    assert accounts.outcomes == {"client_cancelled": 1}
    [request] = slow.seen()[1]
    assert request["completion_tokens"] < ROOM / 4, "the node went on for nobody"
    assert slow.gauge("num_requests_running") == 0
    assert all(each["tokens_in_use"] == 0 for each in stack.status()["nodes"].values())
    assert stack.chat(ask("slow", max_tokens=1)).status_code == 200, "the node is none the worse for it"


# Nodes that compress


EVENTS = [b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"token %d"}}]}\n\n' % number for number in range(20)]
USAGE = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":20,"total_tokens":27}}\n\n'


def squeezed(parts: list[bytes]) -> list[bytes]:
    """Gzip, flushed after each part."""
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    flushed = [packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) for part in parts]
    return [*flushed, packer.flush()]


async def compressed(request: web.Request, parts: list[bytes]) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"content-type": "text/event-stream", "content-encoding": "gzip"})
    await reply.prepare(request)
    for part in squeezed(parts):
        await reply.write(part)
    return reply


@contextlib.asynccontextmanager
async def at_work(backend: Backend, behaviour):
    backend.behaviour = behaviour
    backend.seen.clear()
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


async def test_a_node_is_not_asked_to_compress(stack, zipped):
    async def willing(request: web.Request) -> web.StreamResponse:
        if "gzip" in request.headers.get("accept-encoding", ""):
            return await compressed(request, [*EVENTS, USAGE, DONE.encode()])
        return web.Response(body=b"".join([*EVENTS, USAGE, DONE.encode()]), content_type="text/event-stream")

    async with at_work(zipped, willing), httpx.AsyncClient(base_url=stack.url, timeout=10) as client:
        with accounted(stack) as accounts:
            reply = await client.post(
                PATH, json=ask("zipped"), headers={"authorization": f"Bearer {key_of('acme')}", "accept-encoding": "gzip, br, zstd"}
            )
            assert "content-encoding" not in reply.headers
    assert reply.content == b"".join([*EVENTS, DONE.encode()])
    assert (accounts.prompt, accounts.completion) == (7, 20)
    assert "accept-encoding" not in zipped.seen[0].headers


async def test_what_is_compressed_all_the_same_arrives_as_it_is_and_is_not_free(stack, zipped):
    async def stubborn(request: web.Request) -> web.StreamResponse:
        return await compressed(request, [*EVENTS, USAGE, DONE.encode()])

    async with at_work(zipped, stubborn), httpx.AsyncClient(base_url=stack.url, timeout=10) as client:
        with accounted(stack) as accounts:
            reply = await client.post(PATH, json=ask("zipped"), headers={"authorization": f"Bearer {key_of('acme')}"})
    assert reply.headers["content-encoding"] == "gzip"
    assert reply.content == b"".join([*EVENTS, USAGE, DONE.encode()]), "label and body agree"
    assert accounts.prompt > 0
    assert accounts.completion <= ROOM


@pytest.mark.parametrize("status", [200, 503])
async def test_a_compressed_json_answer_agrees_with_its_label_on_success_and_on_error(stack, zipped, status):
    body = json.dumps({"choices": [{"message": {"content": "x" * 4000}}]} if status == 200 else {"error": {"message": "busy"}}).encode()

    async def stubborn(_request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=gzip.compress(body), status=status, headers={"content-type": "application/json", "content-encoding": "gzip"}
        )

    async with at_work(zipped, stubborn), httpx.AsyncClient(base_url=stack.url, timeout=10) as client:
        with accounted(stack) as accounts:
            reply = await client.post(PATH, json=ask("zipped", stream=False), headers={"authorization": f"Bearer {key_of('acme')}"})
    assert reply.status_code == status
    if status == 200:
        assert reply.json() == json.loads(body)
    else:
        assert (reply.json()["code"], "content-encoding" in reply.headers) == ("upstream_error", False)
    assert (accounts.prompt > 0) == (status == 200)
