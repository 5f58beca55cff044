"""The engines whose interface the modelled engine can have."""

from collections.abc import Callable

from din_extproc.tools.engine_model.api import EngineDialect, openai
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.ollama import ollama
from din_extproc.tools.engine_model.tensorrt_llm import tensorrt_llm
from din_extproc.tools.engine_model.tgi import tgi
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer
from din_extproc.tools.engine_model.triton import triton

DIALECTS: dict[str, Callable[[ModelSpec, SimulatedTokenizer], EngineDialect]] = {
    "vllm": openai,
    "ollama": ollama,
    "tgi": tgi,
    "triton": triton,
    "tensorrt_llm": tensorrt_llm,
}
