"""Token usage and outcome of finished exchanges: the input of settlement."""

from enum import StrEnum

from msgspec import Struct

AUDIO_TOKENS = 10
"""Tokens for a second of audio where none are reported: as many as OpenAI's models count."""


class Usage(Struct, frozen=True, gc=False):
    """The usage of one finished exchange. `cached_tokens` are part of `prompt_tokens`, not added to them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    estimated: bool = False
    """The engine reported no usage: tokens were counted from stream deltas and the prompt's estimate."""
    disputed: bool = False
    """The engine reported a usage that cannot be, so it was estimated."""
    images: int = 0
    """Images that were made."""
    audio_seconds: int = 0
    """Length of the audio that was read, in whole seconds, rounded up."""

    @property
    def total_tokens(self) -> int:
        """The tokens that the tenant is charged."""
        return self.prompt_tokens + self.completion_tokens


class Outcome(StrEnum):
    """How an exchange ended. Only the `UPSTREAM_*` outcomes count against the node."""

    COMPLETED = "completed"
    REFUSED = "refused"
    CLIENT_CANCELLED = "client_cancelled"
    CLIENT_ERROR = "client_error"
    UPSTREAM_BUSY = "upstream_busy"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_TRUNCATED = "upstream_truncated"
    NOT_DISPATCHED = "not_dispatched"


UPSTREAM_FAULTS = frozenset({Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_TRUNCATED})
"""Outcomes that count as failures of the node. A busy node (429) is not at fault."""


BREAKS = frozenset({"UC", "UR"})
"""Envoy's response flags of a connection or stream that the node broke."""
_UNSENT = frozenset({Outcome.REFUSED, Outcome.NOT_DISPATCHED, *UPSTREAM_FAULTS})


class Sensitive(Struct, frozen=True, gc=False):
    """Findings of sensitive data in one prompt: kinds and counts, never the data."""

    policy: str
    """The action taken: `flag`, `mask` or `block`."""
    kinds: dict[str, int]
    """Number of findings by kind."""
    whole: bool = True
    """False: the scan stopped at its limit, so there may be more."""

    @property
    def summary(self) -> str:
        """One line of text, such as `mask bank_card=1 email=2`."""
        kinds = [f"{kind}={number}" for kind, number in sorted(self.kinds.items())]
        return " ".join([self.policy, *kinds, *(() if self.whole else ("and more",))])


class Tags(Struct, frozen=True, gc=False, omit_defaults=True):
    """Properties of a request besides its sizes; together they are enough to decide about it again without its text."""

    model: str = ""
    """The model as the client wrote it."""
    output_tokens: int | None = None
    """None: unspecified."""
    version: str = ""
    task_tier: str = ""
    timeout_ms: int | None = None
    """None, here and below: unspecified."""
    budget_tokens: int | None = None
    budget_cost: int | None = None
    """In 10**-9 of the currency."""
    priority: str = ""
    answers: int = 1
    longest: int = 0
    """Estimated tokens of the longest input; 0: there is only one input."""
    entry: str = ""
    """The entry point: "" for ext_proc; `ext_authz` when another proxy asked for permission and chose the node."""


class Labels(Struct, frozen=True, gc=False, omit_defaults=True):
    """The decision about a request as it returns through the access log: JSON in one field of the dynamic metadata.

    For a refused request: the tenant and the request's properties, as far as they were known.
    """

    request_id: str = ""
    trace_id: str = ""
    origin: str = ""
    """Of failures of the request, see `make_origin`."""
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
    """Features of the estimate, see `Estimate`."""
    fixed: int = 0
    stream: bool = False
    degraded: bool = False
    operation: str = ""
    """The canonical path."""
    metering: str = ""
    """The unit that the operation is charged for, see `Metering`; "" for prompt and output."""
    images: int = 0
    """Images that were asked for."""
    audio_seconds: int = 0
    """Estimated length of the audio."""
    would_refuse: str = ""
    """The limit that would have refused the request had it been enforced: `rpm`, `tpm`, `max_streams` or `oversize`."""
    inspected: bool = False
    """The prompt was scanned for sensitive data."""
    sensitive: Sensitive | None = None
    """None: nothing was found, or the prompt was not scanned."""
    tags: Tags | None = None
    span: str = ""
    """Trace id, span id and parent id of a traced exchange, joined by hyphens."""
    decided_us: int = 0
    """Time from the complete request to its verdict in microseconds, `waited_us` included."""
    waited_us: int = 0
    """Time in the admission queue in microseconds."""
    media: int = 0
    """Images, audio and files of the prompt: their tokens are assumed, not estimated."""
    unlisted: bool = False
    """The configuration does not list the tenant."""
    left_site: bool = False
    """It was sent to a hosted API."""


UNLISTED_TENANTS = "(unlisted)"
"""No tenant can be called so."""
ANSWER_TOO_LARGE = "answer_too_large"
"""The error of a response that exceeds the gateway's buffer for translation; it does not count against the node."""


