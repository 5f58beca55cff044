"""Sampling of a few nodes out of many: the power of k choices.

The sample is a function of `chance`, can contain every node, and has the same size for any number of nodes.
"""

_MASK = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
"""Knuth's linear congruential generator; its high bits are random enough to choose nodes."""

SAMPLE_SIZE = 8
"""Sample size. Two balance load (the power of two choices); eight also find the fast nodes among uneven ones."""


def sample(population: int, size: int, chance: int) -> list[int]:
    """Return up to `size` different indexes below `population`: one from each of `size` equal parts, or all of them from a random start.

    Args:
        population: At least 1.
        size: At least 1.
        chance: Any integer.
    """
    chance = (chance * _MULTIPLIER + _INCREMENT) & _MASK
    if population <= size:
        first = (chance >> 32) * population >> 32
        return [*range(first, population), *range(first)]
    found = []
    start = 0
    for part in range(1, size + 1):
        end = population * part // size
        chance = (chance * _MULTIPLIER + _INCREMENT) & _MASK
        found.append(start + ((chance >> 32) * (end - start) >> 32))
        start = end
    return found
