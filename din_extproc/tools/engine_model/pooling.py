"""Embeddings, rerank and score: parsing and answers. A vector depends on the text alone, a score on shared tokens."""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import shake_256
from math import sqrt
from struct import pack, unpack
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.tools.engine_model.errors import EngineFailure, prompt_too_long, refuse
from din_extproc.tools.engine_model.fields import check_fields, decode_body
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.requests import count_input, refuse_model, split_inputs
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer

_EMBEDDING = {"model": "str", "input": "any", "encoding_format": "str", "dimensions": "int"}
_RERANK = {"model": "str", "query": "any", "documents": "list", "top_n": "int"}
_DETOKENIZE = {"model": "str", "tokens": "list"}
_SCORE = {"model": "str", "text_1": "any", "text_2": "any"}


class PoolingRequest(Struct, frozen=True):
    """An accepted pooling request: one prompt per text, and the data of the answer."""

    kind: str
    """`embeddings`, `rerank` or `score`."""
    prompts: tuple[int, ...]
    """Number of tokens of each prompt."""
    texts: tuple[str, ...]
    query: str = ""
    base64: bool = False
    dimensions: int = 0
    top_n: int | None = None
    count: int = 0
    """The tokens of a prompt that is only counted."""


class PoolReader:
    """Reads pooling requests for one model."""

    def __init__(self, model: ModelSpec, tokenizer: SimulatedTokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def embeddings(self, body: bytes, content_type: str) -> PoolingRequest | EngineFailure:
        """Parse a body of /v1/embeddings."""
        fields = self._fields(body, content_type, _EMBEDDING, ("input",))
        if isinstance(fields, EngineFailure):
            return fields
        inputs = split_inputs(fields["input"])
        if not inputs:
            return refuse(400, "Either input or messages must be provided and non-empty.", param="input")
        counted = [count_input(self._tokenizer, item) for item in inputs]
        return self._fit(
            PoolingRequest(
                kind="embeddings",
                prompts=tuple(tokens for _, tokens in counted),
                texts=tuple(text for text, _ in counted),
                base64=fields["encoding_format"] == "base64",
                dimensions=fields["dimensions"] or self._model.dimensions,
            )
        )

    def rerank(self, body: bytes, content_type: str) -> PoolingRequest | EngineFailure:
        """Parse a body of /v1/rerank."""
        fields = self._fields(body, content_type, _RERANK, ("query", "documents"))
        if isinstance(fields, EngineFailure):
            return fields
        return self._pairs("rerank", _text(fields["query"]), fields["documents"], fields["top_n"] or None)

    def score(self, body: bytes, content_type: str) -> PoolingRequest | EngineFailure:
        """Parse a body of /score."""
        fields = self._fields(body, content_type, _SCORE, ("text_1", "text_2"))
        if isinstance(fields, EngineFailure):
            return fields
        documents = fields["text_2"] if isinstance(fields["text_2"], list) else [fields["text_2"]]
        return self._pairs("score", _text(fields["text_1"]), documents, None)

    def classify(self, body: bytes, content_type: str) -> PoolingRequest | EngineFailure:
        """Parse a body of /classify, which has the form of one for embeddings."""
        request = self.embeddings(body, content_type)
        return request if isinstance(request, EngineFailure) else replace(request, kind="classify")

    def detokenize(self, body: bytes, content_type: str) -> PoolingRequest | EngineFailure:
        """Parse a body of /detokenize."""
        fields = self._fields(body, content_type, _DETOKENIZE, ("tokens",))
        return fields if isinstance(fields, EngineFailure) else PoolingRequest("detokenize", (), (), count=len(fields["tokens"]))

    def _fields(self, body: bytes, content_type: str, kinds: dict[str, str], required: tuple[str, ...]) -> dict[str, Any] | EngineFailure:
        decoded = decode_body(body, content_type)
        if isinstance(decoded, EngineFailure):
            return decoded
        fields = check_fields(decoded, kinds, required)
        if isinstance(fields, EngineFailure):
            return fields
        return refuse_model(self._model, fields["model"]) or fields

    def _pairs(self, kind: str, query: str, documents: Sequence[Any], top_n: int | None) -> PoolingRequest | EngineFailure:
        texts = tuple(_text(document) for document in documents)
        query_tokens = self._tokenizer.count(query)
        prompts = tuple(query_tokens + self._tokenizer.count(text) for text in texts)
        return self._fit(PoolingRequest(kind=kind, prompts=prompts, texts=texts, query=query, top_n=top_n))

    def _fit(self, request: PoolingRequest) -> PoolingRequest | EngineFailure:
        return prompt_too_long(self._model.max_model_len) if max(request.prompts, default=0) > self._model.max_model_len else request


def pool_body(request: PoolingRequest, answer_id: str, created: int, model: str) -> bytes:
    """Return the answer. `answer_id` is the bare id, without its prefix; `created` seconds since the epoch."""
    tokens = sum(request.prompts)
    usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    if request.kind == "rerank":
        return msgspec.json.encode({"id": f"score-{answer_id}", "model": model, "usage": usage, "results": _ranked(request)})
    if request.kind == "classify":
        data = [
            {"index": index, "label": "Default", "probs": vector(text, 2), "num_classes": 2} for index, text in enumerate(request.texts)
        ]
        head = {"id": f"classify-{answer_id}", "object": "list", "created": created, "model": model}
        return msgspec.json.encode({**head, "data": data, "usage": usage})
    usage |= {"completion_tokens": 0, "prompt_tokens_details": None, "completion_tokens_details": None}
    if request.kind == "score":
        prefix = "score"
        data = [{"index": index, "object": "score", "score": similarity(request.query, text)} for index, text in enumerate(request.texts)]
    else:
        prefix = "embd"
        data = [{"index": index, "object": "embedding", "embedding": _embedding(text, request)} for index, text in enumerate(request.texts)]
    answer = {"id": f"{prefix}-{answer_id}", "object": "list", "created": created, "model": model, "data": data, "usage": usage}
    return msgspec.json.encode(answer)


def count_body(request: PoolingRequest, _answer_id: str, _created: int, _model: str) -> bytes:
    """Return an answer of /v1/messages/count_tokens."""
    return msgspec.json.encode({"input_tokens": request.count})


def input_tokens_body(request: PoolingRequest, _answer_id: str, _created: int, _model: str) -> bytes:
    """Return an answer of /v1/responses/input_tokens."""
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": request.count})


def detokenize_body(request: PoolingRequest, _answer_id: str, _created: int, _model: str) -> bytes:
    """Return an answer of /detokenize: one word for each token."""
    return msgspec.json.encode({"prompt": " ".join(["word"] * request.count)})


def vector(text: str, dimensions: int) -> tuple[float, ...]:
    """Return a unit vector that depends on the text alone."""
    raw = shake_256(text.encode("utf-8", "surrogatepass")).digest(4 * dimensions)
    numbers = unpack(f"<{dimensions}i", raw)
    norm = sqrt(sum(number * number for number in numbers))
    return tuple(number / norm for number in numbers)


def similarity(query: str, text: str) -> float:
    """Return the share of the query's words that the text holds, between 0.01 and 0.99."""
    query_words = set(query.lower().split())
    shared = query_words & set(text.lower().split())
    return 0.01 + 0.98 * len(shared) / max(1, len(query_words))


def _ranked(request: PoolingRequest) -> list[dict[str, Any]]:
    results = [
        {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": similarity(request.query, text)}
        for index, text in enumerate(request.texts)
    ]
    results.sort(key=lambda result: -float(result["relevance_score"]))  # type: ignore[arg-type]
    return results[: request.top_n]


def _embedding(text: str, request: PoolingRequest) -> Any:
    numbers = vector(text, request.dimensions)
    return b64encode(pack(f"<{len(numbers)}f", *numbers)).decode() if request.base64 else numbers


def _text(value: Any) -> str:
    """Return the text of a query or document: text, or an object with text."""
    return value if isinstance(value, str) else str(value.get("text") or "") if isinstance(value, dict) else ""
