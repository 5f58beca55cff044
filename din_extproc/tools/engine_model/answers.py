"""The bodies and the events of a generation answer, with vLLM's keys in vLLM's order. Bytes out, no state between calls.

An event is built by joining prepared parts: a token costs one small JSON string, not a document.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import msgspec
from msgspec import Struct

from din_extproc.tools.engine_model.requests import EngineRequest
from din_extproc.tools.engine_model.script import AnswerScript

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class Reporting(Struct, frozen=True):
    """Whether and how usage is reported."""

    factor: float = 1.0
    omit: bool = False
    cached: int | None = None
    """Tokens of the prompt that were cached; None: the engine has no prefix cache."""

    def of(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any] | None:
        """Return the usage object of a streamed answer."""
        if self.omit:
            return None
        prompt, completion = round(prompt_tokens * self.factor), round(completion_tokens * self.factor)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        return usage if self.cached is None else {**usage, "prompt_tokens_details": {"cached_tokens": self.cached}}

    def full(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any] | None:
        """Return the usage object of a complete answer."""
        usage = self.of(prompt_tokens, completion_tokens)
        return usage and {**usage, "prompt_tokens_details": usage.get("prompt_tokens_details"), "completion_tokens_details": None}


class Identity(Struct, frozen=True):
    """The fields that every part of one answer repeats."""

    id: str
    """The id with its prefix: `chatcmpl-...`, `cmpl-...`."""
    created: int
    """Creation time in seconds since the epoch."""
    model: str

    @property
    def fingerprint(self) -> str:
        """The system fingerprint, equal for equal models."""
        return f"vllm-sim-{crc32(self.model.encode()):08x}"


def chat_body(identity: Identity, request: EngineRequest, reporting: Reporting) -> bytes:
    """Return a complete /v1/chat/completions answer."""
    choices = [
        {
            "index": index,
            "message": _make_message(script, identity.id, index, request.reasoning or "reasoning"),
            "logprobs": None if request.logprobs is None else _make_chat_logprobs(script.pieces, request.logprobs),
            "finish_reason": script.finish_reason,
            "stop_reason": script.stop_reason,
            "token_ids": None,
            "routed_experts": None,
        }
        for index, script in enumerate(request.scripts)
    ]
    body = _make_body(identity, "chat.completion", choices, request, reporting)
    tail = ("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics")
    return _encode({**body, **dict.fromkeys(tail)})


def completion_body(identity: Identity, request: EngineRequest, reporting: Reporting) -> bytes:
    """Return a complete /v1/completions answer."""
    choices = [
        {
            "index": index,
            "text": script.text,
            "logprobs": None if request.logprobs is None else _make_text_logprobs(script.pieces, request.logprobs),
            "finish_reason": script.finish_reason,
            "stop_reason": script.stop_reason,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "routed_experts": None,
        }
        for index, script in enumerate(request.scripts)
    ]
    body = _make_body(identity, "text_completion", choices, request, reporting)
    return _encode({**body, **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))})


class EventStream:
    """The events of one streamed answer, chat or completion, in the order vLLM sends them."""

    def __init__(self, identity: Identity, request: EngineRequest, reporting: Reporting, *, chat: bool, repeats: bool = False) -> None:
        """`repeats`: every event names fingerprint and role, as TGI's do; with vLLM the last names the one, the first the other."""
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._identity = identity
        self._request = request
        self._reporting = reporting
        self._chat = chat
        names = {"id": identity.id, "object": kind, "created": identity.created, "model": identity.model}
        self._signed = {"system_fingerprint": identity.fingerprint}
        self._signs_last = not repeats
        if repeats:
            names |= self._signed
        self._head = b"data: " + _encode(names)[:-1] + b',"choices":['
        self._delta = b',"delta":{"role":"assistant",' if repeats else b',"delta":{'
        self._no_delta = self._delta + b'"content":""}' if repeats else b',"delta":{}'
        self._content = self._delta + b'"content":' if chat else b',"text":'
        self._thought = self._delta + b'"%s":' % request.reasoning.encode()
        self._close = b',"token_ids":null}]' if chat else b',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'

    def opening(self) -> bytes:
        """Return the role events of a chat answer; nothing for a completion."""
        if not self._chat:
            return b""
        events: list[bytes] = []
        for index in range(len(self._request.scripts)):
            choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' % index
            usage = self._make_continuous_usage(index, 0)
            events.append(self._head + choice + usage + b',"prompt_token_ids":null,"prompt_text":null}\n\n')
        return b"".join(events)

    def token(self, index: int, position: int, *, finish: str | None = None) -> bytes:
        """Return the event of one token.

        Args:
            index: the choice.
            position: which token of it, from 0.
            finish: ends the choice here, against its script (`abort`).
        """
        script = self._request.scripts[index]
        is_last = finish is not None or position == len(script.pieces) - 1
        if script.tool is not None:
            return self._encode_tool_token(script, index, position, finish if is_last else None)
        piece = script.pieces[position]
        if self._chat:
            key = self._thought if position < script.thoughts else self._content
            delta = key + _encode(piece) + b"}" if piece or not is_last else self._no_delta
        else:
            delta = self._content + _encode(piece)
        logprobs = self._make_logprobs(piece)
        if not is_last:
            ending = b',"logprobs":' + logprobs + b',"finish_reason":null' + self._close
            return self._encode_event(index, delta + ending, position)
        return self._encode_event(
            index, delta + b',"logprobs":' + logprobs + self._encode_ending(finish or script.finish_reason, script), position, last=True
        )

    def closing(self) -> bytes:
        """Return the usage event, if requested, and the end marker."""
        usage = self._reporting.of(self._request.prompt_tokens, sum(len(script.pieces) for script in self._request.scripts))
        if not self._request.include_usage or usage is None:
            return DONE
        tail = {"usage": usage} | (self._signed if self._signs_last else {})
        return self._head + b"]," + _encode(tail)[1:] + b"\n\n" + DONE

    def failed(self, message: str, *, as_text: bool) -> bytes:
        """Return an error inside the stream, and the end marker. `as_text`: as a bare string, as some engines send it."""
        return error_event(message, as_text=as_text) + DONE

    def aborted(self) -> bytes:
        """Return the end marker."""
        return DONE

    def _encode_tool_token(self, script: AnswerScript, index: int, position: int, finish: str | None) -> bytes:
        """Return a tool call's event: the first carries the call, the others its arguments."""
        assert script.tool is not None  # noqa: S101 - checked by the caller
        piece = _encode(script.pieces[position])
        is_last = finish is not None or position == len(script.pieces) - 1
        events = b""
        if position == 0:
            name = _encode(script.tool.name)
            opening = b'"content":null,"tool_calls":[{"id":"%s","type":"function","index":0,"function":{"name":%s}}]}'
            delta = self._delta + opening % (_make_tool_id(self._identity.id, index).encode(), name)
            events = self._encode_event(index, delta + b',"logprobs":null,"finish_reason":null' + self._close, position)
        if is_last:
            ending = b',"logprobs":null' + self._encode_ending(finish or script.finish_reason, script)
            return events + self._encode_event(index, self._no_delta + ending, position, last=True)
        delta = self._delta + b'"tool_calls":[{"index":0,"function":{"arguments":%s}}]}' % piece
        return events + self._encode_event(index, delta + b',"logprobs":null,"finish_reason":null' + self._close, position)

    def _encode_event(self, index: int, rest: bytes, position: int, *, last: bool = False) -> bytes:
        usage = self._make_continuous_usage(index, position + 1)
        signs = last and self._signs_last and not self._request.include_usage
        fingerprint = b"," + _encode(self._signed)[1:-1] if signs else b""
        return b'%s{"index":%d%s%s%s}\n\n' % (self._head, index, rest, usage, fingerprint)

    def _encode_ending(self, reason: str, script: AnswerScript) -> bytes:
        stop = _encode(script.stop_reason)
        tail = b',"token_ids":null}]' if self._chat else b',"prompt_token_ids":null,"token_ids":null}]'
        return b',"finish_reason":"%s","stop_reason":%s%s' % (reason.encode(), stop, tail)

    def _make_continuous_usage(self, index: int, produced: int) -> bytes:
        usage = self._reporting.of(self._request.prompts[index], produced) if self._request.continuous_usage else None
        return b',"usage":' + _encode({**usage, "completion_tokens_details": None}) if usage else b""

    def _make_logprobs(self, piece: str) -> bytes:
        if self._request.logprobs is None:
            return b"null"
        shape = _make_chat_logprobs if self._chat else _make_text_logprobs
        return _encode(shape((piece,), self._request.logprobs))


