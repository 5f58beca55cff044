"""The interfaces of a modelled engine: its paths, how a body becomes work, and in which format the result is returned.

Rule: the interface does not change the work: a prompt gets the same text and token count over each of them.
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
from din_extproc.tools.engine_model.audio import read_audio, transcription_body
from din_extproc.tools.engine_model.errors import EngineFailure
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.pooling import (
    PoolingRequest,
    PoolReader,
    count_body,
    detokenize_body,
    input_tokens_body,
    pool_body,
)
from din_extproc.tools.engine_model.requests import EngineRequest, Reader
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer

SSE = "text/event-stream; charset=utf-8"


class EngineStream(Protocol):
    """Writes the parts of one streamed answer."""

    def opening(self) -> bytes:
        """Return the events before the first token."""

    def token(self, index: int, position: int, *, finish: str | None = None) -> bytes:
        """Return one token of one choice; `finish` ends the choice here, against its script."""

    def closing(self) -> bytes:
        """Return the events after the last token."""

    def failed(self, message: str, *, as_text: bool) -> bytes:
        """Return an error inside the stream and its end. `as_text`: as a bare string, if the engine has two forms."""

    def aborted(self) -> bytes:
        """Return the end of a stream that the engine aborts."""


class ApiEmulation(Struct, frozen=True):
    """A path that generates text."""

    read: Callable[[bytes, str], EngineRequest | EngineFailure]
    """Parses body and content type."""
    whole: Callable[[Identity, EngineRequest, Reporting], bytes]
    stream: Callable[[Identity, EngineRequest, Reporting], EngineStream]
    prefix: str = ""
    """Prefix of the answers' ids."""
    content_type: str = SSE
    """Content type of streams."""
    headers: Callable[[EngineRequest], Mapping[str, str]] = lambda _request: {}
    """Headers of complete answers."""


class PoolingApiEmulation(Struct, frozen=True):
    """A path that embeds or ranks."""

    read: Callable[[bytes, str], PoolingRequest | EngineFailure]
    whole: Callable[[PoolingRequest, str, int, str], bytes]
    """Builds the answer from the request, its bare id, seconds since the epoch, and the model's name."""


class EngineDialect(Struct, frozen=True):
    """One engine's interface."""

    generating: Mapping[str, ApiEmulation]
    pooling: Mapping[str, PoolingApiEmulation]
    reword: Callable[[EngineFailure], EngineFailure] = lambda failure: failure
    """Translates an error of vLLM's into this engine's format."""
    pages: Mapping[str, object] = {}
    """The pages that are read with GET."""
    counting: Mapping[str, PoolingApiEmulation] = {}
    """Answers that every model gives without computing."""


def openai(model: ModelSpec, tokenizer: SimulatedTokenizer) -> EngineDialect:
    """Return the paths of vLLM, and of every engine with OpenAI's API."""
    reader, pooled = Reader(model, tokenizer), PoolReader(model, tokenizer)
    chat = ApiEmulation(reader.chat, chat_body, lambda *about: EventStream(*about, chat=True), "chatcmpl-")
    completion = ApiEmulation(reader.completion, completion_body, lambda *about: EventStream(*about, chat=False), "cmpl-")
    rerank, score = PoolingApiEmulation(pooled.rerank, pool_body), PoolingApiEmulation(pooled.score, pool_body)
    audio = PoolingApiEmulation(read_audio(model), transcription_body)
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
            "/pooling": PoolingApiEmulation(pooled.embeddings, pool_body),
            "/classify": PoolingApiEmulation(pooled.classify, pool_body),
        },
        counting={
            "/v1/messages/count_tokens": PoolingApiEmulation(counted(read_message(reader)), count_body),
            "/v1/responses/input_tokens": PoolingApiEmulation(counted(read_response(reader)), input_tokens_body),
            "/detokenize": PoolingApiEmulation(pooled.detokenize, detokenize_body),
            **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), audio),
        },
    )


def counted(read: Callable[[bytes, str], EngineRequest | EngineFailure]) -> Callable[[bytes, str], PoolingRequest | EngineFailure]:
    """Return what reads a body only to count its prompt."""

    def read_count(body: bytes, content_type: str) -> PoolingRequest | EngineFailure:
        request = read(body, content_type)
        return request if isinstance(request, EngineFailure) else PoolingRequest("count", (), (), count=request.prompt_tokens)

    return read_count


def chats_only(dialect: EngineDialect) -> dict[str, ApiEmulation]:
    """Return the generating paths of an engine with only chats and completions of OpenAI's API."""
    return {path: dialect.generating[path] for path in ("/v1/chat/completions", "/v1/completions")}


def embedding_only(dialect: EngineDialect) -> dict[str, PoolingApiEmulation]:
    """Return the pooling paths of an engine whose OpenAI API has no ranking."""
    return {path: emulation for path, emulation in dialect.pooling.items() if path == "/v1/embeddings"}
