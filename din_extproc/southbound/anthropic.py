"""Anthropic's Messages API for chats; clients of `/v1/messages` pass through to it.

| OpenAI | Anthropic |
|---|---|
| `max_completion_tokens`, before it `max_tokens` | `max_tokens`; 4096 when neither is given, because it is mandatory |
| `temperature` up to 1, `top_p`, `top_k` | same names |
| `stop` | `stop_sequences`, always a list |
| `system` and `developer` messages | `system`, joined by line feeds in their order |
| `tools`, `tool_calls`, `tool` messages | `tools`, `tool_use` and `tool_result` blocks |
| `tool_choice`: `auto`, `required`, `none`, a function | `auto`, `any`, `none`, `tool` |
| `parallel_tool_calls: false` | `tool_choice.disable_parallel_tool_use` |
| `image_url`: URL or `data:` | `image` blocks: `url` or `base64` |
| `user` | `metadata.user_id` |
| `n` > 1, `seed`, `logprobs`, `logit_bias`, penalties, `response_format`, `reasoning_effort`, ... | unmappable |

`prompt_tokens` are Anthropic's input tokens with those read from and written to its cache; `cached_tokens` are those read.

Written by its documentation; not checked against Anthropic's servers.
"""

import re
from typing import Any

import msgspec
from msgspec import Struct

from din_extproc.domain.request import Operation
from din_extproc.domain.response import ResponseHead
from din_extproc.domain.verdict import Refusal
from din_extproc.southbound import events
from din_extproc.southbound.dialect import AnswerContext, Dialect, DialectRequest, PlainRequest, refuse_unsupported
from din_extproc.southbound.events import DONE
from din_extproc.southbound.framing import EventSplitter
from din_extproc.southbound.parameters import Table, map_parameters
from din_extproc.southbound.translator import ChunkTranslator

_encode = msgspec.json.Encoder().encode
_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode
_data_url = re.compile(r"data:(image/[\w.+-]+);base64,([A-Za-z0-9+/=]+)").fullmatch
_PATH = "/v1/messages"
_DEFAULT_OUTPUT = 4096
_TAKEN = frozenset({"model", "messages", "stream", "tools"})
_REASONS = {"max_tokens": "length", "model_context_window_exceeded": "length", "tool_use": "tool_calls", "refusal": "content_filter"}
_CHOICES = {"auto": "auto", "required": "any", "none": "none"}
_NO_PARAMETERS = {"type": "object", "properties": {}}
_CONTENT = "The engine that serves this model takes text, and images as URLs or base64 `data:` URLs."


class _AnthropicUsage(Struct, frozen=True):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _ContentBlock(Struct, frozen=True):
    """A content block, or a change of one."""

    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    stop_reason: str | None = None
    """Of a change of the message."""


class _AnthropicMessage(Struct, frozen=True):
    type: str = ""
    content: list[_ContentBlock] = []
    stop_reason: str | None = None
    usage: _AnthropicUsage = _AnthropicUsage()


class _Failure(Struct, frozen=True):
    message: str = ""


class _Event(Struct, frozen=True):
    """One event of a stream."""

    type: str
    message: _AnthropicMessage = _AnthropicMessage()
    content_block: _ContentBlock = _ContentBlock()
    delta: _ContentBlock = _ContentBlock()
    usage: _AnthropicUsage = _AnthropicUsage()
    error: _Failure = _Failure()


_decode_message = msgspec.json.Decoder(_AnthropicMessage).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def _stop(value: Any) -> tuple[str, Any] | None:
    listed = [value] if isinstance(value, str) else value
    return ("stop_sequences", listed or None) if isinstance(listed, list) else None


def _temperature(value: Any) -> tuple[str, Any] | None:
    """Refuse what Anthropic refuses: its scale ends at 1."""
    return None if isinstance(value, (int, float)) and value > 1 else ("temperature", value)


def _positive(value: Any) -> tuple[str, Any] | None:
    return ("top_k", None) if value in (-1, 0) else ("top_k", value)


def _choice(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, str):
        return ("tool_choice", {"type": _CHOICES[value]}) if value in _CHOICES else None
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return ("tool_choice", {"type": "tool", "name": name}) if isinstance(name, str) else None


