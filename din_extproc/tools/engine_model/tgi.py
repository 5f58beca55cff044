"""TGI's own paths, `/generate` and `/generate_stream`, beside its messages API.

By its OpenAPI document (`inputs`, `parameters`; `details`, `token`, `generated_text`; errors with `error_type`). Checked against the types
that `huggingface_hub` 2.4 generates from that document, each required field there, streams included; not against a running TGI.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from din_extproc.tools.engine_model.answers import EventStream, Identity, Reporting, chat_body
from din_extproc.tools.engine_model.api import ApiEmulation, EngineDialect, chats_only, openai
from din_extproc.tools.engine_model.errors import EngineFailure
from din_extproc.tools.engine_model.fields import decode_body
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.requests import EngineRequest, Reader
from din_extproc.tools.engine_model.script import AnswerScript
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer

_encode = msgspec.json.encode
_JSON = "application/json"
_NAMES = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "seed": "seed", "stop": "stop"}
_INVALID = 422


def tgi(model: ModelSpec, tokenizer: SimulatedTokenizer) -> EngineDialect:
    """Return TGI's paths beside OpenAI's."""
    reader = Reader(model, tokenizer)
    base = openai(model, tokenizer)
    whole = ApiEmulation(_make_reader(reader, stream=False), _make_body, _TgiStream, headers=_count_tokens)
    stream = ApiEmulation(_make_reader(reader, stream=True), _make_body, _TgiStream, content_type="text/event-stream")
    chat = ApiEmulation(reader.chat, chat_body, lambda *about: EventStream(*about, chat=True, repeats=True))
    pages = {"/info": {"model_id": model.root, "max_total_tokens": model.max_model_len, "version": "3.3.7"}}
    own = {"/generate": whole, "/generate_stream": stream, "/v1/chat/completions": chat}
    return EngineDialect({**chats_only(base), **own}, {}, reword, pages)


def reword(failure: EngineFailure) -> EngineFailure:
    """Translate an error: TGI's have a string and a type, and invalid input is 422."""
    decoded = msgspec.json.decode(failure.body)
    error = decoded.get("error", decoded.get("detail")) if isinstance(decoded, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if isinstance(error, dict) and error.get("param") == "input_tokens":
        message = (
            "Input validation error: `inputs` tokens + `max_new_tokens` must be <= " + str(message).partition(" tokens")[0].split()[-1]
        )
    kinds = {400: (_INVALID, "validation"), 429: (429, "overloaded")}
    status, kind = kinds.get(failure.status, (failure.status, "generation"))
    return EngineFailure(status, _encode({"error": message, "error_type": kind}), failure.headers)


def _make_reader(reader: Reader, *, stream: bool) -> Callable[[bytes, str], EngineRequest | EngineFailure]:
    def read(body: bytes, _content_type: str) -> EngineRequest | EngineFailure:
        given = decode_body(body, _JSON)
        if isinstance(given, EngineFailure):
            return reword(given)
        parameters = given.get("parameters") or {}
        if refused := _check_parameters(parameters):
            return refused
        meant = {name: parameters[own] for own, name in _NAMES.items() if own in parameters}
        found = reader.completion(_encode({"max_tokens": 100, **meant, "prompt": given.get("inputs"), "stream": stream}), _JSON)
        return reword(found) if isinstance(found, EngineFailure) else found

    return read


def _check_parameters(parameters: Mapping[str, Any]) -> EngineFailure | None:
    """Check parameters about which TGI is stricter than others."""
    for name, wrong, message in (
        ("temperature", lambda value: value <= 0, "`temperature` must be strictly positive"),
        ("top_p", lambda value: not 0 < value < 1, "`top_p` must be > 0.0 and < 1.0"),
        ("top_k", lambda value: value <= 0, "`top_k` must be strictly positive"),
    ):
        if isinstance(parameters.get(name), int | float) and wrong(parameters[name]):
            return EngineFailure(_INVALID, _encode({"error": f"Input validation error: {message}", "error_type": "validation"}))
    return None


def _choose_reason(script: AnswerScript) -> str:
    return {"length": "length"}.get(script.finish_reason, "stop_sequence" if script.stop_reason else "eos_token")


def _make_token(piece: str, position: int) -> dict[str, Any]:
    """Return a token; the end of the sequence has a text of its own and is marked as special."""
    return {"id": position + 1, "text": piece or "</s>", "logprob": -0.25, "special": not piece}


def _count_tokens(request: EngineRequest) -> Mapping[str, str]:
    return {"x-prompt-tokens": str(request.prompt_tokens), "x-generated-tokens": str(sum(len(script.pieces) for script in request.scripts))}


def _make_body(_identity: Identity, request: EngineRequest, reporting: Reporting) -> bytes:
    script = request.scripts[0]
    details = {
        "finish_reason": _choose_reason(script),
        "generated_tokens": round(len(script.pieces) * reporting.factor),
        "seed": None,
        "prefill": [],
        "tokens": [_make_token(piece, position) for position, piece in enumerate(script.pieces)],
    }
    return _encode({"generated_text": script.text, "details": details})


class _TgiStream:
    """TGI's events: one token each, the last with the whole text and the details."""

    def __init__(self, _identity: Identity, request: EngineRequest, reporting: Reporting) -> None:
        self._request = request
        self._reporting = reporting

    def opening(self) -> bytes:
        return b""

    def token(self, index: int, position: int, *, finish: str | None = None) -> bytes:
        script = self._request.scripts[index]
        last = finish is None and position == len(script.pieces) - 1
        event: dict[str, Any] = {"index": position + 1, "token": _make_token(script.pieces[position], position)}
        event |= {"generated_text": script.text if last else None, "details": self._make_details(script) if last else None}
        return b"data:" + _encode(event) + b"\n\n"

    def closing(self) -> bytes:
        return b""

    def failed(self, message: str, *, as_text: bool) -> bytes:  # noqa: ARG002 - it has one way
        return b"data:" + _encode({"error": message, "error_type": "generation"}) + b"\n\n"

    def aborted(self) -> bytes:
        return b""

    def _make_details(self, script: AnswerScript) -> dict[str, Any]:
        details = {"finish_reason": _choose_reason(script), "generated_tokens": len(script.pieces), "seed": None}
        usage = self._reporting.of(self._request.prompt_tokens, len(script.pieces))
        return details | ({"input_length": usage["prompt_tokens"], "generated_tokens": usage["completion_tokens"]} if usage else {})
