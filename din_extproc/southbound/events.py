"""Encodes OpenAI's answers: chunks of a stream and whole bodies, with the same fields in the same order for every engine.

An event is joined from prepared parts, so a token costs one small JSON string.
"""

import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from din_extproc.domain.request import Operation
from din_extproc.domain.verdict import RefusalCode
from din_extproc.southbound.dialect import AnswerContext

DONE = b"data: [DONE]\n\n"
_PREFIXES = {
    Operation.CHAT: "chatcmpl",
    Operation.COMPLETIONS: "cmpl",
    Operation.EMBEDDINGS: "embd",
    Operation.RERANK: "rerank",
    Operation.MESSAGES: "msg",
}
_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Encodes the stream of an answer with one choice.

    Args:
        context: The request.
    """

    __slots__ = ("_chat", "_close", "_opened", "_start", "_text")

    def __init__(self, context: AnswerContext) -> None:
        self._chat = context.operation is Operation.CHAT
        names = {
            "id": answer_id(context),
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": context.created,
            "model": context.model,
        }
        self._start = b"data: " + _encode(names)[:-1] + b',"choices":['
        self._text = self._start + (b'{"index":0,"delta":{"content":' if self._chat else b'{"index":0,"text":')
        self._close = b'},"logprobs":' if self._chat else b',"logprobs":'
        self._opened = not self._chat

    def open(self) -> bytes:
        """Return the chunk with the role, once."""
        if self._opened:
            return b""
        self._opened = True
        role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return self._start + role

    def text(self, piece: str, logprobs: Any = None) -> bytes:
        """Return a chunk with a piece of text."""
        if logprobs is None:
            return b'%b%b%bnull,"finish_reason":null}]}\n\n' % (self._text, _encode(piece), self._close)
        return b'%b%b%b%b,"finish_reason":null}]}\n\n' % (self._text, _encode(piece), self._close, _encode(logprobs))

    def delta(self, delta: dict[str, Any]) -> bytes:
        """Return a chunk with another delta of a chat: reasoning or tool calls."""
        return b'%b{"index":0,"delta":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (self._start, _encode(delta))

    def finish(self, reason: str) -> bytes:
        """Return the last chunk of the choice."""
        body = b'"delta":{}' if self._chat else b'"text":""'
        return b'%b{"index":0,%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (self._start, body, _encode(reason))

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """Return the usage chunk without choices; it is removed again unless the client requested it."""
        return self.usage_of(usage_object(prompt_tokens, completion_tokens))

    def usage_of(self, usage: Mapping[str, Any]) -> bytes:
        """Return the usage chunk of a complete `usage` object."""
        return b'%b],"usage":%b}\n\n' % (self._start, _encode(usage))


def answer_id(context: AnswerContext) -> str:
    """Return the id of an answer with the prefix for its kind."""
    return f"{_PREFIXES.get(context.operation, 'din')}-{context.id}"


def usage_object(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return OpenAI's `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_event(message: str) -> bytes:
    """Return the event for an error after the stream has started."""
    code = RefusalCode.UPSTREAM_ERROR
    return b"data: %b\n\n" % _encode({"error": {"message": message, "type": code.type, "param": None, "code": code.code}})


def messages_event(kind: str, **fields: Any) -> bytes:
    """Return an event of Anthropic's streams."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def messages_failure(message: str) -> bytes:
    """Return the event for an error after a stream of Anthropic's has started."""
    return messages_event("error", error={"type": "api_error", "message": message})


def encode_completion(context: AnswerContext, choice: dict[str, Any], tokens: Mapping[str, Any] | None) -> bytes:
    """Encode a complete chat or text completion with one choice. `tokens`: None if the engine reported no usage."""
    kind = "chat.completion" if context.operation is Operation.CHAT else "text_completion"
    body = {
        "id": answer_id(context),
        "object": kind,
        "created": context.created,
        "model": context.model,
        "choices": [{"index": 0, **choice}],
    }
    return _encode(body if tokens is None else {**body, "usage": tokens})


def encode_embeddings(context: AnswerContext, vectors: Sequence[Sequence[float]], prompt_tokens: int | None) -> bytes | None:
    """Encode embeddings as numbers or as base64 of 32-bit floats; None: a number exceeds the range of the format."""
    packed = context.fields.get("encoding_format") == "base64"
    try:
        encoded = [_pack_base64(vector) if packed else vector for vector in vectors]
    except OverflowError:
        return None
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(encoded)]
    body: dict[str, Any] = {"object": "list", "data": data, "model": context.model}
    if prompt_tokens is not None:
        body["usage"] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _encode(body)


def encode_ranking(context: AnswerContext, scores: Sequence[float], prompt_tokens: int | None) -> bytes:
    """Encode documents by relevance, best first, in Jina's and Cohere's format."""
    documents = context.fields.get("documents") or ()
    with_documents = context.fields.get("return_documents") is not False
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]
    for result in results:
        if with_documents and result["index"] < len(documents):
            document = documents[result["index"]]
            result["document"] = document if isinstance(document, dict) else {"text": document}
    results.sort(key=_by_relevance)
    top = context.fields.get("top_n")
    body: dict[str, Any] = {"id": answer_id(context), "model": context.model, "results": results[: top if isinstance(top, int) else None]}
    if prompt_tokens is not None:
        body["usage"] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _encode(body)


def _by_relevance(result: dict[str, Any]) -> float:
    return -float(result["relevance_score"])


def _pack_base64(vector: Sequence[float]) -> str:
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
