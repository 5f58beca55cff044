"""A client's request: its head, and the intent read from head and body.

Nothing here depends on the transport or the destination.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Self

from msgspec import Struct


class BodyKind(StrEnum):
    """The kind of body of an operation's requests."""

    JSON = "JSON"
    """An object; the model's name is a text at its top level."""
    MULTIPART = "multipart"
    """A form (RFC 7578); the model's name is a part of its own."""
    NONE = "none"


class Metering(StrEnum):
    """The unit that an operation is charged for. Every operation counts as a request."""

    TOKENS = "prompt and output"
    """As reported; the estimate and what was counted where nothing is."""
    PROMPT = "prompt"
    """As reported, with an output where one is; the prompt's estimate where nothing is."""
    REQUEST = "request"
    """No tokens: the engine computes nothing with the model."""
    SECONDS = "audio seconds"
    """The seconds as reported, or as estimated from the size of the file; tokens as reported, or so many for each second."""
    IMAGES = "images"
    """The images that were asked for, of an answer that came; tokens like those of `PROMPT`."""


class Ending(StrEnum):
    """The end marker of an operation's streams, and the format of their errors. A buffered response ends with its body."""

    CHAT = "chat"
    """A `finish_reason` of every choice, or `[DONE]`; a type of `Operation.spec.ends` where there are such."""
    MESSAGES = "messages"
    """Anthropic's `message_stop`."""
    RESPONSES = "responses"
    """`response.completed` or `response.incomplete`."""


class OperationSpec(Struct, frozen=True, kw_only=True):
    """Everything that there is to know of an operation. Which engines have the built-in ones is in `southbound/engines.py`."""

    method: str = "POST"
    paths: tuple[str, ...] = ()
    """Further paths that mean the same; the node is asked at the canonical one."""
    body: BodyKind = BodyKind.JSON
    body_limit: int | None = None
    """The largest body in bytes, below what the gateway takes in any case; None: that."""
    model: str = "model"
    """The key or part that holds the model's name."""
    prompt: tuple[str, ...] = ()
    """The keys or parts that hold the prompt: texts, lists of texts or token ids, and `messages`, which has to be there if it is alone."""
    limits: tuple[str, ...] = ()
    """The keys that limit the output's tokens; the first one with a positive number applies."""
    metering: Metering = Metering.TOKENS
    ending: Ending = Ending.CHAT
    ends: tuple[str, ...] = ()
    """Types of the event that ends a stream, besides those of `ending`."""
    begins_soon: bool = False
    """The answer begins at once, whole or not."""
    engines: frozenset[str] = frozenset()
    """The engines that have it in their OpenAI interface, of one that a configuration adds."""
    convention: str = ""
    """Its name in OpenTelemetry's conventions (`gen_ai.operation.name`)."""


_FORM_LIMIT = 26 << 20
"""A file of 25 MiB, with the rest of its form."""
_TRANSCRIPT = OperationSpec(
    body=BodyKind.MULTIPART,
    body_limit=_FORM_LIMIT,
    prompt=("prompt",),
    metering=Metering.SECONDS,
    ends=("transcript.text.done",),
)
_COUNTED_CHAT = OperationSpec(prompt=("messages",), metering=Metering.REQUEST, begins_soon=True)


