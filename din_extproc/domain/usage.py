"""How many tokens an exchange really cost, and how it ended: what the accounting plane settles."""

from enum import StrEnum

from msgspec import Struct


class Usage(Struct, frozen=True, gc=False):
    """Tokens of one finished exchange. `cached_tokens` are part of `prompt_tokens`, not added to them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    estimated: bool = False
    """The engine did not say: counted from deltas and the prompt's estimate."""

    @property
    def total_tokens(self) -> int:
        """What the tenant is charged."""
        return self.prompt_tokens + self.completion_tokens


class Outcome(StrEnum):
    """How an exchange ended. Only the `UPSTREAM_*` ones speak against the node."""

    COMPLETED = "completed"
    REFUSED = "refused"
    CLIENT_CANCELLED = "client_cancelled"
    CLIENT_ERROR = "client_error"
    UPSTREAM_BUSY = "upstream_busy"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_TRUNCATED = "upstream_truncated"
    NOT_DISPATCHED = "not_dispatched"


class Sensitive(Struct, frozen=True, gc=False):
    """The verdict on the sensitive data of one prompt: kinds and numbers, never the data."""

    policy: str
    """What was done: `flag`, `mask` or `block`."""
    kinds: dict[str, int]
    """Findings by kind."""
    whole: bool = True
    """False: there were too many to look at them all."""

    @property
    def said(self) -> str:
        """On one line: `mask bank_card=1 email=2`."""
        kinds = [f"{kind}={number}" for kind, number in sorted(self.kinds.items())]
        return " ".join([self.policy, *kinds, *(() if self.whole else ("and more",))])


class Tags(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a request asked for besides its length: with its sizes, enough to decide about it again without its text."""

    model: str = ""
    """As the client wrote it."""
    output_tokens: int | None = None
    """None: it did not say."""
    version: str = ""
    task_tier: str = ""
    priority: str = ""
    answers: int = 1
    longest: int = 0
    """Estimated tokens of the longest input; 0: the prompt is one input."""


class Labels(Struct, frozen=True, gc=False, omit_defaults=True):
    """What was decided about a request, as the access log brings it back: JSON in one field of the metadata.

    Of one that was refused: whose it is and what it asked for, as far as that was known.
    """

    request_id: str = ""
    trace_id: str = ""
    tenant: str = ""
    key_id: str = ""
    model: str = ""
    """The physical model."""
    alias: str = ""
    pool: str = ""
    rule: str = ""
    reserved_tokens: int = 0
    prompt_estimate: int = 0
    features: tuple[float, ...] = ()
    """What the estimate was made from."""
    fixed: int = 0
    stream: bool = False
    degraded: bool = False
    operation: str = ""
    """The canonical path."""
    would_refuse: str = ""
    """The limit that would have refused it, were it enforced: `rpm`, `tpm`, `max_streams` or `oversize`."""
    sensitive: Sensitive | None = None
    """None: nothing was found, or nobody looked."""
    tags: Tags | None = None
    span: str = ""
    """Trace, span and parent of an exchange that leaves spans, with hyphens between."""
    decided_us: int = 0
    """From the whole request to its verdict, `waited_us` included."""
    waited_us: int = 0
    """In line for tokens or slots."""


ANSWER_TOO_LARGE = "answer_too_large"
"""The error of an answer that is larger than the gateway holds to translate it: the node did what it was asked."""


class ExchangeRecord(Struct, frozen=True, gc=False):
    """One finished HTTP exchange as Envoy's access log tells it. Times in milliseconds, None where Envoy has none."""

    request_id: str
    trace_id: str
    tenant: str
    key_id: str
    model: str
    """The physical model."""
    alias: str
    pool: str
    rule: str
    node_id: str
    """The node that answered last, "" when none was reached."""
    status: int
    outcome: Outcome
    stream: bool
    usage: Usage
    reserved_tokens: int
    prompt_estimate: int
    features: tuple[float, ...]
    fixed: int
    attempts: int
    degraded: bool
    started_at: float
    """Seconds since the epoch, by Envoy's clock."""
    duration_ms: float | None = None
    first_token_ms: float | None = None
    """From the request's first byte to the first token in any channel."""
    last_token_ms: float | None = None
    """Likewise to the last one, of a stream that came to its end."""
    response_flags: tuple[str, ...] = ()
    """Envoy's own short codes: `UF`, `DC`, ..."""
    refusal: str = ""
    """The error code, when the gateway refused."""
    error: str = ""
    """Code or type of the error that the node's answer carried in its body or stream, never its text; or `ANSWER_TOO_LARGE`."""
    bad_events: int = 0
    """Events of the stream that were no JSON."""
    retry_after_s: int | None = None
    """How long the node asked to be left alone."""
    operation: str = ""
    """The canonical path."""
    span: str = ""
    """Trace, span and parent of an exchange that leaves spans, with hyphens between."""
    version: str = ""
    """Of the model, as the node that answered has it."""
    received_ms: float | None = None
    """From the request's first byte to its last."""
    sent_ms: float | None = None
    """From the request's first byte to the first that went to the node that answered."""
    node_ended_ms: float | None = None
    """From the request's first byte to the last that came from the node."""
    decided_ms: float | None = None
    """From the whole request to the gateway's verdict, `waited_ms` included."""
    waited_ms: float = 0.0
    """In line for tokens or slots."""
    would_refuse: str = ""
    """The limit that would have refused it, were it enforced."""
    moved_from: str = ""
    """The pool that could not answer and whose request moved in flight, "" when it did not."""
    out_of_time: bool = False
    """The time for the whole request ran out, be it the client's: that says nothing of the node."""
    tags: Tags | None = None
    """None: it was refused before it was read."""
    sensitive: Sensitive | None = None
    """What the prompt held; None: nothing was found, or nobody looked."""

    @property
    def to_node_ms(self) -> float | None:
        """How long the whole request was here before it went on."""
        if self.sent_ms is None or self.received_ms is None:
            return None
        return max(0.0, self.sent_ms - self.received_ms)


class FailedAttempt(Struct, frozen=True, gc=False):
    """One try of a request at one node that failed, whether or not another node then answered."""

    node_id: str
    reason: str
    """A status or Envoy's own short code."""
    duration_ms: float = 0.0
    started_at: float = 0.0
    """Seconds since the epoch, by Envoy's clock."""
    traceparent: str = ""
    """W3C's header, as the node was sent it."""


class NodePace(Struct, frozen=True, gc=False):
    """How quick one node has been lately, as its finished exchanges tell."""

    node_id: str
    at: float
    """When the newest of them ended: seconds, the machine's monotonic clock."""
    p99_ms: float
    """Duration: an average of recent 99th percentiles, the newest counting most."""
    seconds: float
    """Mean duration."""
    prefill_rate: float | None = None
    """Prompt tokens per second; None: no stream told."""
    stream_rate: float | None = None
    """Output tokens per second of one request."""
