"""The properties of a request that strategies use.

Most are plain numbers, including the time and the random number, so that the same request gives the same choice.
"""

from msgspec import Struct


class PlacementRequest(Struct, frozen=True, gc=False):
    """One request as seen by scheduling."""

    prompt_tokens: int
    output_tokens: int
    """The expected output."""
    now: float
    """Seconds of the machine's monotonic clock."""
    chance: int = 0
    """A random integer per request: it selects the sample of a large pool and the order of equal nodes."""
    prefix: int = 0
    """Hash of the prompt's prefix, equal for prompts that start alike; 0: unknown."""
    worst_tokens: int = 0
    """Prompt and output could need so many tokens, however wrong the estimate is; 0: they were counted."""
    long: bool = False
    """It belongs to the pool's long tail."""
    full: frozenset[str] = frozenset()
    """Ids of nodes whose slots for long requests turned out to be taken."""