TABLE: Table = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": _temperature,
    "top_p": "top_p",
    "top_k": _positive,
    "stop": _stop,
    "tool_choice": _choice,
    "parallel_tool_calls": lambda value: ("parallel", value) if isinstance(value, bool) else None,
}


def _order(request: PlainRequest) -> DialectRequest | Refusal:
    mapped = map_parameters(request.fields, TABLE, _TAKEN, drop=request.drop)
    if isinstance(mapped, Refusal):
        return mapped
    conversation = _conversation(request.fields.get("messages"))
    if isinstance(conversation, Refusal):
        return conversation
    tools = _tools(request.fields.get("tools") or [])
    if isinstance(tools, Refusal):
        return tools
    values = {name: value for name, value in mapped.values.items() if value is not None}
    parallel, choice = values.pop("parallel", True), values.pop("tool_choice", None)
    body: dict[str, Any] = {"model": request.model, "max_tokens": _DEFAULT_OUTPUT, **conversation, **values}
    if request.stream:
        body["stream"] = True
    if tools:
        body["tools"] = tools
        choice = choice or {"type": "auto"}
        forbids = not parallel and choice["type"] != "none"
        body["tool_choice"] = {**choice, "disable_parallel_tool_use": True} if forbids else choice
    user = request.fields.get("user")
    if user and isinstance(user, str):
        body["metadata"] = {"user_id": user}
    return DialectRequest(_PATH, _encode(body), mapped.dropped)


def _tools(given: Any) -> list[dict[str, Any]] | Refusal:
    made = []
    for tool in given if isinstance(given, list) else [given]:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            return refuse_unsupported("The engine that serves this model takes tools of type `function`.", "tools")
        converted = {"name": function.get("name"), "input_schema": function.get("parameters") or _NO_PARAMETERS}
        converted |= {name: function[name] for name in ("description", "strict") if function.get(name)}
        made.append(converted)
    return made


def _conversation(given: Any) -> dict[str, Any] | Refusal:
    """Return `system` and `messages`: turns alternate, so what one role says in a row is one message."""
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for message in given if isinstance(given, list) else [given]:
        if not isinstance(message, dict):
            return refuse_unsupported("A message is an object.", "messages")
        role = message.get("role")
        blocks = _content(message.get("content"))
        if isinstance(blocks, Refusal):
            return blocks
        if role in ("system", "developer"):
            if any(block["type"] != "text" for block in blocks):
                return refuse_unsupported("System messages hold text only.", "messages")
            system += [block["text"] for block in blocks]
            continue
        if role == "tool":
            result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id") or ""}
            blocks, role = [{**result, "content": blocks} if blocks else result], "user"
        for call in message.get("tool_calls") or ():
            converted = _convert_call(call)
            if converted is None:
                return refuse_unsupported("A tool call is a function whose arguments are a JSON object.", "messages")
            blocks.append(converted)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return {"system": "\n".join(system), "messages": turns} if system else {"messages": turns}


