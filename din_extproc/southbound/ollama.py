"""Ollama's own interface: `/api/chat`, `/api/generate` and `/api/embed`, streams as NDJSON.

| OpenAI | Ollama |
|---|---|
| `max_tokens`, of chats `max_completion_tokens` before it | `options.num_predict` |
| `temperature`, `top_p`, `top_k`, `min_p`, `seed`, `stop`, `presence_penalty`, `frequency_penalty` | `options`, same names |
| `repetition_penalty` | `options.repeat_penalty` |
| `response_format`, `guided_json` | `format`: `"json"` or the schema |
| `reasoning_effort` | `think` |
| `logprobs`, `top_logprobs`, `tools`, `dimensions` | same names |
| `tool_choice: none` | no `tools` |
| `n` > 1, `logit_bias`, forced tools, `min_tokens`, `guided_regex`, ... | unmappable |
| `parallel_tool_calls: false` | a wish: dropped and named |

Its OpenAI path knows OpenAI's core only: `max_completion_tokens` is `max_tokens` there, `guided_json` is `response_format`, and `n`,
`logit_bias`, forced tools, `top_k`, `min_p`, `repetition_penalty` and the like are unmappable.

Ollama cuts prompts that are too long without a word; `truncate` and `shift` tell it not to. Images must be in the request (`data:` URLs).
Checked against Ollama 0.17: `tests/captures/ollama`, and run behind the gateway.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from din_extproc.domain.request import Operation
from din_extproc.domain.response import ResponseHead
from din_extproc.domain.verdict import Refusal
from din_extproc.southbound import events
from din_extproc.southbound.dialect import AnswerContext, Dialect, DialectRequest, PlainRequest, refuse_unsupported
from din_extproc.southbound.events import DONE
from din_extproc.southbound.framing import LineSplitter
from din_extproc.southbound.parameters import CHAT_ONLY, UNMAPPABLE, Table, map_parameters
from din_extproc.southbound.translator import ChunkTranslator

_encode = msgspec.json.Encoder().encode
_PATHS = {Operation.CHAT: "/api/chat", Operation.COMPLETIONS: "/api/generate", Operation.EMBEDDINGS: "/api/embed"}
_TAKEN = frozenset({"model", "messages", "prompt", "input", "stream", "encoding_format", "tools"})
_BESIDE = frozenset({"format", "think", "logprobs", "top_logprobs", "suffix", "dimensions"})
"""Parameters that are fields of their own instead of `options`."""
_REASONS = {"length": "length"}
_data_url = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,([A-Za-z0-9+/=]+)").fullmatch
_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode


class _Function(Struct, frozen=True):
    name: str = ""
    arguments: Any = None


class _Call(Struct, frozen=True):
    function: _Function = _Function()
    id: str = ""


class _OllamaMessage(Struct, frozen=True):
    content: str = ""
    thinking: str = ""
    tool_calls: list[_Call] | None = None


class _Answer(Struct, frozen=True):
    """One line of a stream, or a whole answer, of chat or generate."""

    message: _OllamaMessage | None = None
    response: str = ""
    thinking: str = ""
    logprobs: list[dict[str, Any]] | None = None
    done: bool = False
    done_reason: str = ""
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    error: Any = None


class _Embedded(Struct, frozen=True):
    embeddings: list[list[float]]
    prompt_eval_count: int | None = None


_decode = msgspec.json.Decoder(_Answer).decode
_decode_embedded = msgspec.json.Decoder(_Embedded).decode


def _format(value: Any) -> tuple[str, Any] | None:
    """Convert `response_format`; a schema is nested in `json_schema.schema`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        return "format", "json"
    outer = value.get("json_schema") if kind == "json_schema" else None
    schema = outer.get("schema") if isinstance(outer, dict) else None
    return ("format", schema) if isinstance(schema, dict) else None


def _stop(value: Any) -> tuple[str, Any] | None:
    return ("stop", [value]) if isinstance(value, str) else ("stop", value) if isinstance(value, list) else None


def _logprobs(value: Any) -> tuple[str, Any] | None:
    """Accept the boolean of a chat; the number of a completion is unsupported."""
    return ("logprobs", value) if isinstance(value, bool) else None


def _think(value: Any) -> tuple[str, Any] | None:
    return ("think", False if value == "none" else value) if value in ("none", "low", "medium", "high") else None


