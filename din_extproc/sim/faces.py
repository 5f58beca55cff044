"""Every engine whose face the modelled one can put on."""

from collections.abc import Callable

from din_extproc.sim.model import ModelSpec
from din_extproc.sim.ollama import ollama
from din_extproc.sim.surface import Face, openai
from din_extproc.sim.tensorrt_llm import tensorrt_llm
from din_extproc.sim.tgi import tgi
from din_extproc.sim.tokens import Tokenizer
from din_extproc.sim.triton import triton

FACES: dict[str, Callable[[ModelSpec, Tokenizer], Face]] = {
    "vllm": openai,
    "ollama": ollama,
    "tgi": tgi,
    "triton": triton,
    "tensorrt_llm": tensorrt_llm,
}
