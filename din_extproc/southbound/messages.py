"""Anthropic's Messages API in front of an engine that speaks OpenAI's chat completions only.

| Messages | OpenAI |
|---|---|
| `max_tokens` | `max_completion_tokens`, or what the engine calls it |
| `temperature`, `top_p`, `top_k` | same names, where the engine has them |
| `stop_sequences` | `stop` |
| `system`: text or text blocks | `system` message |
| `tools`; `tool_use` and `tool_result` blocks | `tools`, `tool_calls`, `tool` messages |
| `tool_choice`: `auto`, `any`, `none`, `tool` | `auto`, `required`, `none`, a function |
| `tool_choice.disable_parallel_tool_use` | `parallel_tool_calls: false` |
| `image` blocks: `url` or `base64` | `image_url` |
| `metadata.user_id` | `user` |
| `cache_control`, `is_error`, blocks of earlier thinking | left out: no answer depends on their form |
| `thinking`, tools that Anthropic's servers run, documents, ... | unmappable |

`input_tokens` are OpenAI's prompt tokens without `cached_tokens`, which are `cache_read_input_tokens`. OpenAI's interface does not tell
which stop sequence ended an answer: that is `end_turn`.
"""

from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from din_extproc.domain.request import Operation
from din_extproc.domain.response import ResponseHead
from din_extproc.domain.verdict import Refusal
from din_extproc.southbound.dialect import AnswerContext, Dialect, DialectRequest, PlainRequest, refuse_unsupported
from din_extproc.southbound.events import answer_id, messages_event, messages_failure
from din_extproc.southbound.framing import EventSplitter
from din_extproc.southbound.parameters import Table, map_parameters, rename_parameters
from din_extproc.southbound.translator import StreamTranslator

_encode = msgspec.json.Encoder().encode
_TAKEN = frozenset({"model", "messages", "system", "stream", "tools"})
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use", "content_filter": "refusal"}
_CONTENT = "The engine that serves this model takes text, images, tool calls and their results."
_FORGOTTEN = frozenset({"thinking", "redacted_thinking"})
"""Blocks of earlier answers that have no place in OpenAI's interface."""


class _CachedTokens(Struct, frozen=True):
    cached_tokens: int | None = None