def _choice(value: Any) -> tuple[str, Any] | None:
    return ("tools", None) if value == "none" else None


TABLE: Table = {
    "max_tokens": "num_predict",
    "max_completion_tokens": "num_predict",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": _stop,
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
    "response_format": _format,
    "guided_json": lambda value: ("format", value) if isinstance(value, dict) else None,
    "reasoning_effort": _think,
    "logprobs": _logprobs,
    "top_logprobs": "top_logprobs",
    "tool_choice": _choice,
    "suffix": "suffix",
    "dimensions": "dimensions",
    "n": UNMAPPABLE,
}
_OF_TEXTS: Table = {name: rule for name, rule in TABLE.items() if name not in CHAT_ONLY}


def _order(request: PlainRequest) -> DialectRequest | Refusal:
    table = TABLE if request.operation is Operation.CHAT else _OF_TEXTS
    mapped = map_parameters(request.fields, table, _TAKEN, drop=request.drop)
    if isinstance(mapped, Refusal):
        return mapped
    body: dict[str, Any] = {"model": request.model}
    prompt = _prompt(request)
    if isinstance(prompt, Refusal):
        return prompt
    body |= prompt
    values = mapped.values
    if "tools" in values:
        values.pop("tools")
        body.pop("tools", None)
    if request.operation is not Operation.EMBEDDINGS:
        body |= {"stream": request.stream, "shift": False}
        options = {name: value for name, value in values.items() if name not in _BESIDE}
        if options:
            body["options"] = options
    body["truncate"] = False
    body |= {name: value for name, value in values.items() if name in _BESIDE}
    return DialectRequest(_PATHS[request.operation], _encode(body), mapped.dropped)


def _prompt(request: PlainRequest) -> dict[str, Any] | Refusal:
    fields = request.fields
    if request.operation is Operation.EMBEDDINGS:
        given = fields.get("input")
        if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(each, str) for each in given)):
            return refuse_unsupported("The engine that serves this model takes texts, not token ids.", "input")
        return {"input": given}
    if request.operation is Operation.COMPLETIONS:
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return refuse_unsupported("The engine that serves this model takes one prompt, as text.", "prompt")
        return {"prompt": prompt, "raw": True}
    messages: list[dict[str, Any]] = []
    for message in fields.get("messages") or ():
        made = _message(message, messages)
        if isinstance(made, Refusal):
            return made
        messages.append(made)
    tools = fields.get("tools")
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _message(message: Any, before: Sequence[dict[str, Any]]) -> dict[str, Any] | Refusal:
    if not isinstance(message, dict):
        return refuse_unsupported("A message is an object.", "messages")
    role = message.get("role")
    content = _content(message.get("content"))
    if isinstance(content, Refusal):
        return content
    made: dict[str, Any] = {"role": "system" if role == "developer" else role, **content}
    calls = message.get("tool_calls")
    if calls:
        converted = [_convert_call(call) for call in calls]
        if None in converted:
            return refuse_unsupported("The arguments of a tool call are a JSON object.", "messages")
        made["tool_calls"] = converted
    if role == "tool":
        made["tool_name"] = _tool_name(message, before)
        made["tool_call_id"] = message.get("tool_call_id") or ""
    return made


def _content(content: Any) -> dict[str, Any] | Refusal:
    """Split content into text and images."""
    if content is None or isinstance(content, str):
        return {"content": content or ""}
    texts: list[str] = []
    images: list[str] = []
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
            continue
        url = part.get("image_url") if kind == "image_url" else None
        found = _data_url(url.get("url") or "") if isinstance(url, dict) and isinstance(url.get("url"), str) else None
        if found is None:
            return refuse_unsupported("The engine that serves this model takes text, and images as base64 `data:` URLs.", "messages")
        images.append(found[1])
    made: dict[str, Any] = {"content": "".join(texts)}
    return {**made, "images": images} if images else made


def _convert_call(call: Any) -> dict[str, Any] | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    try:
        arguments = _decode_arguments(function.get("arguments") or "{}")
    except (msgspec.DecodeError, TypeError):
        return None
    return {"id": call.get("id") or "", "function": {"name": function.get("name"), "arguments": arguments}}