class ExchangeRecord(Struct, frozen=True, gc=False):
    """One finished HTTP exchange from Envoy's access log. Times in milliseconds, None where Envoy has no value."""

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
    """Seconds since the Unix epoch, by Envoy's clock."""
    duration_ms: float | None = None
    first_token_ms: float | None = None
    """From the request's first byte to the first token in any channel."""
    last_token_ms: float | None = None
    """From the request's first byte to the last token of a completed stream."""
    response_flags: tuple[str, ...] = ()
    """Envoy's response flags: `UF`, `DC`, ..."""
    refusal: str = ""
    """The error code of the gateway's refusal, "" if there was none."""
    error: str = ""
    """Code or type of the error in the node's response body or stream, never its text; or `ANSWER_TOO_LARGE`."""
    bad_events: int = 0
    """The number of stream events that were not valid JSON."""
    retry_after_s: int | None = None
    """The node's `retry-after`, in seconds."""
    operation: str = ""
    """The canonical path."""
    span: str = ""
    """Trace id, span id and parent id of a traced exchange, joined by hyphens."""
    version: str = ""
    """The model version of the node that answered."""
    stated_node: str = ""
    """The id that the node's own Envoy stated, "" where none did."""
    stated_version: str = ""
    """The model version, likewise."""
    received_ms: float | None = None
    """From the request's first byte to its last."""
    sent_ms: float | None = None
    """From the request's first byte to the first byte sent to the node that answered."""
    node_ended_ms: float | None = None
    """From the request's first byte to the last byte from the node."""
    decided_ms: float | None = None
    """From the complete request to the gateway's verdict, `waited_ms` included."""
    waited_ms: float = 0.0
    """Time in the admission queue."""
    would_refuse: str = ""
    """The limit that would have refused the request had it been enforced."""
    moved_from: str = ""
    """The original pool of a request that moved to the fallback pool in flight, "" otherwise."""
    left_site: bool = False
    """A hosted API was asked, first or in the end."""
    deadline_exceeded: bool = False
    """The timeout for the whole request expired, possibly the client's own: that does not count against the node."""
    tags: Tags | None = None
    """None: the request was refused before it was read."""
    inspected: bool = False
    """The prompt was scanned for sensitive data."""
    sensitive: Sensitive | None = None
    """Findings in the prompt; None: nothing was found, or the prompt was not scanned."""
    media: int = 0
    """Images, audio and files of the prompt."""
    cost: int = 0
    """In 10**-9 of the currency; 0 without prices."""
    saved: int = 0
    """The additional cost that the most expensive model of the requested name would have had, likewise."""
    unlisted: bool = False
    """The configuration does not list the tenant."""
    origin: str = ""
    """Of failures of the request, see `make_origin`; "" where it is not known."""

    @property
    def ended_by_break(self) -> bool:
        """Whether the last node broke the connection before it answered."""
        return self.outcome is Outcome.UPSTREAM_ERROR and not BREAKS.isdisjoint(self.response_flags)

    @property
    def metric_tenant(self) -> str:
        """The tenant as metrics name it: those that the configuration does not list are without number, and share one name."""
        return UNLISTED_TENANTS if self.unlisted else self.tenant

    @property
    def identity(self) -> str:
        """The kind of identity: `key`, `jwt`, `certificate` or `gateway`; "" for an unknown tenant."""
        kind, separator, _ = self.key_id.partition(":")
        return kind if separator else "key" if self.key_id else ""

    @property
    def screening(self) -> str:
        """The findings and the action of the filter for sensitive data, in words; also that it found nothing, or was not run."""
        if self.sensitive is not None:
            return self.sensitive.summary
        return "inspected, clean" if self.inspected else "not inspected"

    @property
    def unsent(self) -> bool:
        """The request ended without a byte sent to a node, and not because the client hung up: it does not count against its limits."""
        return self.sent_ms is None and not self.usage.total_tokens and self.outcome in _UNSENT

    @property
    def identity_mismatch(self) -> str:
        """Return the contradiction between the gateway's node and version and those that the node states; "": none."""
        if self.stated_node and self.stated_node != self.node_id:
            return f"the node at the address of {self.node_id} states that it is {self.stated_node}"
        if self.stated_version and self.version and self.stated_version != self.version:
            return f"{self.node_id} states that it serves version {self.stated_version}, not {self.version}"
        return ""

    @property
    def exec_ms(self) -> float | None:
        """The whole time at the node that answered: from the first byte sent to it to its last."""
        if self.sent_ms is None or self.node_ended_ms is None:
            return None
        return max(0.0, round(self.node_ended_ms - self.sent_ms, 3))

    @property
    def dispatch_delay_ms(self) -> float | None:
        """Time from the complete request to its dispatch to the node."""
        if self.sent_ms is None or self.received_ms is None:
            return None
        return max(0.0, self.sent_ms - self.received_ms)


class FailedAttempt(Struct, frozen=True, gc=False):
    """One attempt at one node that failed, whether or not a later attempt succeeded."""

    node_id: str
    reason: str
    """An HTTP status or an Envoy response flag."""
    duration_ms: float = 0.0
    started_at: float = 0.0
    """Seconds since the epoch, by Envoy's clock."""
    traceparent: str = ""
    """The W3C `traceparent` header that was sent to the node."""
    retry_after_s: int | None = None
    """The pause that the node asked for; None: it asked for none."""
    origin: str = ""
    """Of failures of the request, see `make_origin`; "" where it is not known."""
    adapter: str = ""
    """The adapter (LoRA) that the request is for; "": none."""

    @property
    def lacks_adapter(self) -> bool:
        """Whether the node answered that it has no such adapter."""
        return bool(self.adapter) and self.reason == "404"

    @property
    def breaks_connection(self) -> bool:
        """Whether the node, or the connection to it, broke after the request was sent and before it was answered."""
        return any(flag in BREAKS for flag in self.reason.split(","))


class NodePace(Struct, frozen=True, gc=False):
    """Recent speed of one node, computed from its finished exchanges."""

    node_id: str
    at: float
    """End of the newest exchange: seconds of the machine's monotonic clock."""
    p99_ms: float
    """Exponentially weighted average of recent 99th percentiles of the duration."""
    seconds: float
    """Mean duration."""
    prefill_rate: float | None = None
    """Prompt tokens per second; None: no stream reported it."""
    stream_rate: float | None = None
    """Output tokens per second of one request."""
