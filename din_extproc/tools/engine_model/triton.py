"""Triton's own paths for one model: `/v2/models/NAME/generate`, `/generate_stream` and `/infer`, as the TensorRT-LLM backend answers there.

By its documentation (the generate extension, KServe v2). Checked against `tritonclient` 2.73, which takes pages, tensors and refusals for
Triton's; not against a running Triton.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec

from din_extproc.tools.engine_model.answers import Identity, Reporting
from din_extproc.tools.engine_model.api import ApiEmulation, EngineDialect, PoolingApiEmulation, chats_only, embedding_only, openai
from din_extproc.tools.engine_model.errors import EngineFailure
from din_extproc.tools.engine_model.fields import decode_body
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.pooling import PoolingRequest, PoolReader, similarity, vector
from din_extproc.tools.engine_model.requests import EngineRequest, Reader
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer

_encode = msgspec.json.encode
_JSON = "application/json"
_SERVER = {"name": "triton", "version": "2.60.0", "extensions": ["classification", "model_repository", "generate"]}
_TENSORS = {
    "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1, 1]}],
    "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, -1]}],
}
_NAMES = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "random_seed": "seed", "stop_words": "stop"}


def triton(model: ModelSpec, tokenizer: SimulatedTokenizer) -> EngineDialect:
    """Return Triton's paths beside OpenAI's, which its frontend has."""
    reader, pooled = Reader(model, tokenizer), PoolReader(model, tokenizer)
    base = openai(model, tokenizer)
    generating, pooling = chats_only(base), embedding_only(base)
    pages: dict[str, object] = {"/v2": _SERVER, "/v2/health/live": {}, "/v2/health/ready": {}}
    for name in model.names:
        path = f"/v2/models/{quote(name, safe='')}"
        generating[f"{path}/generate"] = ApiEmulation(_make_reader(reader, stream=False), _make_body, _TritonStream)
        generating[f"{path}/generate_stream"] = ApiEmulation(_make_reader(reader, stream=True), _make_body, _TritonStream)
        pooling[f"{path}/infer"] = PoolingApiEmulation(_make_inference_reader(pooled), _make_inference_body)
        pages |= {f"{path}/ready": {}, path: {"name": name, "versions": ["1"], "platform": "python", **_TENSORS}}
    return EngineDialect(generating, pooling, reword, pages)


def reword(failure: EngineFailure) -> EngineFailure:
    """Translate an error: Triton's are one string."""
    decoded = msgspec.json.decode(failure.body)
    error = decoded.get("error", decoded.get("detail")) if isinstance(decoded, dict) else None
    return EngineFailure(failure.status, _encode({"error": error.get("message") if isinstance(error, dict) else error}), failure.headers)


def _make_reader(reader: Reader, *, stream: bool) -> Callable[[bytes, str], EngineRequest | EngineFailure]:
    def read(body: bytes, _content_type: str) -> EngineRequest | EngineFailure:
        given = decode_body(body, _JSON)
        if isinstance(given, EngineFailure):
            return reword(given)
        flat = {**given, **(given.get("parameters") or {})}
        meant = {name: flat[own] for own, name in _NAMES.items() if own in flat}
        found = reader.completion(_encode({**meant, "prompt": flat.get("text_input"), "stream": stream}), _JSON)
        return reword(found) if isinstance(found, EngineFailure) else found

    return read


def _make_body(identity: Identity, request: EngineRequest, _reporting: Reporting) -> bytes:
    return _encode(_make_output(identity, request.scripts[0].text))


def _make_output(identity: Identity, text: str) -> dict[str, Any]:
    fields = {"cum_log_probs": 0.0, "model_name": identity.model, "model_version": "1", "output_log_probs": [0.0]}
    return {**fields, "sequence_end": False, "sequence_id": 0, "sequence_start": False, "text_output": text}


class _TritonStream:
    """One event per token; nothing marks the last."""

    def __init__(self, identity: Identity, request: EngineRequest, _reporting: Reporting) -> None:
        self._identity = identity
        self._request = request

    def opening(self) -> bytes:
        return b""

    def token(self, index: int, position: int, *, finish: str | None = None) -> bytes:  # noqa: ARG002 - it never says why
        return b"data: " + _encode(_make_output(self._identity, self._request.scripts[index].pieces[position])) + b"\n\n"

    def closing(self) -> bytes:
        return b""

    def failed(self, message: str, *, as_text: bool) -> bytes:  # noqa: ARG002 - it has one way
        return b"data: " + _encode({"error": message}) + b"\n\n"

    def aborted(self) -> bytes:
        return b""


def _make_inference_reader(reader: PoolReader) -> Callable[[bytes, str], PoolingRequest | EngineFailure]:
    def read(body: bytes, _content_type: str) -> PoolingRequest | EngineFailure:
        given = decode_body(body, _JSON)
        if isinstance(given, EngineFailure):
            return reword(given)
        tensors = {tensor["name"]: tensor["data"] for tensor in given.get("inputs") or ()}
        if "text" in tensors:
            found = reader.embeddings(_encode({"input": tensors["text"]}), _JSON)
        elif {"query", "document"} <= tensors.keys():
            found = reader.rerank(_encode({"query": tensors["query"][0], "documents": tensors["document"]}), _JSON)
        else:
            return EngineFailure(400, b'{"error":"expected the inputs of the model"}')
        return reword(found) if isinstance(found, EngineFailure) else found

    return read


def _make_inference_body(request: PoolingRequest, _answer_id: str, _created: int, model: str) -> bytes:
    if request.kind == "rerank":
        shape, data = [len(request.texts), 1], [similarity(request.query, text) for text in request.texts]
    else:
        shape, data = (
            [len(request.texts), request.dimensions],
            [number for text in request.texts for number in vector(text, request.dimensions)],
        )
    output = {"name": "output", "datatype": "FP32", "shape": shape, "data": data}
    return _encode({"model_name": model, "model_version": "1", "outputs": [output]})
