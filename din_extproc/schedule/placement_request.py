"""What a strategy may know of the request that it finds a node for.

Rule: plain numbers, the time and the chance among them: the same ask gives the same pick.
"""

from msgspec import Struct


class PlacementRequest(Struct, frozen=True, gc=False):
    """One request, as scheduling sees it."""

    prompt_tokens: int
    output_tokens: int
    """As many as the answer will likely have."""
    now: float
    """Seconds, the machine's monotonic clock."""
    chance: int = 0
    """Any whole number, different for each request: which nodes of a large pool are looked at, and which of equals comes first."""
    prefix: int = 0
    """The same for requests whose prompts begin alike; 0: not known."""
