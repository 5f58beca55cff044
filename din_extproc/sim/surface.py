"""The faces of an engine: which paths it has, how a body there becomes work, and in whose words the work is answered.

Rule: whatever the words, the work is the same: the same prompt gets the same text and the same count from every face.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from din_extproc.sim.answers import EventStream, Identity, Reporting, chat_body, completion_body
from din_extproc.sim.errors import Failure
from din_extproc.sim.model import ModelSpec
from din_extproc.sim.pooling import PoolAsk, PoolReader, pool_body
from din_extproc.sim.requests import Ask, Reader
from din_extproc.sim.tokens import Tokenizer

SSE = "text/event-stream; charset=utf-8"


class Stream(Protocol):
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


class Surface(Struct, frozen=True):
    """A path that generates."""

    read: Callable[[bytes, str], Ask | Failure]
    """Given body and content type."""
    whole: Callable[[Identity, Ask, Reporting], bytes]
    stream: Callable[[Identity, Ask, Reporting], Stream]
    prefix: str = ""
    """Of the answers' ids."""
    content_type: str = SSE
    """Of streams."""
    headers: Callable[[Ask], Mapping[str, str]] = lambda _ask: {}
    """Of whole answers."""


class PoolSurface(Struct, frozen=True):
    """A path that embeds or ranks."""

    read: Callable[[bytes, str], PoolAsk | Failure]
    whole: Callable[[PoolAsk, str, int, str], bytes]
    """Given what was asked, the answer's bare id, seconds since the epoch, and the model's name."""


class Face(Struct, frozen=True):
    """One engine's interface."""

    generating: Mapping[str, Surface]
    pooling: Mapping[str, PoolSurface]
    reword: Callable[[Failure], Failure] = lambda failure: failure
    """An error of vLLM's in this engine's words."""
    pages: Mapping[str, object] = {}
    """What is read with GET."""


def openai(model: ModelSpec, tokenizer: Tokenizer) -> Face:
    """VLLM's paths, and everybody's who speaks OpenAI's words."""
    reader, pooled = Reader(model, tokenizer), PoolReader(model, tokenizer)
    chat = Surface(reader.chat, chat_body, lambda *about: EventStream(*about, chat=True), "chatcmpl-")
    completion = Surface(reader.completion, completion_body, lambda *about: EventStream(*about, chat=False), "cmpl-")
    rerank, score = PoolSurface(pooled.rerank, pool_body), PoolSurface(pooled.score, pool_body)
    return Face(
        {"/v1/chat/completions": chat, "/v1/completions": completion},
        {
            "/v1/embeddings": PoolSurface(pooled.embeddings, pool_body),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
            **dict.fromkeys(("/score", "/v1/score"), score),
        },
    )


def embedding_only(face: Face) -> dict[str, PoolSurface]:
    """What pools there, of an engine whose OpenAI interface ranks nothing."""
    return {path: surface for path, surface in face.pooling.items() if path == "/v1/embeddings"}
