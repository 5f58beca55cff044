"""A node that costs as little as Python allows: fixed answers in the shape of vLLM's, at once or as a stream of paced events.

Rule: it never looks into a body. `accept: text/event-stream` gets a stream of `CHUNKS` events (as Ollama's lines at `/api/chat`),
everything else one JSON answer.
Run: python -m tests.bench.upstream PORT PORT [CERTIFICATE], with TLS when a PEM file with key and certificate is given.
"""

import asyncio
import ssl
import sys
from collections import deque

import uvloop

from tests.bench.harness import pin_self

CHUNKS = 100
"""Events of one stream, besides the one with the usage and `[DONE]`."""
PACE_S = 0.01
"""Between two events of one stream."""
_GROUPS = 10
"""Streams take turns within one pace, so that events do not come all at once."""

_BODY = (
    b'{"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion","created":1760000000,"model":"physical","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"' + b"The quick brown fox jumps over the lazy dog. " * 6 + b'","refusal":null,'
    b'"annotations":null,"audio":null,"function_call":null,"tool_calls":[],"reasoning_content":null},"logprobs":null,"finish_reason":'
    b'"stop","stop_reason":null,"token_ids":null}],"service_tier":null,"system_fingerprint":null,"usage":{"prompt_tokens":300,'
    b'"total_tokens":364,"completion_tokens":64,"prompt_tokens_details":null},"prompt_logprobs":null,"kv_transfer_params":null}'
)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1760000000,"model":"physical",'
    b'"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s,"token_ids":null}]}\n\n'
)
_USAGE = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1760000000,"model":"physical",'
    b'"choices":[],"usage":{"prompt_tokens":300,"total_tokens":400,"completion_tokens":100}}\n\n'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_TOKEN = _chunk(_EVENT % (b'{"content":" fox"}', b"null"))
_END = _chunk(_EVENT % (b'{"content":""}', b'"stop"')) + _chunk(_USAGE) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


_LINES_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
_LINE = b'{"model":"physical","created_at":"2026-01-01T00:00:00.000000Z","message":{"role":"assistant","content":"%s"},%s}\n'
_LINE_TOKEN = _chunk(_LINE % (b" fox", b'"done":false'))
_LINE_END = _chunk(_LINE % (b"", b'"done":true,"done_reason":"stop","prompt_eval_count":300,"eval_count":100')) + b"0\r\n\r\n"
_WIRES = {False: (_STREAM_HEAD, _TOKEN, _END), True: (_LINES_HEAD, _LINE_TOKEN, _LINE_END)}
"""Head, event and end of a stream: OpenAI's, and Ollama's."""


class _Pace:
    """Writes one event to each open stream every `PACE_S`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._groups: list[deque[_Node]] = [deque() for _ in range(_GROUPS)]
        self._turn = 0
        self._running = False

    def join(self, node: "_Node") -> None:
        min(self._groups, key=len).append(node)
        if not self._running:
            self._running = True
            self._loop.call_later(PACE_S / _GROUPS, self._step, self._loop.time())

    def _step(self, due: float) -> None:
        group = self._groups[self._turn]
        self._turn = (self._turn + 1) % _GROUPS
        for _ in range(len(group)):
            node = group.popleft()
            if node.event():
                group.append(node)
        self._running = any(self._groups)
        if self._running:
            due += PACE_S / _GROUPS
            self._loop.call_later(max(0.0, due - self._loop.time()), self._step, due)


class _Node(asyncio.Protocol):
    """One connection: one request after the other."""

    def __init__(self, pace: _Pace) -> None:
        self._pace = pace
        self._head = b""
        self._missing = 0
        self._left = 0
        self._streams = False
        self._wire = _WIRES[False]

    def connection_made(self, transport):
        self._transport = transport

    def connection_lost(self, exc):
        self._left = 0

    def data_received(self, data):
        if self._missing:
            self._missing -= len(data)
        else:
            data = self._head + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return
            self._head = b""
            lower = data[:end].lower()
            self._streams = b"text/event-stream" in lower
            self._wire = _WIRES[lower.startswith(b"post /api/chat ")]
            at = lower.find(b"\r\ncontent-length:")
            length = int(lower[at + 17 :].partition(b"\r")[0]) if at >= 0 else 0
            self._missing = length - (len(data) - end - 4)
        if self._missing <= 0:
            self._missing = 0
            self._answer()

    def _answer(self) -> None:
        if not self._streams:
            self._transport.write(ANSWER)
            return
        self._transport.write(self._wire[0])
        self._left = CHUNKS
        self._pace.join(self)

    def event(self) -> bool:
        """Write the next event. False: there is none any more."""
        if not self._left:
            return False
        self._left -= 1
        _, token, end = self._wire
        self._transport.write(token if self._left else token + end)
        return self._left > 0


async def _serve(ports: list[int], tls: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    pace = _Pace(loop)
    for port in ports:
        await loop.create_server(lambda: _Node(pace), "127.0.0.1", port, backlog=1024, ssl=tls)
    print("LISTENING", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    pin_self("load")
    context = None
    if not sys.argv[-1].isdigit():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(sys.argv.pop())
    uvloop.run(_serve([int(port) for port in sys.argv[1:]], context))
