"""What became of one sampled double check (R41): did nodes that should agree say the same?"""

from enum import StrEnum

from msgspec import Struct


class Agreement(StrEnum):
    """How two answers to the same question compare."""

    AGREE = "agree"
    """Token by token the same."""
    CLOSE = "close"
    """They part where the model itself was undecided: rounding, as other requests beside it cause, explains that."""
    DIFFER = "differ"
    UNANSWERED = "unanswered"
    """One of them did not answer, or not in a way that can be compared."""


class DoubleCheckResult(Struct, frozen=True):
    """One double check. No prompt, no answer."""

    trace_id: str
    """Of the request that was sampled."""
    model: str
    version: str
    dtype: str
    node_id: str
    second_node_id: str
    agreement: Agreement
    at_token: int = 0
    """The first that differs, counted from 0."""
    tokens: int = 0
    """Compared."""
    blamed: tuple[str, ...] = ()
    """Whose answer is the odd one; both, when no third node could tell."""
