"""Counters of decisions and outcomes for the admin page. Internal errors are logged here.

Invariant: no client-supplied value becomes a key.
"""

import logging
from bisect import bisect_left

from din_extproc.domain.usage import ExchangeRecord
from din_extproc.observe.instruments import DECISION_US

_log = logging.getLogger(__name__)


class DecisionCounters:
    """Counters of one process since its start."""

    def __init__(self) -> None:
        self.sent = 0
        self.refused: dict[str, int] = {}
        self.outcomes: dict[str, int] = {}
        self.would_refuse: dict[str, int] = {}
        """Requests that exceeded an unenforced limit, by limit."""
        self.faults = 0
        self.decisions = [0] * (len(DECISION_US) + 1)
        """Decisions by duration; see `DECISION_US`."""
        self.decision_s = 0.0
        """Total duration of decisions."""
        self.sensitive: dict[str, dict[str, int]] = {}
        """Findings in prompts, by action and kind."""
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def on_decision(self, seconds: float, refused: str) -> None:
        """Count a decision with its duration. `refused`: the error code; "" if admitted."""
        self.decisions[bisect_left(DECISION_US, seconds * 1e6)] += 1
        self.decision_s += seconds
        if refused:
            self.refused[refused] = self.refused.get(refused, 0) + 1
        else:
            self.sent += 1

    def on_fault(self, error: BaseException, trace_id: str) -> None:
        """Count an internal error and log it with the client's trace id."""
        self.faults += 1
        _log.error("a request failed inside the gateway", exc_info=error, extra={"trace_id": trace_id})

    def on_exchange(self, record: ExchangeRecord) -> None:
        """Count a finished exchange."""
        self.outcomes[record.outcome] = self.outcomes.get(record.outcome, 0) + 1
        if record.would_refuse:
            self.would_refuse[record.would_refuse] = self.would_refuse.get(record.would_refuse, 0) + 1
        if record.sensitive is not None:
            counts = self.sensitive.setdefault(record.sensitive.policy, {})
            for kind, number in record.sensitive.kinds.items():
                counts[kind] = counts.get(kind, 0) + number
        self.prompt_tokens += record.usage.prompt_tokens
        self.completion_tokens += record.usage.completion_tokens

    def snapshot(self) -> dict[str, object]:
        """Return the counters for the admin page."""
        return {
            "sent": self.sent,
            "refused": self.refused,
            "outcomes": self.outcomes,
            "would_refuse": self.would_refuse,
            "faults": self.faults,
            "sensitive": self.sensitive,
            "decisions_by_us": {bound: count for bound, count in zip((*DECISION_US, "more"), self.decisions, strict=True) if count},
            "decision_s": self.decision_s,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
