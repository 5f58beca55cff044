"""The supported engines: deviations of their OpenAI API, and their own API if they have one."""

from collections.abc import Mapping

from msgspec import Struct

from din_extproc.domain.request import COUNTING, GENERATING, POOLING, TOKENIZING, TRANSCRIBING, Operation
from din_extproc.southbound import anthropic, llamacpp, messages, ollama, openai_api, sglang, tensorrt_llm, tgi, triton, vllm
from din_extproc.southbound.dialect import Dialect
from din_extproc.southbound.parameters import Table, with_structured_outputs


class EngineAdapter(Struct, frozen=True):
    """The APIs of one engine."""

    openai: Table
    """Parameters that its OpenAI API names differently or lacks."""
    native: Dialect | None = None
    operations: frozenset[Operation] | None = None
    """The operations of its own OpenAI interface; None: all, depending on the model. Operations of a configuration's own
    name their engines themselves."""
    stream_usage: bool = True
    """Every version takes `stream_options`."""
    roles: Mapping[str, str] = {}
    """Roles whose messages its OpenAI interface drops without a word, and what they are called instead."""
    first_priority: int = 0
    """The sign of `priority` where smaller (1) or larger (-1) ones come first; 0: it has none."""
    caps_output: bool = False
    """It serves any `max_tokens` and stops when the context is full."""


_CHATS = frozenset({Operation.CHAT, Operation.COMPLETIONS})

ENGINES: dict[str, EngineAdapter] = {
    "vllm": EngineAdapter(
        vllm.OPENAI, operations=GENERATING | POOLING | TOKENIZING | TRANSCRIBING | {Operation.COUNT_TOKENS}, first_priority=1
    ),
    "sglang": EngineAdapter(
        with_structured_outputs(sglang.OPENAI),
        operations=GENERATING | TOKENIZING | {Operation.EMBEDDINGS, Operation.RERANK},
        first_priority=-1,
    ),
    "tensorrt_llm": EngineAdapter(
        with_structured_outputs(tensorrt_llm.OPENAI), operations=_CHATS | {Operation.RESPONSES, Operation.EMBEDDINGS}
    ),
    "llamacpp": EngineAdapter(
        with_structured_outputs(llamacpp.OPENAI),
        operations=GENERATING | COUNTING | {Operation.EMBEDDINGS, Operation.RERANK, Operation.TRANSCRIPTIONS},
        caps_output=True,
    ),
    "tgi": EngineAdapter(with_structured_outputs(tgi.OPENAI), tgi.TGI, _CHATS, stream_usage=False),
    "ollama": EngineAdapter(
        with_structured_outputs(ollama.OPENAI),
        ollama.OLLAMA,
        GENERATING | {Operation.EMBEDDINGS},
        roles={"developer": "system"},
        caps_output=True,
    ),
    "openai": EngineAdapter(with_structured_outputs(openai_api.OPENAI), operations=openai_api.OPERATIONS),
    "azure_openai": EngineAdapter(with_structured_outputs(openai_api.OPENAI), operations=openai_api.AZURE),
    "anthropic": EngineAdapter({}, anthropic.ANTHROPIC, frozenset()),
    "triton": EngineAdapter(with_structured_outputs(triton.OPENAI), triton.TRITON, _CHATS | {Operation.EMBEDDINGS}, stream_usage=False),
}
_UNKNOWN = EngineAdapter({})
_OVER_CHAT = {
    name: messages.messages_over_chat(adapter.openai)
    for name, adapter in ENGINES.items()
    if adapter.operations is not None and Operation.CHAT in adapter.operations and Operation.MESSAGES not in adapter.operations
}
"""For the engines that serve `/v1/messages` only by translation to chats."""


def find_engine(name: str) -> EngineAdapter:
    """Return the engine's adapter; an empty one for an unknown engine."""
    return ENGINES.get(name, _UNKNOWN)


def openai_operations(name: str) -> frozenset[Operation] | None:
    """Return what the engine's OpenAI API serves, by translation too; None: any operation, depending on the model."""
    own = find_engine(name).operations
    return own | {Operation.MESSAGES} if own is not None and name in _OVER_CHAT else own


def find_dialect(name: str, api: str, operation: Operation) -> Dialect | None:
    """Return the dialect in which an engine is asked for an operation; None: in the client's own words."""
    native = find_engine(name).native if api == "native" else None
    if native is not None and operation not in native.openai_operations:
        return native
    return _OVER_CHAT.get(name) if operation is Operation.MESSAGES and native is None else None


def native_operations(name: str) -> frozenset[Operation] | None:
    """Return the operations of the engine's own API and of the OpenAI API of the same server; None if it has no API of its own."""
    dialect = find_engine(name).native
    return None if dialect is None else dialect.operations | dialect.openai_operations


def is_native_path(path: str) -> bool:
    """Return whether the path belongs to any engine's own API."""
    return any(known.native.has_path(path) for known in ENGINES.values() if known.native is not None)
