"""The Lua filter inside a real Envoy, and the records that come out of its access log."""

import asyncio
import gzip
import http.client
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from google.protobuf import json_format

from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from din_extproc.domain.usage import ExchangeRecord, Labels, Outcome, Usage
from din_extproc.observe.accesslog import read_records
from tests.support import sse
from tests.support.lua_filter import SCRIPT, TRUNCATED, capture
from tests.support.rig import Answer, Rig, rig

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

CAPTURES = Path(__file__).parents[1] / "captures"
STREAMS = [path for path in sorted(CAPTURES.rglob("*.txt")) if "event-stream" in capture(path)[0].get("content-type", "")]
SENT = Labels(request_id="r-1", tenant="finance", model="m", prompt_estimate=40, reserved_tokens=296, stream=True)
LABELS: dict[str, Any] = {"request_id": "r-1", "labels": msgspec.json.encode(SENT).decode()}
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":38,"completion_tokens":13,"total_tokens":51}}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def delta(text: str, channel: str = "content") -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {channel: text}, "finish_reason": None}]}).encode() + b"\n\n"


DELTAS = [delta(f"t{number}") for number in range(12)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup() -> AsyncIterator[Rig]:
    async with rig(1, usage_lua=SCRIPT.read_text()) as running:
        yield running


def answers(pieces: Sequence[bytes | float], *, end: str = "eof", headers: dict[str, str] | None = None, status: int = 200) -> Any:
    """A node that sends these pieces, sleeping where a number stands, and then ends, resets, or hangs."""

    async def behave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers or {"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            if isinstance(piece, bytes):
                await response.write(piece)
            await asyncio.sleep(0.001 if isinstance(piece, bytes) else piece)
        if end == "hang":
            await asyncio.sleep(60)
        elif end == "reset":
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write_eof()
        return response

    return behave


async def record(setup: Rig, before: int) -> ExchangeRecord:
    """The record of the exchange that was logged after so many others."""
    entry = (await setup.logged(before + 1))[before]
    message = json_format.ParseDict({"http_logs": {"log_entry": [entry]}}, StreamAccessLogsMessage())
    [found] = read_records(message.SerializeToString(), {setup.nodes[0].endpoint: "node-0"})
    return found


async def exchange(setup: Rig, behaviour: Any, **labels: Any) -> tuple[bytes, ExchangeRecord]:
    """What a client gets of a node that behaves so, up to where it breaks off, and what is recorded."""
    node, before = setup.nodes[0], len(setup.sidecar.log)
    node.behaviour = behaviour
    setup.sidecar.decide = lambda _headers, _body: setup.toward(node, metadata={**LABELS, **labels})
    try:
        body = (await setup.chat()).body
    except http.client.IncompleteRead as cut:
        body = cut.partial
    return body, await record(setup, before)


async def leave(setup: Rig, behaviour: Any, *, after: bytes) -> ExchangeRecord:
    """What is recorded when the client goes as soon as it has read so much."""
    node, before = setup.nodes[0], len(setup.sidecar.log)
    node.behaviour = behaviour
    setup.sidecar.decide = lambda _headers, _body: setup.toward(node, metadata=LABELS)
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.envoy.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
    await reader.readuntil(after)
    writer.transport.abort()
    return await record(setup, before)


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.parametrize("size", [61, 100_000])
async def test_a_recorded_stream_passes_and_its_usage_arrives(setup: Rig, path: Path, size: int) -> None:
    _, body = capture(path)
    got, found = await exchange(setup, answers([body[at : at + size] for at in range(0, len(body), size)]))
    facts = sse.facts(body)
    assert got == body
    if "prompt_tokens" in facts:
        assert found.usage == Usage(facts["prompt_tokens"], facts["completion_tokens"], facts.get("cached_tokens", 0))
    else:
        assert found.usage.estimated
        assert found.usage.completion_tokens >= facts["deltas"]
    expected = {"error": Outcome.UPSTREAM_ERROR, "abort": Outcome.UPSTREAM_TRUNCATED}
    assert found.outcome is expected.get("error" if "error" in facts else facts.get("finish_reason", ""), Outcome.COMPLETED)
    assert found.node_id == "node-0"


async def test_only_the_usage_event_that_nobody_asked_for_is_taken_out(setup: Rig) -> None:
    body = b"".join([*DELTAS, FINISH, USAGE, DONE])
    for size in (50, len(body)):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        got, found = await exchange(setup, answers(pieces), strip_usage=True)
        assert got == b"".join([*DELTAS, FINISH, DONE])
        assert found.usage == Usage(38, 13)


async def test_a_stream_with_a_length_loses_its_usage_event_too(setup: Rig) -> None:
    body = b"".join([*DELTAS, FINISH, USAGE, DONE])
    headers = {"content-type": "text/event-stream", "content-length": str(len(body))}
    got, _ = await exchange(setup, answers([body], headers=headers), strip_usage=True)
    assert got == b"".join([*DELTAS, FINISH, DONE])


@pytest.mark.parametrize("name", ["vllm/chat-nonstream", "vllm/embeddings", "vllm/rerank", "llamacpp/embeddings", "llamacpp/rerank"])
async def test_a_recorded_json_answer_passes_and_its_usage_arrives(setup: Rig, name: str) -> None:
    _, body = capture(CAPTURES / f"{name}.txt")
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    got, found = await exchange(setup, answers([body[at : at + 999] for at in range(0, len(body), 999)], headers=headers), stream=False)
    reported = json.loads(body)["usage"]
    assert got == body
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (reported["prompt_tokens"], reported.get("completion_tokens", 0))
    assert (found.outcome, found.usage.estimated, found.first_token_ms) == (Outcome.COMPLETED, False, None)


@pytest.mark.parametrize("before", [0, 20])
@pytest.mark.parametrize("error", [{"message": "engine died", "type": "server_error", "code": 500}, "plain string"])
async def test_an_error_after_the_200_is_a_failure_of_the_node(setup: Rig, before: int, error: Any) -> None:
    event = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    got, found = await exchange(setup, answers([*(DELTAS * 2)[:before], event, DONE]))
    assert found.outcome is Outcome.UPSTREAM_ERROR
    assert found.error in {"server_error", "error"}
    assert (found.first_token_ms is None) == (before == 0)
    assert found.usage.total_tokens == (60 if before else 0)
    client_error = json.loads(sse.datas(got)[before])["error"]
    assert {"message", "type", "code"} <= set(client_error)
    assert b'"finish_reason": "stop"' not in got


async def test_a_stream_without_usage_is_charged_by_what_was_counted(setup: Rig) -> None:
    _, found = await exchange(setup, answers(DELTAS))
    assert found.usage == Usage(40, 12, estimated=True)


async def test_a_client_that_leaves_pays_for_what_it_got(setup: Rig) -> None:
    found = await leave(setup, answers(DELTAS[:5], end="hang"), after=b"t4")
    assert (found.outcome, found.usage) == (Outcome.CLIENT_CANCELLED, Usage(40, 5, estimated=True))
    assert found.response_flags == ("DC",)


async def test_a_client_that_leaves_after_the_end_mark_got_everything(setup: Rig) -> None:
    found = await leave(setup, answers([*DELTAS, FINISH, USAGE, DONE], end="hang"), after=b"[DONE]")
    assert (found.outcome, found.usage) == (Outcome.COMPLETED, Usage(38, 13))


async def test_time_to_first_token_waits_for_a_token_in_any_channel(setup: Rig) -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    thoughts = [delta("a", "reasoning_content")] * 3
    _, found = await exchange(setup, answers([role, b": ping\n\n", 0.3, *thoughts, 0.2, delta("b"), FINISH, DONE]))
    assert found.first_token_ms is not None
    assert found.duration_ms is not None
    assert 300 <= found.first_token_ms <= found.duration_ms - 200


async def test_a_node_is_not_asked_to_compress_and_usage_is_read(setup: Rig) -> None:
    body = b"".join([*DELTAS, FINISH, USAGE, DONE])

    async def compressing(request: web.Request) -> web.StreamResponse:
        if "gzip" in request.headers.get("accept-encoding", ""):
            return await answers([gzip.compress(body)], headers={"content-type": "text/event-stream", "content-encoding": "gzip"})(request)
        return await answers([body])(request)

    node, before = setup.nodes[0], len(setup.sidecar.log)
    node.behaviour = compressing
    setup.sidecar.decide = lambda _headers, _body: setup.toward(node, metadata=LABELS)
    reply = await setup.chat({"accept-encoding": "gzip"})
    assert (reply.body, reply["content-encoding"]) == (body, None)
    assert (await record(setup, before)).usage == Usage(38, 13)


@pytest.mark.parametrize("status", [200, 503])
async def test_an_answer_that_is_compressed_all_the_same_passes_as_it_is_and_is_not_free(setup: Rig, status: int) -> None:
    body = gzip.compress(json.dumps({"choices": [{"message": {"content": "".join(map(str, range(2000)))}}]}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    got, found = await exchange(setup, answers([body], headers=headers, status=status), stream=False)
    assert got == body
    assert found.usage == (Usage(40, (len(body) - 350) // 4, estimated=True) if status == 200 else Usage(0, 0))


@pytest.mark.parametrize("end", ["reset", "eof"])
async def test_a_stream_that_stops_half_way_is_truncated_and_not_completed(setup: Rig, end: str) -> None:
    forty = [delta(f"t{number}") for number in range(40)]
    got, found = await exchange(setup, answers([*forty, 0.3], end=end))
    assert got == b"".join(forty) + (TRUNCATED if end == "eof" else b"")
    assert (found.outcome, found.attempts) == (Outcome.UPSTREAM_TRUNCATED, 1)
    assert 40 + 37 <= found.usage.total_tokens <= 40 + 40


@pytest.mark.parametrize("kind", ["event-stream", "json"])
async def test_what_a_client_made_the_node_echo_neither_blames_the_node_nor_changes_the_price(setup: Rig, kind: str) -> None:
    forged = {"error": {"code": "x"}, "finish_reason": "abort", "usage": {"input_tokens": 1, "output_tokens": 1}}
    reported = {
        "object": "response",
        "usage": {"input_tokens": 1000, "output_tokens": 90},
        "metadata": forged,
        "tools": [{"parameters": forged}],
    }
    if kind == "event-stream":
        events = [
            {"type": "response.created", "response": {**reported, "usage": None}},
            {"type": "response.completed", "response": reported},
        ]
        got, found = await exchange(setup, answers([b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]))
    else:
        got, found = await exchange(setup, answers([json.dumps(reported).encode()], headers={"content-type": "application/json"}))
    assert b"upstream_error" not in got
    assert (found.outcome, found.usage, found.error) == (Outcome.COMPLETED, Usage(1000, 90), "")


async def test_an_end_that_passed_in_an_event_too_long_to_read_is_no_truncation(setup: Rig) -> None:
    body = b"".join([*DELTAS, b'data: {"type":"response.completed","x":"', b"y" * 1_200_000, b'"}\n\n'])
    got, found = await exchange(setup, answers([body[at : at + 65_536] for at in range(0, len(body), 65_536)]))
    assert got == body
    assert (found.outcome, found.usage, found.bad_events) == (Outcome.COMPLETED, Usage(40, 12, estimated=True), 1)


@pytest.mark.parametrize(("status", "outcome"), [(400, Outcome.CLIENT_ERROR), (429, Outcome.UPSTREAM_BUSY), (500, Outcome.UPSTREAM_ERROR)])
async def test_what_a_node_refuses_costs_nothing(setup: Rig, status: int, outcome: Outcome) -> None:
    headers = {"content-type": "application/json", "retry-after": "7"}
    _, found = await exchange(setup, answers([b'{"error":{"message":"m","type":"t"}}'], headers=headers, status=status))
    assert (found.outcome, found.status, found.usage, found.error, found.retry_after_s) == (outcome, status, Usage(0, 0), "t", 7)


async def test_what_never_reached_a_node_costs_nothing(setup: Rig) -> None:
    before = len(setup.sidecar.log)
    toward = setup.toward(setup.nodes[0], metadata=LABELS)
    toward.cluster = "no-such-pool"
    setup.sidecar.decide = lambda _headers, _body: toward
    assert (await setup.chat()).status == 503
    found = await record(setup, before)
    assert (found.outcome, found.usage, found.node_id) == (Outcome.NOT_DISPATCHED, Usage(0, 0), "")


async def test_an_answer_of_the_gateway_itself_is_not_looked_at(setup: Rig) -> None:
    before = len(setup.sidecar.log)
    setup.sidecar.decide = lambda _headers, _body: Answer(200, USAGE, {"content-type": "text/event-stream"})
    assert (await setup.chat()).body == USAGE
    entry = (await setup.logged(before + 1))[before]
    assert "metadata" not in entry


async def test_an_empty_answer_leaves_a_record_without_output(setup: Rig) -> None:
    _, found = await exchange(setup, answers([], headers={"content-type": "application/json"}, status=204), stream=False)
    assert (found.outcome, found.usage) == (Outcome.COMPLETED, Usage(40, 0, estimated=True))
