"""OpenAI's Responses and Anthropic's Messages, as vLLM serves them: the same work as a chat, in other words.

Text only: tools and media are not modelled here.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from din_extproc.tools.engine_model.answers import Identity, Reporting
from din_extproc.tools.engine_model.errors import EngineFailure
from din_extproc.tools.engine_model.fields import decode_body
from din_extproc.tools.engine_model.requests import EngineRequest, Reader

_encode = msgspec.json.encode


def read_response(reader: Reader) -> Callable[[bytes, str], EngineRequest | EngineFailure]:
    """Reads bodies of /v1/responses."""

    def read(body: bytes, content_type: str) -> EngineRequest | EngineFailure:
        given = decode_body(body, content_type)
        if isinstance(given, EngineFailure):
            return given
        given_input = given.get("input")
        items = [{"role": "user", "content": given_input}] if isinstance(given_input, str) else given_input
        instructions = given.get("instructions")
        before = [{"role": "system", "content": instructions}] if instructions else []
        messages = [*before, *items] if isinstance(items, list) else items
        return reader.chat(_convert_to_chat(given, messages, given.get("max_output_tokens")), content_type)

    return read


def read_message(reader: Reader) -> Callable[[bytes, str], EngineRequest | EngineFailure]:
    """Reads bodies of /v1/messages."""

    def read(body: bytes, content_type: str) -> EngineRequest | EngineFailure:
        given = decode_body(body, content_type)
        if isinstance(given, EngineFailure):
            return _reword_failure(given)
        system, messages = given.get("system"), given.get("messages")
        if system and isinstance(messages, list):
            messages = [{"role": "system", "content": system}, *messages]
        found = reader.chat(_convert_to_chat(given, messages, given.get("max_tokens")), content_type)
        return _reword_failure(found) if isinstance(found, EngineFailure) else found

    return read


def response_body(identity: Identity, request: EngineRequest, reporting: Reporting) -> bytes:
    """Return a complete /v1/responses answer."""
    return _encode(_make_response(identity, request, reporting))


def message_body(identity: Identity, request: EngineRequest, reporting: Reporting) -> bytes:
    """Return a complete /v1/messages answer."""
    script = request.scripts[0]
    content = [{"type": "text", "text": script.text}]
    return _encode(
        {**_make_message_head(identity), "content": content, "stop_reason": _stop_reason(request), "usage": _make_usage(request, reporting)}
    )


class ResponseStream:
    """The events of a streamed response."""

    def __init__(self, identity: Identity, request: EngineRequest, reporting: Reporting) -> None:
        self._identity = identity
        self._request = request
        self._reporting = reporting
        self._place = {"item_id": f"msg_{identity.id}", "output_index": 0, "content_index": 0}

    def opening(self) -> bytes:
        """Return the events before the first token."""
        whole = _make_response(self._identity, self._request, self._reporting)
        [message] = whole["output"]
        [part] = message["content"]
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        opened = {"output_index": 0, "item": {**message, "status": "in_progress", "content": []}}
        return b"".join(
            (
                _format_event("response.created", {"response": begun}),
                _format_event("response.output_item.added", opened),
                _format_event("response.content_part.added", {**self._place, "part": {**part, "text": ""}}),
            )
        )

    def token(self, index: int, position: int, *, finish: str | None = None) -> bytes:  # noqa: ARG002 - the end says why
        """Return the events of one token."""
        piece = self._request.scripts[index].pieces[position]
        return _format_event("response.output_text.delta", {**self._place, "delta": piece})

    def closing(self) -> bytes:
        """Return the events after the last token."""
        whole = _make_response(self._identity, self._request, self._reporting)
        [message] = whole["output"]
        [part] = message["content"]
        return b"".join(
            (
                _format_event("response.output_text.done", {**self._place, "text": part["text"]}),
                _format_event("response.content_part.done", {**self._place, "part": part}),
                _format_event("response.output_item.done", {"output_index": 0, "item": message}),
                _format_event(f"response.{whole['status']}", {"response": whole}),
            )
        )

    def failed(self, message: str, *, as_text: bool) -> bytes:  # noqa: ARG002 - it has one way
        """Return an error inside the stream."""
        error = {"code": "server_error", "message": message}
        whole = {**_make_response(self._identity, self._request, self._reporting), "status": "failed", "error": error}
        return _format_event("response.failed", {"response": whole})

    def aborted(self) -> bytes:
        """Return nothing: the stream just ends."""
        return b""


class MessageStream:
    """The events of a streamed message."""

    def __init__(self, identity: Identity, request: EngineRequest, reporting: Reporting) -> None:
        self._identity = identity
        self._request = request
        self._reporting = reporting

    def opening(self) -> bytes:
        """Return the events before the first token."""
        usage = {"input_tokens": (_make_usage(self._request, self._reporting) or {}).get("input_tokens", 0), "output_tokens": 0}
        begun = {**_make_message_head(self._identity), "content": [], "stop_reason": None, "usage": usage}
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return _format_event("message_start", {"message": begun}) + _format_event("content_block_start", block)

    def token(self, index: int, position: int, *, finish: str | None = None) -> bytes:  # noqa: ARG002 - the end says why
        """Return the events of one token."""
        piece = self._request.scripts[index].pieces[position]
        return _format_event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": piece}})

    def closing(self) -> bytes:
        """Return the events after the last token."""
        ended = {
            "delta": {"stop_reason": _stop_reason(self._request), "stop_sequence": None},
            "usage": _make_usage(self._request, self._reporting),
        }
        return _format_event("content_block_stop", {"index": 0}) + _format_event("message_delta", ended) + _format_event("message_stop", {})

    def failed(self, message: str, *, as_text: bool) -> bytes:  # noqa: ARG002 - it has one way
        """Return an error inside the stream."""
        return _format_event("error", {"error": {"type": "api_error", "message": message}})

    def aborted(self) -> bytes:
        """Return nothing: the stream just ends."""
        return b""


def _convert_to_chat(given: dict[str, Any], messages: Any, limit: Any) -> bytes:
    """The same as a chat; a missing field stays missing."""
    kept = {name: given[name] for name in ("model", "temperature", "top_p", "stream") if name in given}
    return _encode({**kept, **({} if messages is None else {"messages": messages}), **({} if limit is None else {"max_tokens": limit})})


def _reword_failure(failure: EngineFailure) -> EngineFailure:
    """An error in Anthropic's shape."""
    decoded = msgspec.json.decode(failure.body)
    error = decoded.get("error") if isinstance(decoded, dict) else None
    message = error.get("message") if isinstance(error, dict) else failure.body.decode(errors="replace")
    kind = "not_found_error" if failure.status == 404 else "invalid_request_error"  # noqa: PLR2004 - HTTP's
    return EngineFailure(failure.status, _encode({"type": "error", "error": {"type": kind, "message": message}}), failure.headers)


def _make_message_head(identity: Identity) -> dict[str, Any]:
    return {"id": identity.id, "type": "message", "role": "assistant", "model": identity.model, "stop_sequence": None}


def _stop_reason(request: EngineRequest) -> str:
    return "max_tokens" if request.scripts[0].finish_reason == "length" else "end_turn"


def _make_usage(request: EngineRequest, reporting: Reporting) -> dict[str, Any] | None:
    usage = reporting.of(request.prompt_tokens, len(request.scripts[0].pieces))
    return usage and {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


def _make_response(identity: Identity, request: EngineRequest, reporting: Reporting) -> dict[str, Any]:
    script, usage = request.scripts[0], _make_usage(request, reporting)
    cut = script.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    text = {"type": "output_text", "text": script.text, "annotations": []}
    message = {"id": f"msg_{identity.id}", "type": "message", "role": "assistant", "status": status, "content": [text]}
    return {
        "id": identity.id,
        "object": "response",
        "created_at": identity.created,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": identity.model,
        "output": [message],
        "usage": usage and {**usage, "total_tokens": usage["input_tokens"] + usage["output_tokens"]},
    }


def _format_event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
