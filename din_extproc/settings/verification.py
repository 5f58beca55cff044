"""`verification:`, how many requests are asked once more of two nodes that should agree, and what that may cost.

Rule: without the section nothing is.
"""

from typing import Annotated

from pydantic import Field

from din_extproc.flow.double_check import DoubleCheckPolicy
from din_extproc.settings.section import Section


class VerificationSection(Section):
    """`verification:`."""

    share: Annotated[float, Field(strict=False, gt=0, le=1)] = 0.01
    """Of comparable requests."""
    tokens_per_minute: Annotated[int, Field(ge=100, le=10**9)] = 20_000
    """Prompts and answers, of all workers of this sidecar together."""
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    """Of each answer that is compared."""

    def policy(self, workers: int) -> DoubleCheckPolicy:
        """One worker's part."""
        return DoubleCheckPolicy(self.share, self.tokens_per_minute // workers, self.max_tokens)
