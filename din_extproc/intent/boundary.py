"""Decides when an estimate is too inexact: when a boundary that affects a decision lies within its error.

Counting exactly costs milliseconds, so it is requested only where the decision could change.
"""

from collections.abc import Sequence

from din_extproc.domain.request import Estimate


def needs_exact(estimate: Estimate, band: float, boundaries: Sequence[int]) -> bool:
    """Return whether an exact count could put the prompt, or the longest of its inputs, on the other side of a boundary.

    Args:
        estimate: The prompt's size.
        band: Relative error that estimates stay within (`Calibration.band`).
        boundaries: Token counts at which a decision changes: rule thresholds, the pools' `max_seq_len` less the requested
            output, the tenant's `tpm`.
    """
    if estimate.exact or not boundaries:
        return False
    slack = band * (estimate.tokens - estimate.fixed) + 1
    low, high = estimate.tokens - slack, estimate.tokens + slack
    if any(low <= boundary <= high for boundary in boundaries):
        return True
    return estimate.longest is not None and needs_exact(estimate.longest, band, boundaries)
