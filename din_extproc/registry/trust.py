"""Trust in a node (R14), 0 to 1, from what it did: heartbeats kept, answers given, claims that did not hold.

Rule: everything counted fades with a half-life of ten minutes, so that a node earns trust back by behaving, and nothing is held for ever.

    trust = kept * served * honest
    kept   = (beats + 4) / (beats + missed + 4)
    served = (answers + 8) / (answers + failures + 8)
    honest = 0.5 ** mismatches

A new node has 1. Twelve missed heartbeats in a row make a quarter out of a new node's `kept`, and next to nothing out of that of a node
that has beaten for an hour; a node that fails every second request falls to about a half; each claim that did not hold halves.
"""

from msgspec import Struct

_HALF_LIFE_S = 600.0
_BEATS_GIVEN = 4.0
_ANSWERS_GIVEN = 8.0


class Evidence(Struct, frozen=True, gc=False, array_like=True):
    """What a node did, faded up to `at`."""

    at: float
    """Seconds since the epoch."""
    beats: float = 0.0
    missed: float = 0.0
    answers: float = 0.0
    failures: float = 0.0
    mismatches: float = 0.0

    def plus(
        self, now: float, *, beats: float = 0, missed: float = 0, answers: float = 0, failures: float = 0, mismatches: float = 0
    ) -> "Evidence":
        """With this added now."""
        fade = 0.5 ** (max(0.0, now - self.at) / _HALF_LIFE_S)
        return Evidence(
            at=max(now, self.at),
            beats=self.beats * fade + beats,
            missed=self.missed * fade + missed,
            answers=self.answers * fade + answers,
            failures=self.failures * fade + failures,
            mismatches=self.mismatches * fade + mismatches,
        )

    def trust(self, now: float) -> float:
        """The score now, 0 to 1."""
        faded = self.plus(now)
        kept = (faded.beats + _BEATS_GIVEN) / (faded.beats + faded.missed + _BEATS_GIVEN)
        served = (faded.answers + _ANSWERS_GIVEN) / (faded.answers + faded.failures + _ANSWERS_GIVEN)
        return float(kept * served * 0.5**faded.mismatches)
