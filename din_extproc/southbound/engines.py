"""Every engine that can stand behind a pool: what its OpenAI interface calls otherwise, and its own interface where it has one."""

from msgspec import Struct

from din_extproc.domain.request import GENERATING, Operation
from din_extproc.southbound import llamacpp, ollama, sglang, tensorrt_llm, tgi, triton, vllm
from din_extproc.southbound.dialect import Dialect
from din_extproc.southbound.parameters import Table, unfolding


class EngineAdapter(Struct, frozen=True):
    """What is known of an engine."""

    openai: Table
    """Parameters that its OpenAI interface calls otherwise, or doesn't have."""
    native: Dialect | None = None
    operations: frozenset[Operation] | None = None
    """What its OpenAI interface serves; None: every operation, by the model that it runs."""


_CHATS = frozenset({Operation.CHAT, Operation.COMPLETIONS})

ENGINES: dict[str, EngineAdapter] = {
    "vllm": EngineAdapter(vllm.OPENAI),
    "sglang": EngineAdapter(unfolding(sglang.OPENAI)),
    "tensorrt_llm": EngineAdapter(unfolding(tensorrt_llm.OPENAI), operations=_CHATS | {Operation.RESPONSES, Operation.EMBEDDINGS}),
    "llamacpp": EngineAdapter(unfolding(llamacpp.OPENAI)),
    "tgi": EngineAdapter(unfolding(tgi.OPENAI), tgi.TGI, _CHATS),
    "ollama": EngineAdapter(unfolding(ollama.OPENAI), ollama.OLLAMA, GENERATING | {Operation.EMBEDDINGS}),
    "triton": EngineAdapter(unfolding(triton.OPENAI), triton.TRITON, _CHATS | {Operation.EMBEDDINGS}),
}
_UNKNOWN = EngineAdapter({})


def engine(name: str) -> EngineAdapter:
    """What is known of this engine; of one that nobody knows, nothing."""
    return ENGINES.get(name, _UNKNOWN)


def openai_operations(name: str) -> frozenset[Operation] | None:
    """What the engine's OpenAI interface serves; None: every operation, by the model that it runs."""
    return engine(name).operations


def native_operations(name: str) -> frozenset[Operation] | None:
    """What the engine's own interface serves, with what the same server answers in OpenAI's words; None: it has no such interface."""
    dialect = engine(name).native
    return None if dialect is None else dialect.operations | dialect.passed


def native_path(path: str) -> bool:
    """Whether this is a path of some engine's own interface."""
    return any(known.native.has_path(path) for known in ENGINES.values() if known.native is not None)
