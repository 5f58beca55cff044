"""The faces of an engine: which paths it has, how a body there becomes work, and in whose words the work is answered.

Rule: whatever the words, the work is the same: the same prompt gets the same text and the same count from every face.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from din_extproc.tools.engine_model.agent_apis import (
    MessageStream,
    ResponseStream,
    message_body,
    read_message,
    read_response,
    response_body,
)
from din_extproc.tools.engine_model.answers import EventStream, Identity, Reporting, chat_body, completion_body
from din_extproc.tools.engine_model.errors import EngineFailure
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.pooling import PoolingRequest, PoolReader, pool_body
from din_extproc.tools.engine_model.requests import EngineRequest, Reader
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer

SSE = "text/event-stream; charset=utf-8"


class EngineStream(Protocol):
    """Writes the parts of one streamed answer."""

    def opening(self) -> bytes:
        """What comes before the first token."""

    def token(self, index: int, position: int, *, finish: str | None = None) -> bytes:
        """One token of one choice; `finish` ends the choice here, against its script."""

    def closing(self) -> bytes:
        """What comes after the last token."""

    def failed(self, message: str, *, as_text: bool) -> bytes:
        """An error inside the stream, and what may follow it. `as_text`: as a bare string, where the engine has two ways."""

    def aborted(self) -> bytes:
        """What ends a stream that the engine gives up."""


class ApiEmulation(Struct, frozen=True):
    """A path that generates."""

    read: Callable[[bytes, str], EngineRequest | EngineFailure]
    """Given body and content type."""
    whole: Callable[[Identity, EngineRequest, Reporting], bytes]
    stream: Callable[[Identity, EngineRequest, Reporting], EngineStream]
    prefix: str = ""
    """Of the answers' ids."""
    content_type: str = SSE
    """Of streams."""
    headers: Callable[[EngineRequest], Mapping[str, str]] = lambda _ask: {}
    """Of whole answers."""


class PoolingApiEmulation(Struct, frozen=True):
    """A path that embeds or ranks."""

    read: Callable[[bytes, str], PoolingRequest | EngineFailure]
    whole: Callable[[PoolingRequest, str, int, str], bytes]
    """Given what was asked, the answer's bare id, seconds since the epoch, and the model's name."""


class EngineDialect(Struct, frozen=True):
    """One engine's interface."""

    generating: Mapping[str, ApiEmulation]
    pooling: Mapping[str, PoolingApiEmulation]
    reword: Callable[[EngineFailure], EngineFailure] = lambda failure: failure
    """An error of vLLM's in this engine's words."""
    pages: Mapping[str, object] = {}
    """What is read with GET."""


def openai(model: ModelSpec, tokenizer: SimulatedTokenizer) -> EngineDialect:
    """VLLM's paths, and everybody's who speaks OpenAI's words."""
    reader, pooled = Reader(model, tokenizer), PoolReader(model, tokenizer)
    chat = ApiEmulation(reader.chat, chat_body, lambda *about: EventStream(*about, chat=True), "chatcmpl-")
    completion = ApiEmulation(reader.completion, completion_body, lambda *about: EventStream(*about, chat=False), "cmpl-")
    rerank, score = PoolingApiEmulation(pooled.rerank, pool_body), PoolingApiEmulation(pooled.score, pool_body)
    return EngineDialect(
        {
            "/v1/chat/completions": chat,
            "/v1/completions": completion,
            "/v1/responses": ApiEmulation(read_response(reader), response_body, ResponseStream, "resp_"),
            "/v1/messages": ApiEmulation(read_message(reader), message_body, MessageStream, "msg_"),
        },
        {
            "/v1/embeddings": PoolingApiEmulation(pooled.embeddings, pool_body),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
            **dict.fromkeys(("/score", "/v1/score"), score),
        },
    )


def chats_only(face: EngineDialect) -> dict[str, ApiEmulation]:
    """What generates there, of an engine that has no other than chats and completions in OpenAI's words."""
    return {path: face.generating[path] for path in ("/v1/chat/completions", "/v1/completions")}


def embedding_only(face: EngineDialect) -> dict[str, PoolingApiEmulation]:
    """What pools there, of an engine whose OpenAI interface ranks nothing."""
    return {path: surface for path, surface in face.pooling.items() if path == "/v1/embeddings"}
