"""Metrics of finished exchanges.

Rule: nothing that a client wrote becomes a label: tenants, models, pools, rules and nodes are names of the operator's.
"""

from collections.abc import Iterator

from din_extproc.domain.price import UNITS
from din_extproc.domain.request import BUILT_IN
from din_extproc.domain.usage import ExchangeRecord, Outcome
from din_extproc.observe import instruments as of
from din_extproc.observe.families import CAP, Counts, Distributions, Family, make_family


def operation_name(operation: str) -> str:
    """Return the operation's name in OpenTelemetry's conventions; "" if they have none."""
    known = BUILT_IN.get(operation)
    return "" if known is None else known.spec.convention


def time_per_output_token_s(record: ExchangeRecord) -> float | None:
    """(last token - first token) / (tokens - 1), of a stream that ran to its end: each by when it passed, in whatever channel.

    What an engine still sends or holds back after the last token (a finish reason, usage) is no token's time.
    """
    tokens, first, last = record.usage.completion_tokens, record.first_token_ms, record.last_token_ms
    if record.outcome is not Outcome.COMPLETED or first is None or last is None or tokens < 2 or last <= first:  # noqa: PLR2004
        return None
    return (last - first) / 1000 / (tokens - 1)


class ExchangeMetrics:
    """The measurements of one process, since its start. `cap`: label sets of one family."""

    def __init__(self, cap: int = CAP) -> None:
        # Names, not a table: looking a family up by its instrument would cost more than counting.
        self._identities = Counts(of.IDENTITIES, cap)
        self._requests, self._tokens, self._reserved = Counts(of.REQUESTS, cap), Counts(of.TOKENS, cap), Counts(of.RESERVED, cap)
        self._degraded, self._retries, self._bad_events = Counts(of.DEGRADED, cap), Counts(of.RETRIES, cap), Counts(of.BAD_EVENTS, cap)
        self._node_requests, self._node_tokens = Counts(of.NODE_REQUESTS, cap), Counts(of.NODE_TOKENS, cap)
        self._misidentified = Counts(of.NODE_MISIDENTIFIED, cap)
        self._cost, self._saved = Counts(of.COST, cap), Counts(of.SAVED, cap)
        self._left_site, self._left_site_tokens = Counts(of.LEFT_SITE, cap), Counts(of.LEFT_SITE_TOKENS, cap)
        self._duration, self._to_node = Distributions(of.REQUEST_DURATION, cap), Distributions(of.TO_NODE, cap)
        self._first_token, self._each_token = Distributions(of.TIME_TO_FIRST_TOKEN, cap), Distributions(of.TIME_PER_OUTPUT_TOKEN, cap)
        self._usage, self._estimate_error = Distributions(of.TOKEN_USAGE, cap), Distributions(of.ESTIMATE_ERROR, cap)
        self._node_first_token, self._node_duration = Distributions(of.NODE_FIRST_TOKEN, cap), Distributions(of.NODE_DURATION, cap)

    def on_exchange(self, record: ExchangeRecord) -> None:
        """An exchange is over."""
        if record.key_id:
            self._identities.add((record.metric_tenant, record.identity))
        if record.outcome is Outcome.REFUSED and not record.model:
            self._requests.add((record.metric_tenant, "", "", record.outcome))
            return
        self._count(record)
        self._measure(record)
        if record.node_id:
            self._count_node(record)

    def collect_families(self) -> Iterator[Family]:
        """Everything, family by family."""
        kept: tuple[Counts | Distributions, ...] = (
            self._tokens, self._requests, self._degraded, self._retries, self._reserved, self._node_requests, self._node_tokens,
            self._bad_events, self._duration, self._first_token, self._each_token, self._usage, self._to_node, self._estimate_error,
            self._node_first_token, self._node_duration, self._misidentified, self._cost, self._saved, self._identities,
            self._left_site, self._left_site_tokens,
        )  # fmt: skip
        for each in kept:
            yield each.family()
        yield make_family(of.SERIES_FOLDED, sum(each.folded for each in kept))

    def _count(self, record: ExchangeRecord) -> None:
        usage, tenant, model, pool = record.usage, record.metric_tenant, record.model, record.pool
        self._requests.add((tenant, model, pool, record.outcome))
        estimated = "true" if usage.estimated else "false"
        if usage.prompt_tokens:
            self._tokens.add((tenant, model, "input", estimated), usage.prompt_tokens)
        if usage.completion_tokens:
            self._tokens.add((tenant, model, "output", estimated), usage.completion_tokens)
        if usage.cached_tokens:
            self._tokens.add((tenant, model, "cached", estimated), usage.cached_tokens)
        if record.reserved_tokens:
            self._reserved.add((tenant, model), record.reserved_tokens)
        if record.cost or record.saved:
            self._cost.add((tenant, model), record.cost / UNITS)
            self._saved.add((tenant, model), record.saved / UNITS)
        if record.left_site:
            self._left_site.add((tenant, pool))
            self._left_site_tokens.add((tenant, pool), usage.total_tokens)
        if record.degraded:
            self._degraded.add((tenant, model, record.rule))
        if record.attempts > 1:
            self._retries.add((model, pool), record.attempts - 1)

    def _measure(self, record: ExchangeRecord) -> None:
        usage, model, tenant = record.usage, record.model, record.metric_tenant
        operation = operation_name(record.operation)
        labels = (operation, model, tenant)
        if record.duration_ms is not None:
            failed = "" if record.outcome is Outcome.COMPLETED else record.refusal or record.outcome
            self._duration.record((operation, model, tenant, failed), record.duration_ms / 1000)
        if record.first_token_ms is not None:
            self._first_token.record(labels, record.first_token_ms / 1000)
            each = time_per_output_token_s(record)
            if each is not None:
                self._each_token.record(labels, each)
        to_node_ms = record.dispatch_delay_ms
        if to_node_ms is not None:
            self._to_node.record((model, tenant), to_node_ms / 1000)
        if usage.prompt_tokens:
            self._usage.record((operation, model, tenant, "input"), usage.prompt_tokens)
            if usage.completion_tokens:
                self._usage.record((operation, model, tenant, "output"), usage.completion_tokens)
            if not usage.estimated and record.prompt_estimate:
                self._estimate_error.record((model,), record.prompt_estimate / usage.prompt_tokens - 1)

    def _count_node(self, record: ExchangeRecord) -> None:
        node, model, usage = record.node_id, record.model, record.usage
        self._node_requests.add((node, model, record.outcome))
        if usage.prompt_tokens:
            self._node_tokens.add((node, model, "input"), usage.prompt_tokens)
        if usage.completion_tokens:
            self._node_tokens.add((node, model, "output"), usage.completion_tokens)
        if record.bad_events:
            self._bad_events.add((node,), record.bad_events)
        if record.stated_node and record.identity_mismatch:
            self._misidentified.add((node,))
        sent = record.sent_ms
        if sent is None:
            return
        if record.first_token_ms is not None:
            self._node_first_token.record((node, model), max(0.0, record.first_token_ms - sent) / 1000)
        if record.duration_ms is not None:
            self._node_duration.record((node, model), max(0.0, record.duration_ms - sent) / 1000)
