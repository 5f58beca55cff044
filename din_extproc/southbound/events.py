"""OpenAI's answers, written: chunks of a stream and whole bodies, with the same fields in the same order whatever engine they come from.

Rule: an event is joined from prepared parts: a token costs one small JSON string.
"""

import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from din_extproc.domain.request import Operation
from din_extproc.domain.verdict import RefusalCode
from din_extproc.southbound.dialect import AnswerContext

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Chunks:
    """Writes the stream of one answer with one choice.

    Args:
        asked: The request.
        fingerprint: What the engine calls itself.
    """

    __slots__ = ("_chat", "_close", "_opened", "_start", "_text")

    def __init__(self, asked: AnswerContext) -> None:
        self._chat = asked.operation is Operation.CHAT
        names = {
            "id": answer_id(asked),
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": asked.created,
            "model": asked.model,
        }
        self._start = b"data: " + _encode(names)[:-1] + b',"choices":['
        self._text = self._start + (b'{"index":0,"delta":{"content":' if self._chat else b'{"index":0,"text":')
        self._close = b'},"logprobs":' if self._chat else b',"logprobs":'
        self._opened = not self._chat

    def opening(self) -> bytes:
        """The role, once."""
        if self._opened:
            return b""
        self._opened = True
        role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return self._start + role

    def text(self, piece: str, logprobs: Any = None) -> bytes:
        """A piece of the answer's text."""
        if logprobs is None:
            return b'%b%b%bnull,"finish_reason":null}]}\n\n' % (self._text, _encode(piece), self._close)
        return b'%b%b%b%b,"finish_reason":null}]}\n\n' % (self._text, _encode(piece), self._close, _encode(logprobs))

    def delta(self, delta: dict[str, Any]) -> bytes:
        """Anything else that a chat's delta can hold: reasoning, tool calls."""
        return b'%b{"index":0,"delta":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (self._start, _encode(delta))

    def finish(self, reason: str) -> bytes:
        """The last chunk of the choice."""
        body = b'"delta":{}' if self._chat else b'"text":""'
        return b'%b{"index":0,%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (self._start, body, _encode(reason))

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The chunk without choices; whoever did not ask for it does not see it."""
        return b'%b],"usage":%b}\n\n' % (self._start, _encode(usage(prompt_tokens, completion_tokens)))


def answer_id(asked: AnswerContext) -> str:
    """The id of an answer, with OpenAI's prefix of its kind."""
    prefix = {Operation.CHAT: "chatcmpl", Operation.COMPLETIONS: "cmpl", Operation.EMBEDDINGS: "embd", Operation.RERANK: "rerank"}
    return f"{prefix.get(asked.operation, 'din')}-{asked.id}"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Tokens, as every answer tells them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_event(message: str) -> bytes:
    """An error after the answer has begun."""
    code = RefusalCode.UPSTREAM_ERROR
    return b"data: %b\n\n" % _encode({"error": {"message": message, "type": code.type, "param": None, "code": code.code}})


def generated(asked: AnswerContext, choice: dict[str, Any], tokens: dict[str, int] | None) -> bytes:
    """A whole chat or text completion of one choice. `tokens`: None when the engine did not tell."""
    kind = "chat.completion" if asked.operation is Operation.CHAT else "text_completion"
    body = {"id": answer_id(asked), "object": kind, "created": asked.created, "model": asked.model, "choices": [{"index": 0, **choice}]}
    return _encode(body if tokens is None else {**body, "usage": tokens})


def embeddings(asked: AnswerContext, vectors: Sequence[Sequence[float]], prompt_tokens: int | None) -> bytes | None:
    """Embeddings, as numbers or as base64 of 32-bit floats; None: there are numbers that these don't hold."""
    packed = asked.fields.get("encoding_format") == "base64"
    try:
        shown = [_packed(vector) if packed else vector for vector in vectors]
    except OverflowError:
        return None
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)]
    body: dict[str, Any] = {"object": "list", "data": data, "model": asked.model}
    if prompt_tokens is not None:
        body["usage"] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _encode(body)


def ranking(asked: AnswerContext, scores: Sequence[float], prompt_tokens: int | None) -> bytes:
    """Documents by relevance, best first, as Jina and Cohere write them."""
    documents = asked.fields.get("documents") or ()
    shown = asked.fields.get("return_documents") is not False
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]
    for result in results:
        if shown and result["index"] < len(documents):
            document = documents[result["index"]]
            result["document"] = document if isinstance(document, dict) else {"text": document}
    results.sort(key=_least_relevant_last)
    top = asked.fields.get("top_n")
    body: dict[str, Any] = {"id": answer_id(asked), "model": asked.model, "results": results[: top if isinstance(top, int) else None]}
    if prompt_tokens is not None:
        body["usage"] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _encode(body)


def _least_relevant_last(result: dict[str, Any]) -> float:
    return -float(result["relevance_score"])


def _packed(vector: Sequence[float]) -> str:
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