class _ChatUsage(Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None

    def in_messages(self) -> dict[str, int]:
        """Return Anthropic's `usage` object."""
        cached = (self.prompt_tokens_details or _CachedTokens()).cached_tokens or 0
        return {
            "input_tokens": max(0, self.prompt_tokens - cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.completion_tokens,
        }


class _CalledFunction(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: _CalledFunction = _CalledFunction()


class _ChatOutput(Struct, frozen=True):
    """A message, or a change of one."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _ChatChoice(Struct, frozen=True):
    message: _ChatOutput = _ChatOutput()
    delta: _ChatOutput = _ChatOutput()
    finish_reason: str | None = None


class _Chat(Struct, frozen=True):
    """A completion, or one chunk of its stream."""

    choices: list[_ChatChoice] = []
    usage: _ChatUsage | None = None
    error: Any = None


_DONE = _Chat()
_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode
_decode_chat = msgspec.json.Decoder(_Chat).decode


def _decode_event(data: bytes) -> _Chat:
    return _DONE if data == b"[DONE]" else _decode_chat(data)


def _choice(value: Any) -> tuple[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "tool" and isinstance(value.get("name"), str):
        return "tool_choice", {"type": "function", "function": {"name": value["name"]}}
    return ("tool_choice", _CHOICES[kind]) if kind in _CHOICES else None


def _thinking(value: Any) -> tuple[str, Any] | None:
    return ("thinking", None) if isinstance(value, dict) and value.get("type") == "disabled" else None


TABLE: Table = {
    "max_tokens": "max_completion_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "tool_choice": _choice,
    "thinking": _thinking,
}


def messages_over_chat(table: Table) -> Dialect:
    """Return the dialect for clients of `/v1/messages` of an engine. `table`: the parameters that its OpenAI API names differently."""
    return Dialect(
        operations=frozenset({Operation.MESSAGES}),
        build_request=partial(_build_request, table),
        translate_answer=_whole,
        create_translator=MessagesTranslator,
        has_path=lambda _path: False,
    )


def _build_request(table: Table, request: PlainRequest) -> DialectRequest | Refusal:
    fields = request.fields
    mapped = map_parameters(fields, TABLE, _TAKEN, drop=request.drop)
    if isinstance(mapped, Refusal):
        return mapped
    turns, tools = _turns(fields), _tools(fields.get("tools") or [])
    if isinstance(turns, Refusal):
        return turns
    if isinstance(tools, Refusal):
        return tools
    given = {name: value for name, value in mapped.values.items() if value is not None and value != []}
    named = {name: value for name, value in given.items() if name in table}
    changed = rename_parameters(named, table, drop=request.drop, beside=given.get)
    if isinstance(changed, Refusal):
        return changed
    body: dict[str, Any] = {"model": request.model, "messages": turns}
    body |= {name: value for name, value in given.items() if name not in changed.removed} | changed.values
    if tools:
        body["tools"] = tools
        choice = fields.get("tool_choice")
        if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
            body["parallel_tool_calls"] = False
    metadata = fields.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        body["user"] = metadata["user_id"]
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}} if request.stream_usage else {"stream": True}
    return DialectRequest(Operation.CHAT.value, _encode(body), (*mapped.dropped, *changed.dropped))


def _tools(given: Any) -> list[dict[str, Any]] | Refusal:
    made = []
    for tool in given if isinstance(given, list) else [given]:
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            return refuse_unsupported("The engine that serves this model takes tools that the client runs.", "tools")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object", "properties": {}}}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name)}
        made.append({"type": "function", "function": function})
    return made


def _turns(fields: dict[str, Any]) -> list[dict[str, Any]] | Refusal:
    """Return the conversation. Results of tools are messages of their own, before what the user says in the same turn."""
    system = _parts(fields.get("system"), texts_only=True)
    turns: list[dict[str, Any]] = []
    if system is None:
        return refuse_unsupported("System prompts hold text only.", "system")
    if system:
        turns.append({"role": "system", "content": "\n".join(part["text"] for part in system)})
    for message in fields["messages"]:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            return refuse_unsupported("A message is an object whose role is `user` or `assistant`.", "messages")
        made = _user_turns(message.get("content")) if role == "user" else _assistant_turn(message.get("content"))
        if made is None:
            return refuse_unsupported(_CONTENT, "messages")
        turns += made
    return turns


def _user_turns(content: Any) -> list[dict[str, Any]] | None:
    results, rest = [], content
    if isinstance(content, list):
        rest = [block for block in content if not (isinstance(block, dict) and block.get("type") == "tool_result")]
        for block in content:
            if isinstance(block, dict) and block.get("type") == "tool_result":
                parts = _parts(block.get("content"), texts_only=True)
                if parts is None:
                    return None
                text = "\n".join(part["text"] for part in parts)
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text})
    parts = _parts(rest)
    if parts is None:
        return None
    return [*results, {"role": "user", "content": _plain(parts)}] if parts or not results else results


def _assistant_turn(content: Any) -> list[dict[str, Any]] | None:
    blocks = content if isinstance(content, list) else []
    calls = [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_use"]
    kept = [block for block in blocks if block not in calls and not (isinstance(block, dict) and block.get("type") in _FORGOTTEN)]
    parts = _parts(kept if isinstance(content, list) else content, texts_only=True)
    if parts is None:
        return None
    message: dict[str, Any] = {"role": "assistant", "content": "".join(part["text"] for part in parts) or None}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.get("id") or "",
                "type": "function",
                "function": {"name": call.get("name"), "arguments": _encode(call.get("input") or {}).decode()},
            }
            for call in calls
        ]
    return [message] if calls or message["content"] else []


def _parts(content: Any, *, texts_only: bool = False) -> list[dict[str, Any]] | None:
    """Return the parts of a message in OpenAI's words; None: it holds something else."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    parts: list[dict[str, Any]] = []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and not texts_only and (url := _image_url(block.get("source"))):
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            return None
    return parts


def _image_url(source: Any) -> str | None:
    if not isinstance(source, dict):
        return None
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    url = source.get("url")
    return url if source.get("type") == "url" and isinstance(url, str) else None


def _plain(parts: list[dict[str, Any]]) -> Any:
    """Return one text as such: every engine takes it, and not all take lists."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _whole(context: AnswerContext, _head: ResponseHead, body: bytes) -> bytes | None:
    try:
        answer = _decode_chat(body)
        if not answer.choices:
            return None
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        calls = [_tool_use(call) for call in message.tool_calls or ()]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    thoughts = [{"type": "thinking", "thinking": message.reasoning_content, "signature": ""}] if message.reasoning_content else []
    text = message.content or message.refusal
    content = [*thoughts, *([{"type": "text", "text": text}] if text else []), *calls]
    return _encode(_message(context, content, _stop_reason(reason, calls=bool(calls), refused=bool(message.refusal)), answer.usage))


def _message(context: AnswerContext, content: list[dict[str, Any]], reason: str | None, usage: _ChatUsage | None) -> dict[str, Any]:
    """Return Anthropic's message. A usage of zeros is read as none."""
    return {
        "id": answer_id(context),
        "type": "message",
        "role": "assistant",
        "model": context.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": (usage or _ChatUsage()).in_messages(),
    }


def _stop_reason(reason: str | None, *, calls: bool, refused: bool) -> str:
    """Return why the answer ended. OpenAI says `stop` of a call that the client demanded."""
    return "refusal" if refused else _REASONS.get(reason or "", "tool_use" if calls else "end_turn")


def _tool_use(call: _ToolCall) -> dict[str, Any]:
    """Return the block of a call.

    Raises:
        msgspec.DecodeError: its arguments are not an object.
    """
    arguments = _decode_arguments(call.function.arguments or "{}")
    return {"type": "tool_use", "id": call.id or "", "name": call.function.name or "", "input": arguments}


class MessagesTranslator(StreamTranslator[_Chat]):
    """Translates OpenAI's chunks to Anthropic's events."""

    __slots__ = ("_blocks", "_calls", "_context", "_open", "_reason", "_refused", "_started", "_usage")

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(EventSplitter(), _decode_event)
        self._context = context
        self._blocks = 0
        """Blocks that have begun."""
        self._open = ""
        """The kind of the open content block; "": there is none."""
        self._calls: dict[int, int] = {}
        """Blocks of calls, by the calls' numbers."""
        self._reason: str | None = None
        self._refused = False
        self._started = False
        self._usage: _ChatUsage | None = None

    def end(self) -> bytes:
        """Return the events for an unterminated last message, and the ending of a complete answer without end mark."""
        rest = super().end()
        return rest if self._over or self._reason is None else rest + self._finish()

    def _translate(self, message: _Chat) -> bytes:
        if message is _DONE:
            return b"" if self._reason is None else self._finish()
        if message.error is not None:
            return self._end_with_error(message.error.get("message") if isinstance(message.error, dict) else message.error)
        self._usage = message.usage or self._usage
        made = b"" if self._started else messages_event("message_start", message=_message(self._context, [], None, None))
        self._started = True
        for choice in message.choices[:1]:
            self._reason = choice.finish_reason or self._reason
            made += self._change(choice.delta)
        return made

    def _change(self, delta: _ChatOutput) -> bytes:
        made = b""
        if delta.reasoning_content:
            made += self._piece("thinking", "thinking", delta.reasoning_content)
        if text := delta.content or delta.refusal:
            self._refused = self._refused or bool(delta.refusal)
            made += self._piece("text", "text", text)
        for call in delta.tool_calls or ():
            if call.index not in self._calls:
                made += self._begin("tool_use", {"id": call.id or "", "name": call.function.name or "", "input": {}})
                self._calls[call.index] = self._blocks - 1
            if call.function.arguments:
                piece = {"type": "input_json_delta", "partial_json": call.function.arguments}
                made += messages_event("content_block_delta", index=self._calls[call.index], delta=piece)
        return made

    def _piece(self, kind: str, key: str, text: str) -> bytes:
        made = b"" if self._open == kind else self._begin(kind, {key: ""})
        return made + messages_event("content_block_delta", index=self._blocks - 1, delta={"type": f"{kind}_delta", key: text})

    def _begin(self, kind: str, fields: dict[str, Any]) -> bytes:
        ended = self._end_block()
        self._open = kind
        self._blocks += 1
        return ended + messages_event("content_block_start", index=self._blocks - 1, content_block={"type": kind, **fields})

    def _end_block(self) -> bytes:
        ended = messages_event("content_block_stop", index=self._blocks - 1) if self._open else b""
        self._open = ""
        return ended

    def _finish(self) -> bytes:
        self._over = True
        ending = {"stop_reason": _stop_reason(self._reason, calls=bool(self._calls), refused=self._refused), "stop_sequence": None}
        usage = (self._usage or _ChatUsage()).in_messages()
        return self._end_block() + messages_event("message_delta", delta=ending, usage=usage) + messages_event("message_stop")

    def _end_with_error(self, error: object) -> bytes:
        self._over = True
        return messages_failure(error if isinstance(error, str) else "The node failed.")
