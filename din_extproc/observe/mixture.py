"""The share of a model's traffic on nodes of another dtype than the rest: their responses differ, so the operator is alerted.

Rule: counts decay with a half-life of a minute; an alarm is raised and cleared once, not per request.
"""

from collections.abc import Iterator

from msgspec import Struct

_HALF_LIFE_S = 60.0
_RAISED_AT = 0.01
_LIFTED_AT = 0.001


class DtypeAlarm(Struct, frozen=True):
    """A model's requests are, or are no longer, answered in more than one dtype."""

    model: str
    mixed: bool
    share: float
    """Of requests outside the commonest dtype."""
    dtypes: tuple[str, ...]
    """The commonest first."""


class DtypeMixture:
    """Requests by model and dtype, lately."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, float]] = {}
        self._at = 0.0
        self._alarmed: set[str] = set()

    def count(self, model: str, dtype: str) -> None:
        """A request for the model was answered in this dtype."""
        own = self._counts.setdefault(model, {})
        own[dtype] = own.get(dtype, 0.0) + 1.0

    def share(self, model: str) -> float:
        """The share of the model's requests outside its commonest dtype, 0 to 0.5 for two dtypes."""
        own = self._counts.get(model, {})
        total = sum(own.values())
        return 1.0 - max(own.values()) / total if total else 0.0

    def shares(self) -> dict[str, float]:
        """By model, of models that are answered in more than one dtype."""
        return {model: round(share, 4) for model in self._counts if (share := self.share(model)) >= _LIFTED_AT}

    def look(self, now: float) -> Iterator[DtypeAlarm]:
        """Alarms that are raised or lifted now; `now` in seconds, any monotonic clock. Fades what was counted before."""
        fade = 0.5 ** ((now - self._at) / _HALF_LIFE_S)
        self._at = now
        for model, own in self._counts.items():
            for dtype in own:
                own[dtype] *= fade
            share = self.share(model)
            mixed = model in self._alarmed
            if share >= _RAISED_AT and not mixed:
                self._alarmed.add(model)
            elif share < _LIFTED_AT and mixed:
                self._alarmed.discard(model)
            else:
                continue
            yield DtypeAlarm(model, not mixed, share, tuple(sorted(own, key=lambda dtype: -own[dtype])))
