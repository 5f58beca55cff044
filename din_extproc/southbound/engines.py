"""The supported engines: deviations of their OpenAI API, and their own API if they have one."""

from msgspec import Struct

from din_extproc.domain.request import GENERATING, Operation
from din_extproc.southbound import llamacpp, ollama, sglang, tensorrt_llm, tgi, triton, vllm
from din_extproc.southbound.dialect import Dialect
from din_extproc.southbound.parameters import Table, with_structured_outputs


class EngineAdapter(Struct, frozen=True):
    """The APIs of one engine."""

    openai: Table
    """Parameters that its OpenAI API names differently or lacks."""
    native: Dialect | None = None
    operations: frozenset[Operation] | None = None
    """Operations of its OpenAI API; None: any, depending on the model."""


_CHATS = frozenset({Operation.CHAT, Operation.COMPLETIONS})

ENGINES: dict[str, EngineAdapter] = {
    "vllm": EngineAdapter(vllm.OPENAI),
    "sglang": EngineAdapter(with_structured_outputs(sglang.OPENAI)),
    "tensorrt_llm": EngineAdapter(
        with_structured_outputs(tensorrt_llm.OPENAI), operations=_CHATS | {Operation.RESPONSES, Operation.EMBEDDINGS}
    ),
    "llamacpp": EngineAdapter(with_structured_outputs(llamacpp.OPENAI)),
    "tgi": EngineAdapter(with_structured_outputs(tgi.OPENAI), tgi.TGI, _CHATS),
    "ollama": EngineAdapter(with_structured_outputs(ollama.OPENAI), ollama.OLLAMA, GENERATING | {Operation.EMBEDDINGS}),
    "triton": EngineAdapter(with_structured_outputs(triton.OPENAI), triton.TRITON, _CHATS | {Operation.EMBEDDINGS}),
}
_UNKNOWN = EngineAdapter({})


def find_engine(name: str) -> EngineAdapter:
    """Return the engine's adapter; an empty one for an unknown engine."""
    return ENGINES.get(name, _UNKNOWN)


def openai_operations(name: str) -> frozenset[Operation] | None:
    """Return the operations of the engine's OpenAI API; None: any, depending on the model."""
    return find_engine(name).operations


def native_operations(name: str) -> frozenset[Operation] | None:
    """Return the operations of the engine's own API and of the OpenAI API of the same server; None if it has no API of its own."""
    dialect = find_engine(name).native
    return None if dialect is None else dialect.operations | dialect.openai_operations


def is_native_path(path: str) -> bool:
    """Return whether the path belongs to any engine's own API."""
    return any(known.native.has_path(path) for known in ENGINES.values() if known.native is not None)
