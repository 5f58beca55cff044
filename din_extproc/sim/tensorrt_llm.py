"""`trtllm-serve`: OpenAI's paths, with errors in its own shape (`object: error`, no `error` around it).

By its documentation. Not compared with a running TensorRT-LLM.
"""

import msgspec

from din_extproc.sim.errors import Failure
from din_extproc.sim.model import ModelSpec
from din_extproc.sim.surface import Face, embedding_only, openai
from din_extproc.sim.tokens import Tokenizer


def tensorrt_llm(model: ModelSpec, tokenizer: Tokenizer) -> Face:
    """OpenAI's paths."""
    base = openai(model, tokenizer)
    return Face(base.generating, embedding_only(base), reword)


def reword(failure: Failure) -> Failure:
    """The error object itself, marked as one."""
    decoded = msgspec.json.decode(failure.body)
    error = decoded.get("error") if isinstance(decoded, dict) else None
    if not isinstance(error, dict):
        return failure
    return Failure(failure.status, msgspec.json.encode({"object": "error", **error}), failure.headers)
