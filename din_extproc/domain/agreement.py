"""The result of a sampled double check: whether nodes that should agree gave the same answer."""

from enum import StrEnum

from msgspec import Struct


class Agreement(StrEnum):
    """The result of comparing two responses to the same prompt."""

    AGREE = "agree"
    """Every token is the same."""
    CLOSE = "close"
    """The answers diverge at a token for which the model's candidates were nearly equal, which rounding in batched inference explains."""
    DIFFER = "differ"
    UNANSWERED = "unanswered"
    """A node did not answer, or its answer can't be compared."""


class DoubleCheckResult(Struct, frozen=True):
    """One double check. It holds neither the prompt nor an answer."""

    trace_id: str
    """The trace id of the sampled request."""
    model: str
    version: str
    dtype: str
    node_id: str
    second_node_id: str
    agreement: Agreement
    at_token: int = 0
    """Index of the first token that differs, from 0."""
    tokens: int = 0
    """The number of tokens compared."""
    blamed: tuple[str, ...] = ()
    """The nodes whose answer deviates; both when no third node could decide."""