def _content(content: Any) -> list[dict[str, Any]] | Refusal:
    """Return the blocks of a message; Anthropic refuses empty texts, so they are left out."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    blocks: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if isinstance(text, str):
            blocks += [{"type": "text", "text": text}] if text else []
            continue
        source = _source(part.get("image_url")) if kind == "image_url" else None
        if source is None:
            return refuse_unsupported(_CONTENT, "messages")
        blocks.append({"type": "image", "source": source})
    return blocks


def _source(image: Any) -> dict[str, Any] | None:
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str):
        return None
    if found := _data_url(url):
        return {"type": "base64", "media_type": found[1], "data": found[2]}
    return {"type": "url", "url": url} if url.startswith(("https://", "http://")) else None


def _convert_call(call: Any) -> dict[str, Any] | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    try:
        arguments = _decode_arguments(function.get("arguments") or "{}")
    except (msgspec.DecodeError, TypeError):
        return None
    return {"type": "tool_use", "id": call.get("id") or "", "name": function.get("name"), "input": arguments}


def _whole(context: AnswerContext, _head: ResponseHead, body: bytes) -> bytes | None:
    try:
        answer = _decode_message(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if answer.type != "message":
        return None
    texts = [block.text for block in answer.content if block.type == "text"]
    calls = [_openai_call(block) for block in answer.content if block.type == "tool_use"]
    fields: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None, "refusal": None}
    if thoughts := "".join(block.thinking for block in answer.content):
        fields["reasoning_content"] = thoughts
    if calls:
        fields["tool_calls"] = calls
    choice = {"message": fields, "logprobs": None, "finish_reason": _REASONS.get(answer.stop_reason or "", "stop")}
    return events.encode_completion(context, choice, _usage(answer.usage))


def _openai_call(block: _ContentBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": _encode(block.input or {}).decode()}}


def _usage(counts: _AnthropicUsage) -> dict[str, Any] | None:
    if counts.input_tokens is None and counts.output_tokens is None:
        return None
    cached = counts.cache_read_input_tokens
    prompt_tokens = (counts.input_tokens or 0) + (cached or 0) + (counts.cache_creation_input_tokens or 0)
    made: dict[str, Any] = events.usage_object(prompt_tokens, counts.output_tokens or 0)
    return made if cached is None else {**made, "prompt_tokens_details": {"cached_tokens": cached}}


def _later(before: _AnthropicUsage, now: _AnthropicUsage) -> _AnthropicUsage:
    """Return the counts of a stream so far: each is a total, and one that is not repeated stays."""
    reported = {name: value for name, value in msgspec.structs.asdict(now).items() if value is not None}
    return msgspec.structs.replace(before, **reported)


class AnthropicTranslator(ChunkTranslator[_Event]):
    """Translates Anthropic's events to OpenAI's."""

    __slots__ = ("_calls", "_needs_arguments", "_reason", "_usage")

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context, EventSplitter(), _decode_event)
        self._usage = _AnthropicUsage()
        self._calls = 0
        self._needs_arguments = False
        self._reason = ""

    def _translate(self, event: _Event) -> bytes:
        match event.type:
            case "content_block_delta":
                return self._delta(event.delta)
            case "content_block_start":
                return self._start(event.content_block)
            case "content_block_stop":
                return self._arguments("{}") if self._needs_arguments else b""
            case "message_start":
                self._usage = _later(self._usage, event.message.usage)
                return self._chunks.open()
            case "message_delta":
                self._usage = _later(self._usage, event.usage)
                self._reason = event.delta.stop_reason or self._reason
                return b""
            case "message_stop":
                return self._finish()
            case "error":
                return self._end_with_error(event.error.message or None)
        return b""

    def _start(self, block: _ContentBlock) -> bytes:
        if block.type != "tool_use":
            return self._delta(block)
        self._calls += 1
        self._needs_arguments = True
        function = {"name": block.name, "arguments": ""}
        call = {"index": self._calls - 1, "id": block.id, "type": "function", "function": function}
        start = self._chunks.delta({"tool_calls": [call]})
        return start + self._arguments(_encode(block.input).decode()) if block.input else start

    def _delta(self, change: _ContentBlock) -> bytes:
        if change.text:
            return self._chunks.text(change.text)
        if change.thinking:
            return self._chunks.delta({"reasoning_content": change.thinking})
        return self._arguments(change.partial_json) if change.partial_json and self._calls else b""

    def _arguments(self, piece: str) -> bytes:
        self._needs_arguments = False
        return self._chunks.delta({"tool_calls": [{"index": self._calls - 1, "function": {"arguments": piece}}]})

    def _finish(self) -> bytes:
        self._over = True
        usage = _usage(self._usage)
        return self._chunks.finish(_REASONS.get(self._reason, "stop")) + (self._chunks.usage_of(usage) if usage else b"") + DONE


ANTHROPIC = Dialect(
    operations=frozenset({Operation.CHAT}),
    build_request=_order,
    translate_answer=_whole,
    create_translator=AnthropicTranslator,
    has_path=lambda _path: False,
    openai_operations=frozenset({Operation.MESSAGES, Operation.COUNT_TOKENS}),
)
