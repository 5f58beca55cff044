"""Usage of tenants by day and model, the input of charge-back.

Rule: an exchange counts once, on the UTC day on which it began; tokens that the engine did not report are kept apart.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime

from msgspec import Struct

from din_extproc.domain.usage import ExchangeRecord, Outcome

_SECONDS_A_DAY = 86_400


class UsageTotals(Struct, gc=False):
    """Sums over exchanges of one tenant, model and day."""

    requests: int = 0
    """Sent on to a node."""
    failed: int = 0
    """Of these, how many did not end with a whole answer."""
    refused: int = 0
    would_refuse: int = 0
    """Sent on, though a limit in shadow mode says no."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Part of the prompt tokens."""
    estimated_tokens: int = 0
    """Part of prompt and completion tokens: the engine did not count them."""
    cost: int = 0
    """In 10**-9 of the currency."""
    saved: int = 0
    """The additional cost that the most expensive models of the requested names would have had, likewise."""


class UsageKey(Struct, frozen=True, gc=False):
    """The key of a usage counter. `model` is the physical model; "": refused before one was chosen."""

    day: str
    tenant: str
    model: str
    key_id: str = ""
    """Of the API key or other identity; "" in usage from before keys were told apart."""
    rule: str = ""
    """The routing rule; "" where none took the request, and in usage from before rules were told apart."""


class UsageBook:
    """Usage counted since the last `take_totals`."""

    def __init__(self) -> None:
        self._used: dict[UsageKey, UsageTotals] = {}
        self._day = (0, "")

    def on_exchange(self, record: ExchangeRecord) -> None:
        """An exchange is over."""
        if not record.tenant:
            return
        line = UsageKey(self._name(int(record.started_at) // _SECONDS_A_DAY), record.tenant, record.model, record.key_id, record.rule)
        used = self._used.get(line)
        if used is None:
            used = self._used[line] = UsageTotals()
        if record.refusal:
            used.refused += 1
            return
        usage = record.usage
        used.requests += 1
        used.failed += record.outcome is not Outcome.COMPLETED
        used.would_refuse += bool(record.would_refuse)
        used.prompt_tokens += usage.prompt_tokens
        used.completion_tokens += usage.completion_tokens
        used.cached_tokens += usage.cached_tokens
        used.estimated_tokens += usage.total_tokens if usage.estimated else 0
        used.cost += record.cost
        used.saved += record.saved

    def take_totals(self) -> dict[UsageKey, UsageTotals]:
        """Return the usage counted since the last call."""
        used, self._used = self._used, {}
        return used

    def _name(self, day: int) -> str:
        if self._day[0] != day:
            self._day = day, format_day(day * _SECONDS_A_DAY).isoformat()
        return self._day[1]


def format_day(seconds: float) -> date:
    """The UTC day of a moment in seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).date()


DIMENSIONS: dict[str, Callable[[UsageKey], str]] = {
    "day": lambda line: line.day,
    "tenant": lambda line: line.tenant,
    "key": lambda line: "" if ":" in line.key_id else line.key_id,
    "identity": lambda line: line.key_id if ":" in line.key_id else "",
    "model": lambda line: line.model,
    "rule": lambda line: line.rule,
}
"""Keys by which usage can be grouped. An identity that is no API key has a colon in its id, such as `jwt:alice`."""
SUMS = UsageTotals.__struct_fields__


def group_usage(used: Iterable[tuple[UsageKey, UsageTotals]], by: Sequence[str]) -> dict[tuple[str, ...], UsageTotals]:
    """Return the sums of each group, in order."""
    groups: dict[tuple[str, ...], UsageTotals] = {}
    for line, sums in used:
        whole = groups.setdefault(tuple([DIMENSIONS[name](line) for name in by]), UsageTotals())
        for name in SUMS:
            setattr(whole, name, getattr(whole, name) + getattr(sums, name))
    return dict(sorted(groups.items()))
