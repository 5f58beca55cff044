"""TGI's own interface: `/generate` and `/generate_stream`. Chats go through its messages API, which is OpenAI's.

| OpenAI | TGI |
|---|---|
| `max_tokens` | `parameters.max_new_tokens` |
| `temperature` > 0 | `temperature`, `do_sample: true` |
| `temperature: 0` | `do_sample: false` |
| `top_p` < 1, `top_k` > 0, `repetition_penalty`, `frequency_penalty`, `seed` | same names |
| `stop` | `stop`, always a list |
| `logprobs` | from the tokens; `top_n_tokens` |
| `response_format`, `guided_json`, `guided_regex` | `grammar` |
| `echo` | `return_full_text` |
| `n`, `best_of` > 1, `logit_bias`, `presence_penalty`, `min_p`, `min_tokens`, `ignore_eos`, `suffix`, ... | unmappable |

Its messages API knows OpenAI's core only: `max_completion_tokens` is `max_tokens` there, guided decoding is `response_format`, and what TGI
reads and ignores (`n`, `logit_bias`) or does not have (`top_k`, `min_p`, `repetition_penalty`, ...) is unmappable. Its `presence_penalty`
is a repetition penalty in disguise, so that is unmappable as well.

Written by its OpenAPI document, and checked with the types made of it; not checked against a running TGI.
"""

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
from din_extproc.southbound.parameters import UNMAPPABLE, Table, map_parameters
from din_extproc.southbound.translator import ChunkTranslator

_encode = msgspec.json.Encoder().encode
_TAKEN = frozenset({"model", "prompt", "stream"})
_REASONS = {"length": "length"}


class _Token(Struct, frozen=True):
    text: str = ""
    logprob: float | None = None
    special: bool = False


class _Details(Struct, frozen=True):
    finish_reason: str = ""
    generated_tokens: int = 0
    input_length: int | None = None
    prefill: list[Any] = []
    tokens: list[_Token] = []
    top_tokens: list[list[_Token]] | None = None


class _Piece(Struct, frozen=True):
    """One event of a stream."""

    token: _Token = _Token()
    top_tokens: list[_Token] | None = None
    details: _Details | None = None
    error: Any = None


class _Generated(Struct, frozen=True):
    generated_text: str
    details: _Details | None = None


_decode_piece = msgspec.json.Decoder(_Piece).decode
_decode_whole = msgspec.json.Decoder(_Generated | list[_Generated]).decode


def _temperature(value: Any) -> tuple[str, Any] | None:
    return ("do_sample", False) if value == 0 else ("temperature", value)


def _stop(value: Any) -> tuple[str, Any] | None:
    return ("stop", [value]) if isinstance(value, str) else ("stop", value) if isinstance(value, list) else None


def _below_one(value: Any) -> tuple[str, Any] | None:
    """Omit a `top_p` of 1, which TGI refuses and which has no effect."""
    return ("top_p", None) if value == 1 else ("top_p", value)


def _positive(value: Any) -> tuple[str, Any] | None:
    return ("top_k", None) if value in (-1, 0) else ("top_k", value)


