"""Trust score of a node, 0 to 1, from heartbeats, completed requests, false claims and comparisons.

Invariant: all evidence decays with a half-life of ten minutes, so that a node regains trust.

    trust = kept * served * honest * agreeing
    kept     = (beats + 4) / (beats + missed + 4)
    served   = (answers + 8) / (answers + failures + 8)
    honest   = 0.5 ** mismatches
    agreeing = (agreements + 2) / (agreements + 2 * disagreements + 2)

A new node has 1. Twelve missed heartbeats in a row make a quarter out of a new node's `kept`, and next to nothing out of that of a node
that has beaten for an hour; a node that fails every second request falls to about a half; each claim that did not hold halves.
The first answer that is not what another node of its kind gives halves the trust of a node that was never checked before.
"""

from msgspec import Struct

_HALF_LIFE_S = 600.0
_HEARTBEATS_PRIOR = 4.0
_ANSWERS_PRIOR = 8.0
_COMPARISONS_PRIOR = 2.0
_MAX_DISAGREEMENTS = 2.5
"""Threshold of disagreements, reached by the third within minutes."""
_MAX_DISAGREEMENT_SHARE = 0.1
_REHABILITATED_BELOW = 1.0


class Evidence(Struct, frozen=True, gc=False, array_like=True):
    """Evidence about a node, decayed to `at`."""

    at: float
    """Seconds since the epoch."""
    heartbeats: float = 0.0
    missed: float = 0.0
    answers: float = 0.0
    failures: float = 0.0
    mismatches: float = 0.0
    agreements: float = 0.0
    """Answers that agree with a node of the same model, version and dtype."""
    disagreements: float = 0.0

    @property
    def is_contradicted(self) -> bool:
        """Return whether answers disagreed repeatedly; a single one may be chance (batching changes results)."""
        return self.disagreements >= _MAX_DISAGREEMENTS and self.disagreements > _MAX_DISAGREEMENT_SHARE * (
            self.agreements + self.disagreements
        )

    @property
    def is_rehabilitated(self) -> bool:
        """Return whether the disagreements have decayed."""
        return self.disagreements < _REHABILITATED_BELOW

    def add(
        self,
        now: float,
        *,
        beats: float = 0,
        missed: float = 0,
        answers: float = 0,
        failures: float = 0,
        mismatches: float = 0,
        agreements: float = 0,
        disagreements: float = 0,
    ) -> "Evidence":
        """Return the evidence with these events added."""
        fade = 0.5 ** (max(0.0, now - self.at) / _HALF_LIFE_S)
        return Evidence(
            at=max(now, self.at),
            heartbeats=self.heartbeats * fade + beats,
            missed=self.missed * fade + missed,
            answers=self.answers * fade + answers,
            failures=self.failures * fade + failures,
            mismatches=self.mismatches * fade + mismatches,
            agreements=self.agreements * fade + agreements,
            disagreements=self.disagreements * fade + disagreements,
        )

    def score_trust(self, now: float) -> float:
        """Return the trust score, 0 to 1."""
        faded = self.add(now)
        kept = (faded.heartbeats + _HEARTBEATS_PRIOR) / (faded.heartbeats + faded.missed + _HEARTBEATS_PRIOR)
        served = (faded.answers + _ANSWERS_PRIOR) / (faded.answers + faded.failures + _ANSWERS_PRIOR)
        agreeing = (faded.agreements + _COMPARISONS_PRIOR) / (faded.agreements + 2 * faded.disagreements + _COMPARISONS_PRIOR)
        return float(kept * served * 0.5**faded.mismatches * agreeing)