def error_event(message: str, *, as_text: bool) -> bytes:
    """Return an error event of a stream that has begun with 200: an object as vLLM sends it, or a bare string."""
    if as_text:
        return b'data: {"error": %s}\n\n' % _encode(message)
    return b'data: {"error": {"message": %s, "type": "InternalServerError", "param": null, "code": 500}}\n\n' % _encode(message)


def _make_body(identity: Identity, kind: str, choices: Sequence[Any], request: EngineRequest, reporting: Reporting) -> dict[str, Any]:
    completion_tokens = sum(len(script.pieces) for script in request.scripts)
    return {
        "id": identity.id,
        "object": kind,
        "created": identity.created,
        "model": identity.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": identity.fingerprint,
        "usage": reporting.full(request.prompt_tokens, completion_tokens),
    }


def _make_message(script: AnswerScript, answer_id: str, index: int, reasoning: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": script.text if script.tool is None else None}
    message.update(dict.fromkeys(("refusal", "annotations", "audio", "function_call")))
    if script.tool is not None:
        function = {"name": script.tool.name, "arguments": script.tool.arguments}
        message["tool_calls"] = [{"id": _make_tool_id(answer_id, index), "type": "function", "function": function}]
    message[reasoning] = script.thought or None
    return message


def _make_tool_id(answer_id: str, index: int) -> str:
    return f"chatcmpl-tool-{crc32(answer_id.encode(), index):016x}"


def _make_chat_logprobs(pieces: Sequence[str], alternatives: int) -> Mapping[str, Any]:
    return {
        "content": [{**_make_logprob(piece, 0), "top_logprobs": [_make_logprob(piece, k) for k in range(alternatives)]} for piece in pieces]
    }


def _make_logprob(piece: str, rank: int) -> dict[str, Any]:
    """Return an invented, repeatable log probability; less likely alternatives are the piece with a mark."""
    token = piece + "'" * rank
    raw = token.encode("utf-8", "replace")
    return {"token": token, "logprob": -(0.05 + crc32(raw) % 1000 / 1000 + rank), "bytes": list(raw)}


def _make_text_logprobs(pieces: Sequence[str], alternatives: int) -> Mapping[str, Any]:
    offsets, length = [], 0
    for piece in pieces:
        offsets.append(length)
        length += len(piece)
    ranked = [[_make_logprob(piece, rank) for rank in range(max(1, alternatives))] for piece in pieces]
    return {
        "text_offset": offsets,
        "token_logprobs": [entries[0]["logprob"] for entries in ranked],
        "tokens": list(pieces),
        "top_logprobs": [{entry["token"]: entry["logprob"] for entry in entries} for entries in ranked],
    }
