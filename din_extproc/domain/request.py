"""A client's request: its head, and the intent read from head and body.

Nothing here depends on the transport or the destination.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct


class Operation(StrEnum):
    """The northbound interfaces, named by their canonical path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"
    SCORE = "/v1/score"
    POOLING = "/pooling"
    CLASSIFY = "/classify"
    RESPONSES = "/v1/responses"
    INPUT_TOKENS = "/v1/responses/input_tokens"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    SPEECH = "/v1/audio/speech"
    IMAGES = "/v1/images/generations"
    MODELS = "/v1/models"


class Metering(StrEnum):
    """What an operation is charged for. Every operation counts as a request."""

    TOKENS = "prompt and output"
    """As reported; the estimate and what was counted where nothing is."""
    PROMPT = "prompt"
    """As reported, with an output where one is; the prompt's estimate where nothing is."""
    REQUEST = "request"
    """No tokens: the engine computes nothing with the model."""


class OperationSpec(Struct, frozen=True):
    """One operation. Each takes JSON by POST with the model's name under `model`, but for the model list."""

    metering: Metering = Metering.TOKENS
    paths: tuple[str, ...] = ()
    """Further paths that mean the same; the node is asked at the canonical one."""
    begins_soon: bool = False
    """The answer begins at once, whole or not."""


_POOLED = OperationSpec(Metering.PROMPT, begins_soon=True)
_COUNTED = OperationSpec(Metering.REQUEST, begins_soon=True)
OPERATIONS: Mapping[Operation, OperationSpec] = {
    Operation.CHAT: OperationSpec(),
    Operation.COMPLETIONS: OperationSpec(),
    Operation.RESPONSES: OperationSpec(),
    Operation.MESSAGES: OperationSpec(),
    Operation.EMBEDDINGS: _POOLED,
    Operation.RERANK: OperationSpec(Metering.PROMPT, ("/rerank", "/v2/rerank"), begins_soon=True),
    Operation.SCORE: OperationSpec(Metering.PROMPT, ("/score",), begins_soon=True),
    Operation.POOLING: _POOLED,
    Operation.CLASSIFY: _POOLED,
    Operation.COUNT_TOKENS: _COUNTED,
    Operation.INPUT_TOKENS: _COUNTED,
    Operation.TOKENIZE: _COUNTED,
    Operation.DETOKENIZE: _COUNTED,
    Operation.SPEECH: OperationSpec(Metering.PROMPT),
    Operation.IMAGES: OperationSpec(Metering.PROMPT),
    Operation.MODELS: OperationSpec(Metering.REQUEST),
}
UNCHARGED = frozenset(operation for operation, spec in OPERATIONS.items() if spec.metering is Metering.REQUEST)
GENERATING = frozenset(operation for operation, spec in OPERATIONS.items() if spec.metering is Metering.TOKENS)
"""What a model that generates text is asked for."""
POOLING = frozenset({Operation.EMBEDDINGS, Operation.RERANK, Operation.SCORE, Operation.POOLING, Operation.CLASSIFY})
"""What an embedding or ranking model is asked for."""
TOKENIZING = frozenset({Operation.TOKENIZE, Operation.DETOKENIZE})
COUNTING = frozenset({Operation.COUNT_TOKENS, Operation.INPUT_TOKENS})


class Priority(StrEnum):
    """Priority classes, highest first."""

    CRITICAL = "critical"
    STANDARD = "standard"
    BATCH = "batch"


class PeerConnection(Struct, frozen=True, gc=False):
    """What Envoy knows of the connection that a request came over; "" for what it was not asked for, or does not know."""

    uri: str = ""
    """The first URI in the client's verified certificate: its SPIFFE ID."""
    dns: str = ""
    """The first DNS name there."""
    address: str = ""
    """The client's IP address and port."""


NO_PEER = PeerConnection()


class RequestHead(Struct, frozen=True, gc=False):
    """A request's pseudo headers and headers: names in lower case, values as text (latin-1)."""

    method: str
    path: str
    """`:path` as sent, with its query string."""
    headers: Mapping[str, str]
    claims: Mapping[str, Any] | None = None
    """Those of a token that Envoy has verified; no client can set them."""
    peer: PeerConnection = NO_PEER

    def header(self, name: str) -> str:
        """Return the header's value, "" when it is missing."""
        return self.headers.get(name, "")


class Estimate(Struct, frozen=True, gc=False):
    """An estimate of a prompt's tokens, made from its bytes (see `intent/estimate.py`)."""

    tokens: int
    features: tuple[float, ...] = ()
    """Units per script class in the order of `intent.estimate.CLASSES`; the calibrator learns from them at settlement."""
    fixed: int = 0
    """The part of `tokens` that no class explains: per-message overhead, media parts, token ids."""
    exact: bool = False
    """Counted by the model's own tokenizer."""
    longest: "Estimate | None" = None
    """The longest of several inputs that the engine reads separately: it must fit into the context, while `tokens` is the cost of all of
    them. None: there is one input."""


class Intent(Struct, frozen=True, gc=False):
    """The content of one request that decisions depend on. Token counts are whole tokens, times whole milliseconds."""

    operation: Operation
    model: str
    """The model as the client wrote it: an alias, a physical name, or either with `@constraint`."""
    estimate: Estimate
    output_tokens: int | None = None
    """The largest output that an engine may generate, all answers together. None: unspecified."""
    stream: bool = False
    wants_usage: bool = False
    """The client asked for `stream_options.include_usage` itself."""
    timeout_ms: int | None = None
    task_tier: str = ""
    version: str = ""
    """The client's version constraint as written; "" allows every version."""
    priority: Priority | None = None
    answers: int = 1
    """The number of answers: prompts times choices."""
    output_each: int | None = None
    """The smallest output limit of one answer, which must fit into the context beside its prompt. None: unspecified."""
    budget_tokens: int | None = None
    """The most tokens that the client wants to spend on it; None: it did not say."""
    budget_cost: int | None = None
    """Likewise in money, in 10**-9 of the currency of `prices`."""
    truncates: bool = False
    """No length is too long: the client asks the engine to cut the prompt to what its context holds, or the prompt is only counted."""

    @property
    def prompt_tokens(self) -> int:
        """Estimated prompt tokens."""
        return self.estimate.tokens
