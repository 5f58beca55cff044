"""Probe of a node by a one-token request, which shows whether the engine generates and its time to first token.

Invariant: rejections as malformed (4xx) or overloaded (429) count neither as success nor as failure.
"""

from collections.abc import Callable
from http import HTTPStatus

import aiohttp
import msgspec
from msgspec import Struct

from din_extproc.domain.health import ProbeKind, ProbeResult
from din_extproc.domain.node import Node, Pool
from din_extproc.domain.request import Operation
from din_extproc.southbound.dialect import DialectRequest, PlainRequest
from din_extproc.southbound.engines import find_engine

_OPERATIONS = {
    ProbeKind.CHAT: Operation.CHAT,
    ProbeKind.COMPLETION: Operation.COMPLETIONS,
    ProbeKind.EMBEDDING: Operation.EMBEDDINGS,
    ProbeKind.RERANK: Operation.RERANK,
}
_WORD = "ok"
_BODIES: dict[ProbeKind, dict[str, object]] = {
    ProbeKind.CHAT: {"messages": [{"role": "user", "content": _WORD}], "max_tokens": 1, "stream": True},
    ProbeKind.COMPLETION: {"prompt": _WORD, "max_tokens": 1, "stream": True},
    ProbeKind.EMBEDDING: {"input": _WORD},
    ProbeKind.RERANK: {"query": _WORD, "documents": [_WORD]},
}
_STREAMED = frozenset({ProbeKind.CHAT, ProbeKind.COMPLETION})
_MOST_BYTES = 1 << 20


_NODES_FAULT = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})
"""Statuses that count as failures: the gateway chose the credentials and the model's name."""


class ProbeTarget(Struct, frozen=True):
    """A node and its probe request."""

    node_id: str
    url: str
    kind: ProbeKind
    body: bytes
    native: bool = False
    """The request uses the engine's native API."""

    @classmethod
    def of(cls, node: Node, pool: Pool) -> "ProbeTarget":
        """Choose the first operation of the pool in the API of its requests; a chat if all are allowed."""
        kind = next((kind for kind, operation in _OPERATIONS.items() if pool.serves(operation)), ProbeKind.CHAT)
        operation, body = _OPERATIONS[kind], {"model": pool.served_model, **_BODIES[kind]}
        native = find_engine(pool.engine).native if pool.api == "native" else None
        if native is not None and operation in native.operations:
            wanted = PlainRequest(operation=operation, fields=body, model=pool.served_model, stream=kind in _STREAMED, drop=True)
            translated = native.build_request(wanted)
            if isinstance(translated, DialectRequest):
                return cls(node.id, f"http://{node.endpoint}{translated.path}", kind, translated.body, native=True)
        return cls(node.id, f"http://{node.endpoint}{operation.value}", kind, msgspec.json.encode(body))


class MicroProbe:
    """Sends probe requests.

    Args:
        session: HTTP session.
        timeout_s: Time-out for the first token and for the response.
        clock: Monotonic clock in seconds.
        trace_id: Creates an id per request; a node's own Envoy requires one.
    """

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float, clock: Callable[[], float], trace_id: Callable[[], str]) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s
        self._clock = clock
        self._trace_id = trace_id

    async def probe(self, target: ProbeTarget) -> ProbeResult:
        """Send one probe and return its result. Failures of the node raise nothing."""
        headers = {"content-type": "application/json", "x-din-trace-id": self._trace_id()}
        began = self._clock()
        try:
            async with self._session.post(
                target.url, data=target.body, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as reply:
                return await self._read_reply(target, reply, began)
        except TimeoutError:
            return ProbeResult(target.node_id, ok=False, reason=f"no token within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return ProbeResult(target.node_id, ok=False, reason=str(error) or type(error).__name__)

    async def _read_reply(self, target: ProbeTarget, reply: aiohttp.ClientResponse, began: float) -> ProbeResult:
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR or reply.status in _NODES_FAULT:
            return ProbeResult(target.node_id, ok=False, reason=f"status {reply.status}")
        if reply.status != HTTPStatus.OK:
            return ProbeResult(target.node_id, ok=None, reason=f"status {reply.status}: it can't be asked like that")
        first: float | None = None
        text = bytearray()
        async for chunk in reply.content.iter_any():
            if first is None and (target.native or target.kind not in _STREAMED or b"data:" in chunk):
                first = self._clock()
            text += chunk
            if len(text) > _MOST_BYTES:
                break
        if first is None:
            return ProbeResult(target.node_id, ok=False, reason="an empty answer")
        if b'"error":{' in text or b'"error": {' in text or (target.native and b'"error":"' in text):
            return ProbeResult(target.node_id, ok=False, reason="an error inside the answer")
        ended = first if target.kind in _STREAMED else self._clock()
        return ProbeResult(target.node_id, ok=True, ttft_ms=round((ended - began) * 1000, 1))
