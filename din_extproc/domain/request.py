"""What a client asks for: the request's head, and the intent read from head and body.

Rule: nothing here knows how a request arrived or where it goes.
"""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct


class Operation(StrEnum):
    """The northbound interfaces, by their canonical path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    MODELS = "/v1/models"


class Priority(StrEnum):
    """How long a tenant's request is willing to stand back, highest first."""

    CRITICAL = "critical"
    STANDARD = "standard"
    BATCH = "batch"


class RequestHead(Struct, frozen=True, gc=False):
    """A request's pseudo headers and headers: names in lower case, values as text (latin-1)."""

    method: str
    path: str
    """`:path` as sent, with its query string."""
    headers: Mapping[str, str]

    def header(self, name: str) -> str:
        """The header's value, "" when it is not there."""
        return self.headers.get(name, "")


class Estimate(Struct, frozen=True, gc=False):
    """How many tokens a prompt holds, as far as its bytes tell (see `intent/estimate.py`)."""

    tokens: int
    features: tuple[float, ...] = ()
    """What the estimate was made from: units per script class, in the order of `intent.estimate.CLASSES`. Learned from at settlement."""
    fixed: int = 0
    """Tokens inside `tokens` that no class explains: per-message overhead, media parts, token ids."""
    exact: bool = False
    """Counted by the model's own tokenizer."""
    longest: "Estimate | None" = None
    """Of several inputs, each of which the engine reads by itself, the longest: it has to fit into a context, `tokens` is what all of them
    cost. None: it is one."""


class Intent(Struct, frozen=True, gc=False):
    """What one request wants (R01). Token counts are whole tokens, times whole milliseconds."""

    operation: Operation
    model: str
    """As the client wrote it: an alias, a physical name, or either with `@constraint`."""
    estimate: Estimate
    output_tokens: int | None = None
    """The largest output that an engine may give, all answers together. None: the client did not say."""
    stream: bool = False
    wants_usage: bool = False
    """The client asked for `stream_options.include_usage` itself."""
    timeout_ms: int | None = None
    task_tier: str = ""
    version: str = ""
    """The client's version constraint, as written. "" allows every version."""
    priority: Priority | None = None
    answers: int = 1
    """How many it asks for: one to each prompt, times the choices."""
    output_each: int | None = None
    """The least that an engine may take for the limit of one answer: that much has to fit beside its prompt. None: it did not say."""

    @property
    def prompt_tokens(self) -> int:
        """Estimated prompt tokens."""
        return self.estimate.tokens