def grammar(value: Any) -> tuple[str, Any] | None:
    """Convert `response_format` to a grammar; JSON without a schema is any object."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        return "grammar", {"type": "json", "value": {"type": "object"}}
    outer = value.get("json_schema") if kind == "json_schema" else None
    schema = outer.get("schema") if isinstance(outer, dict) else None
    return ("grammar", {"type": "json", "value": schema}) if isinstance(schema, dict) else None


TABLE: Table = {
    "max_tokens": "max_new_tokens",
    "temperature": _temperature,
    "top_p": _below_one,
    "top_k": _positive,
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": _stop,
    "logprobs": lambda value: ("top_n_tokens", value or None) if type(value) is int else None,
    "response_format": grammar,
    "guided_json": lambda value: ("grammar", {"type": "json", "value": value}),
    "guided_regex": lambda value: ("grammar", {"type": "regex", "value": value}),
    "echo": "return_full_text",
}


def _order(request: PlainRequest) -> DialectRequest | Refusal:
    mapped = map_parameters(request.fields, TABLE, _TAKEN, drop=request.drop)
    if isinstance(mapped, Refusal):
        return mapped
    prompt = request.fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        return refuse_unsupported("The engine that serves this model takes one prompt, as text.", "prompt")
    parameters = {name: value for name, value in mapped.values.items() if value is not None}
    parameters["details"] = True
    if "temperature" in parameters:
        parameters["do_sample"] = True
    path = "/generate_stream" if request.stream else "/generate"
    return DialectRequest(path, _encode({"inputs": prompt, "parameters": parameters}), mapped.dropped)


def _whole(context: AnswerContext, head: ResponseHead, body: bytes) -> bytes | None:
    try:
        answer = _decode_whole(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(answer, list):
        if len(answer) != 1:
            return None
        answer = answer[0]
    details = answer.details or _Details()
    logprobs = _logprobs(details.tokens, details.top_tokens) if type(context.fields.get("logprobs")) is int else None
    choice = {"text": answer.generated_text, "logprobs": logprobs, "finish_reason": _REASONS.get(details.finish_reason, "stop")}
    if answer.details is None:
        return events.encode_completion(context, choice, None)
    counted = head.header("x-prompt-tokens")
    prompt_tokens = int(counted) if counted.isascii() and counted.isdigit() else _prompt_tokens(details)
    return events.encode_completion(
        context, choice, None if prompt_tokens is None else events.usage_object(prompt_tokens, details.generated_tokens)
    )


def _prompt_tokens(details: _Details) -> int | None:
    """Return the number of prompt tokens, or None if it is unknown: TGI returns no list of prompt tokens unless context."""
    return details.input_length if details.input_length is not None else len(details.prefill) or None


def _logprobs(tokens: list[_Token], tops: list[list[_Token]] | None) -> dict[str, Any]:
    """Return log probabilities in the format of completions."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None if not tops else [{token.text: token.logprob for token in top} for top in tops],
    }


class TgiTranslator(ChunkTranslator[_Piece]):
    """Translates TGI's events to OpenAI's."""

    __slots__ = ("_with_logprobs",)

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context, EventSplitter(), _decode_piece)
        self._with_logprobs = type(context.fields.get("logprobs")) is int

    def _translate(self, piece: _Piece) -> bytes:
        if piece.error is not None:
            return self._end_with_error(piece.error)
        token = piece.token
        logprobs = _logprobs([token], [piece.top_tokens] if piece.top_tokens else None) if self._with_logprobs else None
        output = b"" if token.special or not token.text else self._chunks.text(token.text, logprobs)
        details = piece.details
        if details is None:
            return output
        self._over = True
        output += self._chunks.finish(_REASONS.get(details.finish_reason, "stop"))
        if details.input_length is not None:
            output += self._chunks.usage(details.input_length, details.generated_tokens)
        return output + DONE


TGI = Dialect(
    operations=frozenset({Operation.COMPLETIONS}),
    build_request=_order,
    translate_answer=_whole,
    create_translator=TgiTranslator,
    has_path=frozenset({"/generate", "/generate_stream"}).__contains__,
    openai_operations=frozenset({Operation.CHAT}),
)

OPENAI: Table = {
    "max_completion_tokens": "max_tokens",
    "guided_json": lambda value: ("response_format", {"type": "json", "value": value}),
    "guided_regex": lambda value: ("response_format", {"type": "regex", "value": value}),
    **dict.fromkeys(
        ("n", "best_of", "logit_bias", "presence_penalty", "repetition_penalty", "top_k", "min_p", "min_tokens", "ignore_eos"), UNMAPPABLE
    ),
    **dict.fromkeys(("length_penalty", "guided_grammar", "guided_choice", "parallel_tool_calls", "echo", "suffix"), UNMAPPABLE),
}
