"""Engines that speak OpenAI's words get the client's bytes and the client theirs, through a real Envoy: only what is named here differs.

The oracle is what was written: the engine is a script that sends generated heads and bodies, in whatever pieces.
"""

import gzip
import random
import re
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from tests.property.test_byte_exact import spelled
from tests.property.test_dialect_streams import cut
from tests.support.odd_json import Speller
from tests.support.stack import Stack, key_of, node, raw_request, tenant

pytestmark = pytest.mark.e2e

OURS = re.compile(rb"x-request-id|x-(din|bxagent|ratelimit|envoy)-.*")
"""Only the gateway says these."""
TAKEN = re.compile(rb"connection|keep-alive|transfer-encoding|trailer|date|server|set-cookie|access-control-.*")
"""Of the connection to the engine and of its server, or for browsers: the gateway has its own, or none."""
PROVENANCE = ("node-id", "model-version", "exec-time-ms", "trace-id")
LIMITS = ("limit-requests", "remaining-requests", "reset-requests", "limit-tokens", "remaining-tokens", "reset-tokens")
ADDED = {b"x-request-id", *(f"x-din-{each}".encode() for each in PROVENANCE), *(f"x-ratelimit-{each}".encode() for each in LIMITS)}
NAMES = (
    b"X-Engine",
    b"x-request-id",
    b"Set-Cookie",
    b"ETag",
    b"Vary",
    b"openai-processing-ms",
    b"Server-Timing",
    b"Link",
    b"content-language",
)
VALUES = (
    b"",
    b"a, b;q=0.5",
    b'"quoted \\" text"',
    b"two  spaces\tand a tab",
    "größer 你好".encode(),
    b"\xff\x80",
    b"x" * 3000,
    b"=%00;,",
    b"-1",
)
TRAILERS = b"x-sum: 1\r\nx-engine: of the trailer\r\n"
DONE = "data: [DONE]\n\n"


class Scripted(Struct, frozen=True):
    """One answer, as an engine sends it."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    parts: tuple[bytes, ...]
    framing: str
    """`length`, `chunked`, `trailers` (chunked, with some) or `close` (ends with its connection)."""

    @property
    def bodiless(self) -> bool:
        return self.status == 204

    def head(self) -> bytes:
        framing = {
            "length": b"content-length: %d" % len(b"".join(self.parts)),
            "chunked": b"transfer-encoding: chunked",
            "trailers": b"transfer-encoding: chunked\r\ntrailer: x-sum",
            "close": b"connection: close",
        }
        lines = [b"HTTP/1.1 %d Said So" % self.status, *(b"%s: %s" % each for each in self.headers)]
        framed = not self.bodiless or self.framing == "close"  # who ends the connection says so, or the next request is sent on it
        return b"\r\n".join([*lines, *([framing[self.framing]] if framed else []), b"", b""])


class Engine(socketserver.ThreadingTCPServer):
    """Answers every request as the script of the moment says, and remembers its body. A context manager."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.script = Scripted(200, (), (), "length")
        self.got = b""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Connection(socketserver.StreamRequestHandler):
    server: Engine
    disable_nagle_algorithm = True

    def handle(self) -> None:
        while request := self.rfile.readline():
            length = 0
            while (line := self.rfile.readline().strip().lower()) != b"":
                length = int(line.removeprefix(b"content-length:")) if line.startswith(b"content-length:") else length
            body = self.rfile.read(length)
            if request.startswith(b"POST "):  # not the scraper's
                self.server.got = body
            script = self.server.script
            self._send(script)
            if script.framing == "close":
                return

    def _send(self, script: Scripted) -> None:
        self.wfile.write(script.head())
        if script.bodiless:
            return
        chunked = script.framing in ("chunked", "trailers")
        for part in filter(None, script.parts):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
            time.sleep(0.001)  # often enough for Envoy to see them apart
        if chunked:
            self.wfile.write(b"0\r\n%s\r\n" % (TRAILERS if script.framing == "trailers" else b""))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine) -> Iterator[Stack]:
    config = {
        "aliases": {"alias": {"model": "physical"}},
        "pools": {"pool": {"model": "physical", "engine": "vllm", "nodes": [node("scripted", engine.address)]}},
        "tenants": [tenant("acme")],
        "envoy": {"health_check": False},
        "health": {"breaker": False},
    }
    with Stack(config) as running:
        yield running


def headers_of(random_: random.Random, content_type: str, encoding: str) -> tuple[tuple[bytes, bytes], ...]:
    """Some of each kind, some names twice, in any order; the content type among them."""
    found = [(random_.choice(NAMES), random_.choice(VALUES)) for _ in range(random_.randrange(8))]
    found += [(b"Content-Type", content_type.encode())] * bool(content_type)
    found += [(b"content-encoding", encoding.encode())] * bool(encoding)
    found += random_.sample(
        [
            (b"Server", b"uvicorn"),
            (b"date", b"yesterday"),
            (b"x-din-node-id", b"a lie"),
            (b"X-RateLimit-Limit-Tokens", b"5"),
            (b"x-bxagent-degraded", b"true"),
        ],
        2,
    )
    random_.shuffle(found)
    return tuple(found)


