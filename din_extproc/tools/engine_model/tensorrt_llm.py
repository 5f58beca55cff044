"""`trtllm-serve`: OpenAI's paths, with errors in its own shape (`object: error`, no `error` around it).

By its documentation. Not compared with a running TensorRT-LLM.
"""

import msgspec

from din_extproc.tools.engine_model.api import EngineDialect, embedding_only, openai
from din_extproc.tools.engine_model.errors import EngineFailure
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer


def tensorrt_llm(model: ModelSpec, tokenizer: SimulatedTokenizer) -> EngineDialect:
    """Return OpenAI's paths."""
    base = openai(model, tokenizer)
    return EngineDialect(base.generating, embedding_only(base), reword)


def reword(failure: EngineFailure) -> EngineFailure:
    """Translate an error: the error object itself, marked as one."""
    decoded = msgspec.json.decode(failure.body)
    error = decoded.get("error") if isinstance(decoded, dict) else None
    if not isinstance(error, dict):
        return failure
    return EngineFailure(failure.status, msgspec.json.encode({"object": "error", **error}), failure.headers)
