"""The audit records: one frozen class per kind of event.

Rule: no prompt, no answer, no key, no hash of a key, no address of a client; only names, numbers and codes. A field that says nothing
is left out of the line.
"""

from msgspec import Struct


class AuditEvent(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """One event. `at`: seconds since the epoch."""

    at: float


class AdmissionRecord(AuditEvent, frozen=True, kw_only=True, omit_defaults=True, tag="admitted"):
    """A request was allowed, and its tokens reserved. Without its settlement, the exchange was cut off from the accounts."""

    request_id: str
    trace_id: str
    tenant: str
    key_id: str
    model: str
    pool: str
    node_id: str
    """The chosen node; a retry may have used another."""
    reserved_tokens: int


class Tagged(AuditEvent, frozen=True, kw_only=True, omit_defaults=True):
    """The intent of a request: with its sizes, enough to decide about it again under another configuration."""

    asked_for: str = ""
    """The model's name, as the client wrote it."""
    operation: str = ""
    """The canonical path."""
    stream: bool = False
    prompt_estimate: int = 0
    output_asked: int | None = None
    """The largest output that the client allowed, all answers together; None: it did not say."""
    answers_asked: int = 1
    """To each prompt of a list, times the choices."""
    longest_estimate: int = 0
    """Of a list of inputs, the longest; 0: it is one."""
    version_asked: str = ""
    task_tier: str = ""
    timeout_ms: int | None = None
    """The remaining time of the client's deadline; None, here and below: it set none."""
    budget_tokens: int | None = None
    budget_cost: int | None = None
    """In 10**-9 of the currency."""
    priority: str = ""
    entry: str = ""
    """The Envoy filter that sent it: "" for ext_proc; `ext_authz`: another proxy asked for admission only, and chose the node."""
    duration_ms: float | None = None
    """From the first byte to the end, which is `at`."""


class RefusalRecord(Tagged, frozen=True, kw_only=True, omit_defaults=True, tag="refused"):
    """A request was answered with an error by the gateway. Tenant and key as far as they were known."""

    trace_id: str
    code: str
    status: int
    tenant: str = ""
    key_id: str = ""
    screening: str = ""
    """The findings and the action of the filter for sensitive data; `inspected, clean` or `not inspected`."""


class SettlementRecord(Tagged, frozen=True, kw_only=True, omit_defaults=True, tag="settled"):
    """An exchange is over; this is what was charged for it."""

    request_id: str
    trace_id: str
    tenant: str
    key_id: str
    model: str
    version: str = ""
    alias: str = ""
    pool: str = ""
    rule: str = ""
    node_id: str = ""
    """The node that answered, "" when none did."""
    outcome: str
    status: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    estimated: bool = False
    images: int = 0
    """Images that were made."""
    audio_seconds: int = 0
    """Length of the audio that was read."""
    media: int = 0
    """Images, audio and files of the prompt."""
    reserved_tokens: int = 0
    cost: int = 0
    """In 10**-9 of the currency."""
    attempts: int = 0
    degraded: bool = False
    left_site: bool = False
    """A hosted API was asked, first or in the end."""
    error: str = ""
    screening: str = ""
    """The findings and the action of the filter for sensitive data; `inspected, clean` or `not inspected`."""


class Configured(AuditEvent, frozen=True, kw_only=True, omit_defaults=True, tag="configured"):
    """Another configuration is in use."""

    fingerprint: str
    before: str = ""
    """Its predecessor's, "" at the start."""
    sections: tuple[str, ...] = ()
    """The parts that differ; `routes`: nothing but rules, aliases or the text."""
    keys_added: tuple[str, ...] = ()
    """Ids of keys, as `tenant/key`."""
    keys_removed: tuple[str, ...] = ()
    keys_changed: tuple[str, ...] = ()
    nodes_added: tuple[str, ...] = ()
    """Ids of nodes with a token."""
    nodes_removed: tuple[str, ...] = ()
    nodes_changed: tuple[str, ...] = ()


class NodeChanged(AuditEvent, frozen=True, kw_only=True, omit_defaults=True, tag="node"):
    """A node joined, changed its state, or left."""

    node_id: str
    event: str
    state: str
    reason: str
    model: str = ""
    version: str = ""


class OperatorOrder(AuditEvent, frozen=True, kw_only=True, omit_defaults=True, tag="order"):
    """An operator ordered a node to be drained, quarantined, or given requests again."""

    node_id: str
    order: str
    operator: str
    """The id of the admin key."""
    reason: str = ""


class BudgetOrder(AuditEvent, frozen=True, kw_only=True, omit_defaults=True, tag="budget"):
    """An operator added to what may be spent in the current period of a budget."""

    budget: str
    """The counter's name."""
    tenant: str = ""
    """"" of a counter that all tenants share."""
    order: str
    """`top-up`, or `reset`: what was spent is added as well."""
    tokens: int = 0
    cost: int = 0
    """In 10**-9 of the currency."""
    operator: str
    """The id of the admin key."""
    reason: str = ""


class Mismatched(AuditEvent, frozen=True, kw_only=True, omit_defaults=True, tag="mismatch"):
    """Two nodes that should agree answered the same request differently."""

    trace_id: str
    model: str
    version: str
    dtype: str
    node_id: str
    second_node_id: str
    at_token: int
    """The first that differs, counted from 0."""
    tokens: int
    """Compared."""


class Gap(AuditEvent, frozen=True, kw_only=True, omit_defaults=True, tag="gap"):
    """Records are missing here, and the writer knows it."""

    reason: str
    dropped: int = 0
    """Events that were not written because the disk took no more."""
    first: int = 0
    """Records that were written once and are not there any more, with `last`; 0: none."""
    last: int = 0


class Witness(AuditEvent, frozen=True, kw_only=True, omit_defaults=True, tag="witness"):
    """The last position of another replica's log. Removing records from its end requires changing this log too."""

    replica: str
    record: int
    """The number of its last record then. (`seq` and `mac` are the line's own.)"""
    chain: str


Event = (
    AdmissionRecord | RefusalRecord | SettlementRecord | Configured | NodeChanged | OperatorOrder | BudgetOrder | Mismatched | Gap | Witness
)