def stream_of(speller: Speller, *, usage: bool) -> str:
    """Events with content, reasoning, tool calls, log probabilities, comments and odd line ends; at the end the usage, if any."""
    choose, end = speller.random.choice, speller.random.choice(["\n\n", "\r\n\r\n"])
    deltas = [
        lambda: f'{{"content":{speller.string()}}}',
        lambda: f'{{"reasoning_content":{speller.string()}}}',
        lambda: f'{{"tool_calls":[{{"index":0,"function":{{"arguments":{speller.string()}}}}}]}}',
        lambda: f'{{"x":{speller.value()}}}',
    ]
    events = []
    for index in range(speller.random.randrange(1, 8)):
        logprobs = choose(["", '"logprobs":{"content":[{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}]},'])
        events.append(f'data: {{"choices":[{{"index":{index % 2},{logprobs}"delta":{choose(deltas)()}}}]}}{end}')
        events.append(choose(["", f": still here{end}", f"event: x\ndata: {{}}{end}", f"id: 7{end}"]))
    counted = f'data: {{"choices":[],"usage":{{"prompt_tokens":1,"completion_tokens":2}}}}{end}' if usage else ""
    return "".join(events) + f'data: {{"choices":[{{"index":0,"delta":{{}},"finish_reason":"stop"}}]}}{end}' + counted


def answered(seed: int, places: list[int], framing: str, *, streams: bool, tells: bool) -> tuple[Scripted, bytes]:
    """An answer, and the body that the client is to get."""
    speller = Speller(seed, lone=True, twice=True)
    kind = speller.random.choice(
        ["sse", "sse", "sse", "zipped"] if streams else ["json", "json", "zipped", "bytes", "untyped", "empty", "nothing"]
    )
    status, content_type, encoding = speller.random.choice([200, 200, 200, 201, 203, 206, 299]), "application/json", ""
    body = wanted = f'{{"choices":[{speller.value()}],"x":{speller.value()},"usage":{{"prompt_tokens":3,"completion_tokens":4}}}}'.encode()
    if streams:
        status, content_type = 200, speller.random.choice(["text/event-stream", "text/event-stream; charset=utf-8"])
        state = speller.random.getstate()
        body = wanted = (stream_of(speller, usage=True) + DONE).encode()
        if not tells and kind == "sse":
            speller.random.setstate(state)
            wanted = (stream_of(speller, usage=False) + DONE).encode()
    if kind == "zipped":
        body = wanted = gzip.compress(body, mtime=0)
        encoding = "gzip"
    elif kind in ("bytes", "untyped"):
        body = wanted = speller.random.randbytes(speller.random.randrange(1, 5000))
        content_type = "audio/mpeg" if kind == "bytes" else ""
    elif kind in ("empty", "nothing"):
        body = wanted = b""
        status = 204 if kind == "nothing" else status
    return Scripted(status, headers_of(speller.random, content_type, encoding), tuple(cut(body, places)), framing), wanted


def taken_apart(answer: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body, its chunks joined."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = [(name.lower(), value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]
    if (b"transfer-encoding", b"chunked") not in headers:
        return int(first.split()[1]), headers, body
    joined, size = b"", -1
    while size:
        length, _, body = body.partition(b"\r\n")
        size = int(length, 16)
        joined, body = joined + body[:size], body[size + 2 :]
    assert body == b"", "nothing follows the last chunk"
    return int(first.split()[1]), headers, joined


def kept(headers: list[tuple[bytes, bytes]], *, streams: bool) -> dict[bytes, bytes]:
    """Those of the answer itself. What stands several times keeps its order, and may be joined on the way, as HTTP allows.

    A stream has no content-length: an event may be taken out of it.
    """
    found: dict[bytes, bytes] = {}
    for name, value in ((name.lower(), value.strip(b" \t")) for name, value in headers):
        if not (OURS.fullmatch(name) or TAKEN.fullmatch(name) or (streams and name == b"content-length")):
            found[name] = b",".join(filter(None, (found.get(name), value)))
    return found


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**64),
    places=st.lists(st.integers(min_value=0), max_size=8),
    framing=st.sampled_from(["length", "chunked", "trailers", "close"]),
    streams=st.booleans(),
    tells=st.booleans(),
)
def test_requests_and_answers_pass_as_they_were_sent_but_for_what_is_named(stack, engine, seed, places, framing, streams, tells):
    body, asked = spelled(seed, streams=streams, tells=tells, same_name=bool(seed % 2))
    engine.script, wanted = answered(seed, places, framing, streams=streams, tells=tells)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key_of('acme')}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    status, headers, got = taken_apart(raw_request(stack.port, head.encode() + body))
    assert engine.got == asked
    assert (status, got) == (engine.script.status, wanted)
    length = [(b"content-length", b"%d" % len(wanted))] if framing == "length" and not engine.script.bodiless else []
    assert kept(headers, streams=streams) == kept([*engine.script.headers, *length], streams=streams)
    ours = sorted(name for name, _ in headers if OURS.fullmatch(name))
    assert [name for name in ours if not name.startswith(b"x-din-stated-")] == sorted(ADDED)
    assert (b"x-din-node-id", b"scripted") in headers
