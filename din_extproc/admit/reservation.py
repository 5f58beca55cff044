"""How many tokens to set aside for a request whose answer is not written yet.

Rule: a reservation is never larger than what the answer can cost, nor than the bucket it comes from.
"""

from collections import OrderedDict
from collections.abc import Iterable

from msgspec import Struct

_GROWTH = 1.08
"""One step of the running quantile, as a factor: 30 answers carry it across a power of ten."""
_QUANTILE = 0.9


class OutputEstimate(Struct, frozen=True, gc=False):
    """How long one tenant's answers from one model usually are."""

    tenant: str
    model: str
    tokens: float
    count: int
    """Answers seen."""


class OutputHistory:
    """A running P90 of completion tokens per tenant and model.

    Each answer moves the mark up by 0.9 steps when it was longer and down by 0.1 steps when it was shorter; where the two
    balance, nine answers in ten are shorter. Steps are factors, so that short and long answers are tracked alike.

    Args:
        limit: How many (tenant, model) pairs are remembered; the one not heard of for longest goes first.
        trusted_after: Answers seen before the mark is believed.
    """

    __slots__ = ("_changed", "_limit", "_marks", "_trusted_after")

    def __init__(self, limit: int = 10_000, trusted_after: int = 20) -> None:
        self._limit = limit
        self._trusted_after = trusted_after
        self._marks: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._changed: set[tuple[str, str]] = set()

    def learn(self, tenant: str, model: str, completion_tokens: int) -> None:
        """An answer of so many tokens has ended."""
        key = (tenant, model)
        mark, count = self._marks.pop(key, (float(max(1, completion_tokens)), 0))
        step = _QUANTILE if completion_tokens > mark else _QUANTILE - 1.0
        self._keep(key, (max(1.0, mark * _GROWTH**step), count + 1))
        self._changed.add(key)

    def changed(self) -> tuple[OutputEstimate, ...]:
        """What was learned since this was last asked."""
        changed, self._changed = self._changed, set()
        return tuple(OutputEstimate(*key, *self._marks[key]) for key in changed if key in self._marks)

    def adopt(self, marks: Iterable[OutputEstimate]) -> None:
        """Know what another process has learned."""
        for mark in marks:
            self._marks.pop((mark.tenant, mark.model), None)
            self._keep((mark.tenant, mark.model), (mark.tokens, mark.count))

    def _keep(self, key: tuple[str, str], mark: tuple[float, int]) -> None:
        self._marks[key] = mark
        if len(self._marks) > self._limit:
            self._marks.popitem(last=False)

    def expected(self, tenant: str, model: str) -> int | None:
        """Tokens that nine answers in ten stay under; None while too few were seen."""
        mark = self._marks.get((tenant, model))
        if mark is None or mark[1] < self._trusted_after:
            return None
        return int(mark[0]) + 1


def reservation(prompt_tokens: int, requested: int | None, expected: int | None, default: int, bucket: int | None) -> int:
    """Tokens to reserve: the prompt and the likely output.

    Args:
        prompt_tokens: The prompt's estimate.
        requested: The largest output the client allows, None when it did not say.
        expected: What this tenant's answers from this model usually stay under, None when unknown.
        default: Assumed output while nothing else is known.
        bucket: The smallest `tpm` that applies; None when tokens are not limited. A prompt that alone is larger keeps its
            size, so that the ledger can say that it never fits.
    """
    output = min((bound for bound in (requested, expected) if bound is not None), default=default)
    total = prompt_tokens + output
    if bucket is not None and total > bucket >= prompt_tokens:
        return bucket
    return total
