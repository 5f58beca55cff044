"""The question of one token that tells whether an engine generates, and how soon: an open port and a good health page do not.

Rule: what a node says to a question that it can't understand (4xx) or has no room for (429) speaks neither for nor against it.
"""

from collections.abc import Callable
from http import HTTPStatus

import aiohttp
import msgspec
from msgspec import Struct

from din_extproc.domain.health import ProbeKind, ProbeResult
from din_extproc.domain.node import Node, Pool
from din_extproc.domain.request import Operation

_PATHS = {
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


class ProbeTarget(Struct, frozen=True):
    """A node and what to ask it for."""

    node_id: str
    url: str
    kind: ProbeKind
    model: str
    """The name that the engine answers to."""

    @classmethod
    def of(cls, node: Node, pool: Pool) -> "ProbeTarget":
        """What the pool's requests are like; every operation allowed: a chat."""
        served = pool.operations
        kind = ProbeKind.CHAT if served is None else next((kind for kind, path in _PATHS.items() if path in served), ProbeKind.CHAT)
        return cls(node.id, f"http://{node.endpoint}{_PATHS[kind].value}", kind, pool.served_model)


class MicroProbe:
    """Asks.

    Args:
        session: Carries the questions.
        timeout_s: A first token that comes later is none, and neither is an end.
        clock: Seconds that only grow.
        trace_id: Makes an id for each question; a node's own Envoy wants one.
    """

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float, clock: Callable[[], float], trace_id: Callable[[], str]) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s
        self._clock = clock
        self._trace_id = trace_id

    async def ask(self, target: ProbeTarget) -> ProbeResult:
        """One question, and what came of it. Never raises for what a node does."""
        body = msgspec.json.encode({"model": target.model, **_BODIES[target.kind]})
        headers = {"content-type": "application/json", "x-din-trace-id": self._trace_id()}
        began = self._clock()
        try:
            async with self._session.post(target.url, data=body, headers=headers, timeout=self._timeout, allow_redirects=False) as reply:
                return await self._read(target, reply, began)
        except TimeoutError:
            return ProbeResult(target.node_id, ok=False, reason=f"no token within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return ProbeResult(target.node_id, ok=False, reason=str(error) or type(error).__name__)

    async def _read(self, target: ProbeTarget, reply: aiohttp.ClientResponse, began: float) -> ProbeResult:
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return ProbeResult(target.node_id, ok=False, reason=f"status {reply.status}")
        if reply.status != HTTPStatus.OK:
            return ProbeResult(target.node_id, ok=None, reason=f"status {reply.status}: it can't be asked like that")
        first: float | None = None
        text = bytearray()
        async for chunk in reply.content.iter_any():
            if first is None and (target.kind not in _STREAMED or b"data:" in chunk):
                first = self._clock()
            text += chunk
            if len(text) > _MOST_BYTES:
                break
        if first is None:
            return ProbeResult(target.node_id, ok=False, reason="an empty answer")
        if b'"error":{' in text or b'"error": {' in text:
            return ProbeResult(target.node_id, ok=False, reason="an error inside the answer")
        ended = first if target.kind in _STREAMED else self._clock()
        return ProbeResult(target.node_id, ok=True, ttft_ms=round((ended - began) * 1000, 1))