class Operation(StrEnum):
    """The northbound interfaces: each is its canonical path, with its description.

    The members are built in, and this is the table of them. What a configuration adds (`define`) has the same type and is no member.
    """

    spec: OperationSpec

    def __new__(cls, path: str, spec: OperationSpec) -> Self:
        """Make a member of the table below."""
        made = str.__new__(cls, path)
        made._value_ = path
        made.spec = spec
        return made

    @classmethod
    def define(cls, path: str, spec: OperationSpec) -> "Operation":
        """Return an operation that is not built in."""
        made = str.__new__(cls, path)
        made._name_ = made._value_ = path
        made.spec = spec
        return made

    CHAT = (
        "/v1/chat/completions",
        OperationSpec(prompt=("messages",), limits=("max_completion_tokens", "max_tokens"), convention="chat"),
    )
    COMPLETIONS = "/v1/completions", OperationSpec(prompt=("prompt", "suffix"), limits=("max_tokens",), convention="text_completion")
    RESPONSES = "/v1/responses", OperationSpec(prompt=("input",), limits=("max_output_tokens",), ending=Ending.RESPONSES)
    COMPACT = "/v1/responses/compact", OperationSpec(prompt=("input",), ending=Ending.RESPONSES)
    MESSAGES = "/v1/messages", OperationSpec(prompt=("messages",), limits=("max_tokens",), ending=Ending.MESSAGES)
    EMBEDDINGS = (
        "/v1/embeddings",
        OperationSpec(prompt=("input", "messages"), metering=Metering.PROMPT, begins_soon=True, convention="embeddings"),
    )
    RERANK = (
        "/v1/rerank",
        OperationSpec(
            paths=("/rerank", "/v2/rerank"),
            prompt=("query", "documents", "texts"),
            metering=Metering.PROMPT,
            begins_soon=True,
            convention="rerank",
        ),
    )
    SCORE = (
        "/v1/score",
        OperationSpec(paths=("/score",), prompt=("text_1", "text_2", "queries", "documents"), metering=Metering.PROMPT, begins_soon=True),
    )
    POOLING = "/pooling", OperationSpec(prompt=("input", "messages"), metering=Metering.PROMPT, begins_soon=True)
    CLASSIFY = "/classify", OperationSpec(prompt=("input", "messages"), metering=Metering.PROMPT, begins_soon=True)
    COUNT_TOKENS = "/v1/messages/count_tokens", _COUNTED_CHAT
    INPUT_TOKENS = "/v1/responses/input_tokens", OperationSpec(prompt=("input",), metering=Metering.REQUEST, begins_soon=True)
    TOKENIZE = "/tokenize", OperationSpec(prompt=("prompt", "messages"), metering=Metering.REQUEST, begins_soon=True)
    DETOKENIZE = "/detokenize", OperationSpec(prompt=("tokens",), metering=Metering.REQUEST, begins_soon=True)
    TRANSCRIPTIONS = "/v1/audio/transcriptions", _TRANSCRIPT
    TRANSLATIONS = "/v1/audio/translations", _TRANSCRIPT
    SPEECH = "/v1/audio/speech", OperationSpec(prompt=("input", "instructions"), metering=Metering.PROMPT, ends=("speech.audio.done",))
    IMAGES = "/v1/images/generations", OperationSpec(prompt=("prompt",), metering=Metering.IMAGES, ends=("image_generation.completed",))
    MODELS = "/v1/models", OperationSpec(method="GET", body=BodyKind.NONE, metering=Metering.REQUEST)


OPERATIONS = tuple(operation for operation in Operation if operation is not Operation.MODELS)
"""The built-in operations that nodes are asked for."""
GENERATING = frozenset({Operation.CHAT, Operation.COMPLETIONS, Operation.RESPONSES, Operation.MESSAGES})
"""The operations of a model that generates text."""
POOLING = frozenset({Operation.EMBEDDINGS, Operation.RERANK, Operation.SCORE, Operation.POOLING, Operation.CLASSIFY})
"""The operations of an embedding or ranking model."""
TRANSCRIBING = frozenset({Operation.TRANSCRIPTIONS, Operation.TRANSLATIONS})
"""The operations of a model that transcribes."""
TOKENIZING = frozenset({Operation.TOKENIZE, Operation.DETOKENIZE})
COUNTING = frozenset({Operation.COUNT_TOKENS, Operation.INPUT_TOKENS})


def index_by_path(operations: Iterable[Operation]) -> dict[str, Operation]:
    """Return the operations by every path that means them."""
    return {path: operation for operation in operations for path in (operation.value, *operation.spec.paths)}


BUILT_IN: Mapping[str, Operation] = MappingProxyType(index_by_path(Operation))
"""The built-in operations by path."""


class Priority(StrEnum):
    """Priority classes, highest first."""

    CRITICAL = "critical"
    STANDARD = "standard"
    BATCH = "batch"


class PeerConnection(Struct, frozen=True, gc=False):
    """Envoy's attributes of a request's connection; "" for those that it was not asked for, or does not know."""

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
    """No length is too long: the client asks the engine to cut the prompt to what its context holds, the prompt is only counted, or it is
    audio, which engines read piece by piece."""
    images: int = 0
    """The number of images that are to be made."""
    audio_seconds: int = 0
    """The estimated length of the audio in the body, in seconds."""

    @property
    def prompt_tokens(self) -> int:
        """Estimated prompt tokens."""
        return self.estimate.tokens
