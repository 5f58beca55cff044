"""What finished exchanges add to the metrics.

Rule: nothing that a client wrote becomes a label: tenants, models, pools, rules and nodes are names of the operator's.
"""

from collections.abc import Iterator

from din_extproc.domain.usage import ExchangeRecord, Outcome
from din_extproc.observe import instruments as of
from din_extproc.observe.families import CAP, Counts, Distributions, Family, one

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}
_COUNTED = (of.TOKENS, of.REQUESTS, of.DEGRADED, of.RETRIES, of.RESERVED, of.NODE_REQUESTS, of.NODE_TOKENS, of.BAD_EVENTS)
_SPREAD = (
    of.REQUEST_DURATION, of.TIME_TO_FIRST_TOKEN, of.TIME_PER_OUTPUT_TOKEN, of.TOKEN_USAGE, of.TO_NODE, of.ESTIMATE_ERROR,
    of.NODE_FIRST_TOKEN, of.NODE_DURATION,
)  # fmt: skip
_TYPES = (("input", "prompt_tokens"), ("output", "completion_tokens"), ("cached", "cached_tokens"))


def operation_name(operation: str) -> str:
    """What the conventions call an operation."""
    return _OPERATIONS.get(operation, "")


def time_per_output_token_s(record: ExchangeRecord) -> float | None:
    """Mean time of each token after the first, of a stream that ran to its end."""
    tokens, first, duration = record.usage.completion_tokens, record.first_token_ms, record.duration_ms
    if record.outcome is not Outcome.COMPLETED or first is None or duration is None or tokens < 2 or duration <= first:  # noqa: PLR2004
        return None
    return (duration - first) / 1000 / (tokens - 1)


class ExchangeMetrics:
    """The measurements of one process, since its start. `cap`: label sets of one family."""

    def __init__(self, cap: int = CAP) -> None:
        self._counts = {each: Counts(each, cap) for each in _COUNTED}
        self._spread = {each: Distributions(each, cap) for each in _SPREAD}

    def finished(self, record: ExchangeRecord) -> None:
        """An exchange is over."""
        if record.outcome is Outcome.REFUSED and not record.model:
            self._counts[of.REQUESTS].add((record.tenant, "", "", record.outcome))
            return
        self._count(record)
        self._measure(record)
        if record.node_id:
            self._count_node(record)

    def families(self) -> Iterator[Family]:
        """Everything, family by family."""
        kept: tuple[Counts | Distributions, ...] = (*self._counts.values(), *self._spread.values())
        for each in kept:
            yield each.family()
        yield one(of.SERIES_FOLDED, sum(each.folded for each in kept))

    def _count(self, record: ExchangeRecord) -> None:
        counts, usage = self._counts, record.usage
        tenant, model, pool = record.tenant, record.model, record.pool
        counts[of.REQUESTS].add((tenant, model, pool, record.outcome))
        estimated = "true" if usage.estimated else "false"
        tokens = counts[of.TOKENS]
        for kind, field in _TYPES:
            amount = getattr(usage, field)
            if amount:
                tokens.add((tenant, model, kind, estimated), amount)
        if record.reserved_tokens:
            counts[of.RESERVED].add((tenant, model), record.reserved_tokens)
        if record.degraded:
            counts[of.DEGRADED].add((tenant, model, record.rule))
        if record.attempts > 1:
            counts[of.RETRIES].add((model, pool), record.attempts - 1)

    def _measure(self, record: ExchangeRecord) -> None:
        spread, usage, model = self._spread, record.usage, record.model
        labels = (operation_name(record.operation), model, record.tenant)
        if record.duration_ms is not None:
            failed = "" if record.outcome is Outcome.COMPLETED else record.refusal or record.outcome
            spread[of.REQUEST_DURATION].record((*labels, failed), record.duration_ms / 1000)
        if record.first_token_ms is not None:
            spread[of.TIME_TO_FIRST_TOKEN].record(labels, record.first_token_ms / 1000)
            each = time_per_output_token_s(record)
            if each is not None:
                spread[of.TIME_PER_OUTPUT_TOKEN].record(labels, each)
        if record.to_node_ms is not None:
            spread[of.TO_NODE].record((model, record.tenant), record.to_node_ms / 1000)
        if usage.prompt_tokens:
            spread[of.TOKEN_USAGE].record((*labels, "input"), usage.prompt_tokens)
            if usage.completion_tokens:
                spread[of.TOKEN_USAGE].record((*labels, "output"), usage.completion_tokens)
            if not usage.estimated and record.prompt_estimate:
                spread[of.ESTIMATE_ERROR].record((model,), record.prompt_estimate / usage.prompt_tokens - 1)

    def _count_node(self, record: ExchangeRecord) -> None:
        node, model, usage = record.node_id, record.model, record.usage
        self._counts[of.NODE_REQUESTS].add((node, model, record.outcome))
        if usage.prompt_tokens:
            self._counts[of.NODE_TOKENS].add((node, model, "input"), usage.prompt_tokens)
        if usage.completion_tokens:
            self._counts[of.NODE_TOKENS].add((node, model, "output"), usage.completion_tokens)
        if record.bad_events:
            self._counts[of.BAD_EVENTS].add((node,), record.bad_events)
        sent = record.sent_ms
        if sent is None:
            return
        if record.first_token_ms is not None:
            self._spread[of.NODE_FIRST_TOKEN].record((node, model), max(0.0, record.first_token_ms - sent) / 1000)
        if record.duration_ms is not None:
            self._spread[of.NODE_DURATION].record((node, model), max(0.0, record.duration_ms - sent) / 1000)
