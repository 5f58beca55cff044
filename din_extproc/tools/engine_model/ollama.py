"""Ollama's own paths: `/api/chat`, `/api/generate`, `/api/embed`; streams are NDJSON, and streaming is the default.

By the documentation of its API (`/api/chat` with `options`, `format`, `truncate`; `done_reason`, `prompt_eval_count`, `eval_count`).
Checked against `ollama` 0.6, its own Python client: chats, completions, tools, embeddings, lists, refusals;
and against captured exchanges of Ollama 0.17.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from din_extproc.tools.engine_model.answers import EventStream, Identity, Reporting, chat_body
from din_extproc.tools.engine_model.api import ApiEmulation, EngineDialect, PoolingApiEmulation, embedding_only, openai
from din_extproc.tools.engine_model.errors import EngineFailure
from din_extproc.tools.engine_model.fields import decode_body
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.pooling import PoolingRequest, PoolReader, vector
from din_extproc.tools.engine_model.requests import EngineRequest, Reader
from din_extproc.tools.engine_model.script import AnswerScript
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer

_encode = msgspec.json.encode
_AT = "2026-11-29T12:00:00.000000Z"
_DIGEST = "0" * 64
_DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "1B",
    "quantization_level": "Q4_0",
}
_JSON = "application/json"
_OPTIONS = {"num_predict": "max_tokens", "temperature": "temperature", "top_p": "top_p", "seed": "seed", "stop": "stop"}


def ollama(model: ModelSpec, tokenizer: SimulatedTokenizer) -> EngineDialect:
    """Return Ollama's paths beside OpenAI's."""
    reader, pooled = Reader(model, tokenizer), PoolReader(model, tokenizer)
    chat = ApiEmulation(_adapt_reader(reader.chat, _convert_chat), _make_chat_body, _OllamaChatStream, content_type="application/x-ndjson")
    text = ApiEmulation(
        _adapt_reader(reader.completion, _convert_generate), _make_text_body, _OllamaTextStream, content_type="application/x-ndjson"
    )
    base = openai(model, tokenizer)
    openai_chat = ApiEmulation(reader.chat, chat_body, lambda *about: EventStream(*about, chat=True, repeats=True), "chatcmpl-")
    models = [{"name": name, "model": name, "digest": _DIGEST, "size": 1_000_000_000, "details": _DETAILS} for name in model.names]
    pages = {
        "/api/tags": {"models": [{**each, "modified_at": _AT} for each in models]},
        "/api/ps": {"models": [{**each, "expires_at": _AT, "size_vram": 0, "context_length": model.max_model_len} for each in models]},
        "/api/version": {"version": "0.40.12"},
    }
    return EngineDialect(
        {**base.generating, "/v1/chat/completions": openai_chat, "/api/chat": chat, "/api/generate": text},
        {**embedding_only(base), "/api/embed": PoolingApiEmulation(_make_embedding_reader(pooled), _make_embedding_body)},
        reword,
        pages,
    )


def reword(failure: EngineFailure) -> EngineFailure:
    """Translate an error: Ollama's are one string."""
    decoded = msgspec.json.decode(failure.body)
    error = decoded.get("error", decoded.get("detail")) if isinstance(decoded, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if isinstance(error, dict) and error.get("param") == "input_tokens":
        message = "the input length exceeds the context length"
    if isinstance(error, dict) and error.get("type") == "NotFoundError":
        message = f"model '{str(message).partition('`')[2].partition('`')[0]}' not found"
    return EngineFailure(failure.status, _encode({"error": message}), failure.headers)


def _adapt_reader(
    read: Callable[[bytes, str], EngineRequest | EngineFailure], into: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[..., EngineRequest | EngineFailure]:
    """Return a reader that translates Ollama's requests into OpenAI's."""

    def wrapped(body: bytes, _content_type: str) -> EngineRequest | EngineFailure:
        given = decode_body(body, _JSON)
        if isinstance(given, EngineFailure):
            return reword(given)
        options = given.get("options") or {}
        meant = {name: options[own] for own, name in _OPTIONS.items() if own in options}
        meant |= {"model": given.get("model"), "stream": given.get("stream", True), "max_tokens": meant.get("max_tokens", 128)}
        found = read(_encode({**meant, **into(given)}), _JSON)
        return reword(found) if isinstance(found, EngineFailure) else found

    return wrapped


def _convert_chat(given: dict[str, Any]) -> dict[str, Any]:
    messages = [_convert_message(message) for message in given.get("messages") or ()]
    tools = given.get("tools")
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _convert_message(message: dict[str, Any]) -> dict[str, Any]:
    """Translate a message: Ollama has images beside the text, and arguments as objects."""
    parts: list[Any] = [{"type": "text", "text": message.get("content") or ""}]
    parts += [{"type": "image_url", "image_url": {"url": image}} for image in message.get("images") or ()]
    return {"role": message.get("role"), "content": parts}


def _convert_generate(given: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": given.get("prompt") or ""}


def _make_counts(request: EngineRequest, reporting: Reporting) -> dict[str, Any]:
    usage = reporting.of(request.prompt_tokens, sum(len(script.pieces) for script in request.scripts)) or {}
    numbers = {"total_duration": 5_000_000, "load_duration": 1_000_000, "prompt_eval_duration": 1_000_000, "eval_duration": 3_000_000}
    if usage:
        numbers |= {"prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"]}
    return numbers


def _choose_reason(script: AnswerScript) -> str:
    return "length" if script.finish_reason == "length" else "stop"


def _make_calls(script: AnswerScript) -> list[dict[str, Any]]:
    assert script.tool is not None  # noqa: S101 - checked by the caller
    return [{"function": {"name": script.tool.name, "arguments": msgspec.json.decode(script.tool.arguments)}}]


def _make_chat_body(identity: Identity, request: EngineRequest, reporting: Reporting) -> bytes:
    script = request.scripts[0]
    message: dict[str, Any] = {"role": "assistant", "content": "" if script.tool else script.text}
    if script.tool:
        message["tool_calls"] = _make_calls(script)
    done = {"done": True, "done_reason": _choose_reason(script), **_make_counts(request, reporting)}
    return _encode({"model": identity.model, "created_at": _AT, "message": message, **done})


def _make_text_body(identity: Identity, request: EngineRequest, reporting: Reporting) -> bytes:
    script = request.scripts[0]
    done = {"done": True, "done_reason": _choose_reason(script), **_make_counts(request, reporting)}
    return _encode({"model": identity.model, "created_at": _AT, "response": script.text, **done})


class _OllamaStream:
    """Lines of NDJSON."""

    def __init__(self, identity: Identity, request: EngineRequest, reporting: Reporting) -> None:
        self._model = identity.model
        self._request = request
        self._reporting = reporting

    def content(self, text: str) -> dict[str, Any]:
        """Return the part of a line that holds the text."""
        raise NotImplementedError

    def opening(self) -> bytes:
        return b""

    def token(self, index: int, position: int, *, finish: str | None = None) -> bytes:
        """Return the line of a token; a tool call is sent whole with its last token."""
        script = self._request.scripts[index]
        if script.tool is not None:
            if position < len(script.pieces) - 1 or finish is not None:
                return b""
            return self._encode_line({"message": {"role": "assistant", "content": "", "tool_calls": _make_calls(script)}, "done": False})
        piece = script.pieces[position]
        return self._encode_line({**self.content(piece), "done": False}) if piece else b""

    def closing(self) -> bytes:
        script = self._request.scripts[0]
        done = {"done": True, "done_reason": _choose_reason(script), **_make_counts(self._request, self._reporting)}
        return self._encode_line({**self.content(""), **done})

    def failed(self, message: str, *, as_text: bool) -> bytes:  # noqa: ARG002 - it has one way
        return _encode({"error": message}) + b"\n"

    def aborted(self) -> bytes:
        return b""

    def _encode_line(self, fields: dict[str, Any]) -> bytes:
        return _encode({"model": self._model, "created_at": _AT, **fields}) + b"\n"


class _OllamaChatStream(_OllamaStream):
    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


class _OllamaTextStream(_OllamaStream):
    def content(self, text: str) -> dict[str, Any]:
        return {"response": text}


def _make_embedding_reader(reader: PoolReader) -> Callable[[bytes, str], PoolingRequest | EngineFailure]:
    def read(body: bytes, _content_type: str) -> PoolingRequest | EngineFailure:
        given = decode_body(body, _JSON)
        if isinstance(given, EngineFailure):
            return reword(given)
        found = reader.embeddings(_encode({name: given.get(name) for name in ("model", "input", "dimensions")}), _JSON)
        return reword(found) if isinstance(found, EngineFailure) else found

    return read


def _make_embedding_body(request: PoolingRequest, _answer_id: str, _created: int, model: str) -> bytes:
    vectors = [vector(text, request.dimensions) for text in request.texts]
    counted = {"total_duration": 1, "load_duration": 1, "prompt_eval_count": sum(request.prompts)}
    return _encode({"model": model, "embeddings": vectors, **counted})
