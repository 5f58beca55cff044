"""Triton's own interface: its generate extension for text, and KServe v2 `infer` for embeddings and rerank.

| OpenAI | Triton (the TensorRT-LLM backend's words) |
|---|---|
| `prompt` | `text_input` |
| `max_tokens` | `max_tokens` |
| `temperature`, `top_p`, `top_k`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `length_penalty` | same names |
| `seed` | `random_seed` |
| `min_tokens` | `min_length` |
| `stop` | `stop_words`, always a list |
| `n`, `best_of` > 1, `logprobs`, `logit_bias`, `min_p`, `response_format`, `echo`, `suffix`, ... | unmappable |

`infer` has no fixed names of tensors; these are used: `text` (BYTES, [n, 1]) in and the first floating-point output out for embeddings,
`query` and `document` (BYTES, [n, 1]) in and the first floating-point output out for rerank. A model with others needs an ensemble.
A chat needs a template, which Triton does not have: its OpenAI frontend serves chats (`api: openai`).

Its OpenAI frontend has no `best_of`, `logprobs` and `logit_bias`, and one choice only.

Triton tells neither usage nor why it stopped: tokens are counted as estimates, and a stream that ends in good order ends with `stop`,
or with `length` when as many tokens as allowed have come. Written by its documentation; not checked against a running Triton.
"""

import re
from typing import Any
from urllib.parse import quote

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
_TAKEN = frozenset({"model", "prompt", "stream", "input", "query", "documents", "encoding_format", "top_n", "return_documents"})
_FLOATS = ("FP16", "FP32", "FP64", "BF16")


class _Text(Struct, frozen=True):
    text_output: str | list[str] | None = None
    error: Any = None


class _Tensor(Struct, frozen=True):
    datatype: str
    shape: list[int]
    data: list[Any]


class _Inferred(Struct, frozen=True):
    outputs: list[_Tensor]


_path = re.compile(r"/v2/models/[^/?#]+/(?:generate|generate_stream|infer)").fullmatch
_decode_text = msgspec.json.Decoder(_Text).decode
_decode_inferred = msgspec.json.Decoder(_Inferred).decode


def _stop(value: Any) -> tuple[str, Any] | None:
    return ("stop_words", [value]) if isinstance(value, str) else ("stop_words", value) if isinstance(value, list) else None


TABLE: Table = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "length_penalty": "length_penalty",
    "seed": "random_seed",
    "min_tokens": "min_length",
    "stop": _stop,
}


def _order(request: PlainRequest) -> DialectRequest | Refusal:
    mapped = map_parameters(request.fields, TABLE, _TAKEN, drop=request.drop)
    if isinstance(mapped, Refusal):
        return mapped
    model = f"/v2/models/{quote(request.model, safe='')}"
    if request.operation is not Operation.COMPLETIONS:
        tensors = _tensors(request)
        if isinstance(tensors, Refusal):
            return tensors
        return DialectRequest(f"{model}/infer", _encode({"inputs": tensors}), mapped.dropped)
    prompt = request.fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        return refuse_unsupported("The engine that serves this model takes one prompt, as text.", "prompt")
    body = {"text_input": prompt, "stream": request.stream, "exclude_input_in_output": True, **mapped.values}
    return DialectRequest(f"{model}/{'generate_stream' if request.stream else 'generate'}", _encode(body), mapped.dropped)


def _tensors(request: PlainRequest) -> list[dict[str, Any]] | Refusal:
    fields = request.fields
    if request.operation is Operation.EMBEDDINGS:
        texts = _texts(fields.get("input"))
        return (
            refuse_unsupported("The engine that serves this model takes texts, not token ids.", "input")
            if texts is None
            else [_bytes("text", texts)]
        )
    query, documents = fields.get("query"), _texts(fields.get("documents"))
    if not isinstance(query, str):
        return refuse_unsupported("The query is a text.", "query")
    if documents is None:
        return refuse_unsupported("The documents are a list of texts.", "documents")
    return [_bytes("query", [query] * len(documents)), _bytes("document", documents)]


def _texts(value: Any) -> list[str] | None:
    """Return one text or several, given as strings or as objects with a text; None: any other value."""
    items = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    found = [item.get("text") if isinstance(item, dict) else item for item in items]
    texts = [text for text in found if isinstance(text, str)]
    return texts if texts and len(texts) == len(found) else None


def _bytes(name: str, texts: list[str]) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}


def _whole(context: AnswerContext, _head: ResponseHead, body: bytes) -> bytes | None:
    try:
        if context.operation is not Operation.COMPLETIONS:
            return _inferred(context, _decode_inferred(body))
        answer = _decode_text(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    text = answer.text_output[0] if isinstance(answer.text_output, list) and answer.text_output else answer.text_output
    if not isinstance(text, str) or answer.error is not None:
        return None
    return events.encode_completion(context, {"text": text, "logprobs": None, "finish_reason": "stop"}, None)


def _inferred(context: AnswerContext, inferred: _Inferred) -> bytes | None:
    """Encode embeddings or scores.

    Raises:
        msgspec.ValidationError: The output is not numeric or exceeds the range of a float.
    """
    tensor = next((each for each in inferred.outputs if each.datatype in _FLOATS), None)
    if tensor is None or not tensor.shape:
        return None
    numbers = msgspec.convert(tensor.data, list[float])
    rows = tensor.shape[0]
    if rows < 1 or not numbers or len(numbers) % rows:
        return None
    width = len(numbers) // rows
    if context.operation is Operation.RERANK:
        return events.encode_ranking(context, numbers[::width], None)
    return events.encode_embeddings(context, [numbers[at * width : (at + 1) * width] for at in range(rows)], None)


class TritonTranslator(ChunkTranslator[_Text]):
    """Translates Triton's events to OpenAI's. No event is marked as the last one: the end of the body ends the stream."""

    __slots__ = ("_count", "_limit")

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context, EventSplitter(), _decode_text)
        limit = context.fields.get("max_tokens")
        self._limit = limit if isinstance(limit, int) else None
        self._count = 0

    def end(self) -> bytes:
        """Return the final events: the body ended normally, so the answer is complete."""
        output = super().end()
        if self._over or not self._count:
            return output
        self._over = True
        reason = "length" if self._limit is not None and self._count >= self._limit else "stop"
        return output + self._chunks.finish(reason) + DONE

    def _translate(self, piece: _Text) -> bytes:
        if piece.error is not None:
            return self._end_with_error(piece.error)
        text = "".join(piece.text_output) if isinstance(piece.text_output, list) else piece.text_output or ""
        self._count += 1
        return self._chunks.text(text) if text else b""


TRITON = Dialect(
    operations=frozenset({Operation.COMPLETIONS, Operation.EMBEDDINGS, Operation.RERANK}),
    build_request=_order,
    translate_answer=_whole,
    create_translator=TritonTranslator,
    has_path=lambda path: _path(path) is not None,
)

OPENAI: Table = dict.fromkeys(("n", "best_of", "logprobs", "top_logprobs", "logit_bias"), UNMAPPABLE)
