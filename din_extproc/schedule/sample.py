"""A few nodes of many: the power of k choices.

Rule: the same chance gives the same sample; every node can be in it; no more is looked at however many nodes there are.
"""

_MASK = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
"""Knuth's linear congruential generator: the high bits are good enough to choose nodes by."""

SIZE = 8
"""Nodes looked at. Two would do for balance (the power of two choices); eight also find the quick ones among uneven nodes."""


def sample(population: int, size: int, chance: int) -> list[int]:
    """Different indexes below `population`, at most `size`: one from each of as many equal parts, or all in turn from a random one.

    Args:
        population: At least 1.
        size: At least 1.
        chance: Any whole number.
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
