"""Automatic prefix caching: the blocks of earlier prompts that are still in memory, like vLLM's."""

from collections.abc import Sequence
from itertools import takewhile


def hash_blocks(pieces: Sequence[str], size: int) -> tuple[int, ...]:
    """Return a hash for each full block of a prompt of these tokens. It depends on all blocks before it."""
    hashes: list[int] = []
    before = 0
    for start in range(0, len(pieces) - size + 1, size):
        before = hash((before, *pieces[start : start + size]))
        hashes.append(before)
    return tuple(hashes)


class PrefixCache:
    """The cached blocks of one engine, the least recently used first."""

    def __init__(self) -> None:
        self.queries = 0
        """Prompt tokens that were looked up."""
        self.hits = 0
        """Those that were cached."""
        self._blocks: dict[int, None] = {}

    def take(self, blocks: Sequence[int], *, tokens: int, size: int, room: int) -> int:
        """Return how many tokens at the beginning of a prompt are cached, and cache its blocks.

        Args:
            blocks: The prompt's, from `hash_blocks`.
            tokens: Length of the prompt. At least one of them is computed.
            size: Tokens per block.
            room: Blocks of the memory that no running sequence holds; older blocks beyond them are evicted.
        """
        cached = min(size * sum(1 for _ in takewhile(self._blocks.__contains__, blocks)), tokens - 1)
        self.queries += tokens
        self.hits += cached
        for block in reversed(blocks):  # the end of a prompt is evicted before its beginning
            self._blocks.pop(block, None)
            self._blocks[block] = None
        for block in list(self._blocks)[: max(0, len(self._blocks) - room)]:
            del self._blocks[block]
        return cached