def _tool_name(message: Mapping[str, Any], before: Sequence[dict[str, Any]]) -> str:
    """Return the function name of the call that this message answers."""
    wanted = message.get("tool_call_id")
    for earlier in reversed(before):
        for call in earlier.get("tool_calls", ()):
            if call["id"] == wanted:
                return str(call["function"]["name"])
    return str(message.get("name") or "")


def _whole(context: AnswerContext, _head: ResponseHead, body: bytes) -> bytes | None:
    try:
        if context.operation is Operation.EMBEDDINGS:
            embedded = _decode_embedded(body)
            return events.encode_embeddings(context, embedded.embeddings, embedded.prompt_eval_count)
        answer = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not answer.done or answer.error is not None:
        return None
    message = answer.message
    reason = _REASONS.get(answer.done_reason, "stop")
    if message is None:
        choice: dict[str, Any] = {"text": answer.response, "logprobs": None, "finish_reason": reason}
        return events.encode_completion(context, choice, _usage(answer))
    fields: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.thinking:
        fields["reasoning_content"] = message.thinking
    if message.tool_calls:
        fields |= {
            "content": message.content or None,
            "tool_calls": [_openai_call(context, at, call) for at, call in enumerate(message.tool_calls)],
        }
        reason = "tool_calls"
    choice = {"message": fields, "logprobs": _logprobs_object(answer.logprobs), "finish_reason": reason}
    return events.encode_completion(context, choice, _usage(answer))


def _openai_call(context: AnswerContext, index: int, call: _Call) -> dict[str, Any]:
    """Convert a tool call. Ollama returns arguments as an object, and older versions return no ids."""
    function = {"name": call.function.name, "arguments": _encode(call.function.arguments or {}).decode()}
    return {"id": call.id or f"call_{context.id}_{index}", "type": "function", "function": function}


def _logprobs_object(logprobs: list[dict[str, Any]] | None) -> Any:
    return None if logprobs is None else {"content": logprobs, "refusal": None}


def _usage(answer: _Answer) -> dict[str, int] | None:
    if answer.prompt_eval_count is None and answer.eval_count is None:
        return None
    return events.usage_object(answer.prompt_eval_count or 0, answer.eval_count or 0)


class OllamaTranslator(ChunkTranslator[_Answer]):
    """Translates an NDJSON stream to OpenAI's events."""

    __slots__ = ("_calls", "_context")

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context, LineSplitter(), _decode)
        self._context = context
        self._calls = 0

    def _translate(self, answer: _Answer) -> bytes:
        if answer.error is not None:
            return self._end_with_error(answer.error)
        parts = [self._chunks.open(), *self._encode_message(answer)]
        if answer.done:
            self._over = True
            reason = "tool_calls" if self._calls else _REASONS.get(answer.done_reason, "stop")
            parts.append(self._chunks.finish(reason))
            if (usage := _usage(answer)) is not None:
                parts.append(self._chunks.usage(usage["prompt_tokens"], usage["completion_tokens"]))
            parts.append(DONE)
        return b"".join(parts)

    def _encode_message(self, answer: _Answer) -> list[bytes]:
        message = answer.message
        if message is None:
            return [self._chunks.text(answer.response)] if answer.response else []
        parts = []
        if message.thinking:
            parts.append(self._chunks.delta({"reasoning_content": message.thinking}))
        if message.content:
            parts.append(self._chunks.text(message.content, _logprobs_object(answer.logprobs)))
        for call in message.tool_calls or ():
            parts.append(self._chunks.delta({"tool_calls": [{"index": self._calls, **_openai_call(self._context, self._calls, call)}]}))
            self._calls += 1
        return parts


OLLAMA = Dialect(
    operations=frozenset(_PATHS),
    build_request=_order,
    translate_answer=_whole,
    create_translator=OllamaTranslator,
    has_path=frozenset(_PATHS.values()).__contains__,
)

OPENAI: Table = {
    "max_completion_tokens": "max_tokens",
    "guided_json": lambda value: ("response_format", {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}),
    **dict.fromkeys(("n", "best_of", "logit_bias", "parallel_tool_calls", "echo", "top_k", "min_p", "repetition_penalty"), UNMAPPABLE),
    **dict.fromkeys(("min_tokens", "ignore_eos", "length_penalty", "guided_grammar", "guided_regex", "guided_choice"), UNMAPPABLE),
}
