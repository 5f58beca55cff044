"""The number of tokens to reserve for a request before its output is known.

A reservation never exceeds the largest possible cost of the answer nor the bucket.
"""

from collections import OrderedDict
from collections.abc import Iterable

from msgspec import Struct

_GROWTH = 1.08
"""One step of the running quantile, as a factor: 30 answers move it by a factor of ten."""
_QUANTILE = 0.9


class OutputEstimate(Struct, frozen=True, gc=False):
    """The expected output of one tenant from one model."""

    tenant: str
    model: str
    tokens: float
    count: int
    """Number of answers seen."""


class OutputHistory:
    """A running P90 of completion tokens per tenant and model.

    Each longer answer moves the estimate up by 0.9 steps and each shorter one down by 0.1 steps; both balance where nine answers in ten
    are shorter. Steps are factors, so that short and long answers are tracked alike.

    Args:
        limit: The largest number of (tenant, model) pairs; the least recently updated one is evicted.
        trusted_after: Number of answers before an estimate is used.
    """

    __slots__ = ("_changed", "_estimates", "_limit", "_trusted_after")

    def __init__(self, limit: int = 10_000, trusted_after: int = 20) -> None:
        self._limit = limit
        self._trusted_after = trusted_after
        self._estimates: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._changed: set[tuple[str, str]] = set()

    def learn(self, tenant: str, model: str, completion_tokens: int) -> None:
        """Update the estimate with an answer of so many tokens."""
        key = (tenant, model)
        mark, count = self._estimates.pop(key, (float(max(1, completion_tokens)), 0))
        step = _QUANTILE if completion_tokens > mark else _QUANTILE - 1.0
        self._store(key, (max(1.0, mark * _GROWTH**step), count + 1))
        self._changed.add(key)

    def take_changes(self) -> tuple[OutputEstimate, ...]:
        """Return the estimates that changed since the previous call."""
        changed, self._changed = self._changed, set()
        return tuple(OutputEstimate(*key, *self._estimates[key]) for key in changed if key in self._estimates)

    def merge(self, marks: Iterable[OutputEstimate]) -> None:
        """Replace estimates by those of another process."""
        for mark in marks:
            self._estimates.pop((mark.tenant, mark.model), None)
            self._store((mark.tenant, mark.model), (mark.tokens, mark.count))

    def _store(self, key: tuple[str, str], mark: tuple[float, int]) -> None:
        self._estimates[key] = mark
        if len(self._estimates) > self._limit:
            self._estimates.popitem(last=False)

    def expected_tokens(self, tenant: str, model: str) -> int | None:
        """Return the number of tokens that nine answers in ten stay under; None while too few were seen."""
        mark = self._estimates.get((tenant, model))
        if mark is None or mark[1] < self._trusted_after:
            return None
        return int(mark[0]) + 1


def compute_reservation(prompt_tokens: int, requested: int | None, expected: int | None, default: int, bucket: int | None) -> int:
    """Return the number of tokens to reserve: the prompt and the expected output.

    Args:
        prompt_tokens: The prompt's estimate.
        requested: The largest output that the client allows, None if unspecified.
        expected: The learned output of this tenant and model, None when unknown.
        default: Assumed output while nothing else is known.
        bucket: The smallest applicable `tpm`; None when tokens are not limited. A prompt that exceeds it keeps its size, so that
            the ledger reports it as oversized.
    """
    output = min((bound for bound in (requested, expected) if bound is not None), default=default)
    total = prompt_tokens + output
    if bucket is not None and total > bucket >= prompt_tokens:
        return bucket
    return total
