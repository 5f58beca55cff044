"""The modelled engine's prefix cache: full blocks, least recently used ones leave first."""

from din_extproc.tools.engine_model.prefix_cache import PrefixCache, hash_blocks

SIZE = 4


def blocks(text: str) -> tuple[int, ...]:
    return hash_blocks(list(text), SIZE)


def take(cache: PrefixCache, text: str, room: int = 100) -> int:
    return cache.take(blocks(text), tokens=len(text), size=SIZE, room=room)


def test_a_block_counts_only_behind_the_same_blocks():
    assert len(blocks("aaaabbbbcc")) == 2
    assert blocks("aaaabbbb")[1] == blocks("aaaabbbbcc")[1] != blocks("xxxxbbbb")[1]


def test_a_prompt_finds_what_an_earlier_one_began_with():
    cache = PrefixCache()
    assert [take(cache, text) for text in ("aaaabbbbcc", "aaaabbbbdddd", "aaaaxxxx", "yyyybbbb")] == [0, 8, 4, 0]
    assert (cache.queries, cache.hits) == (10 + 12 + 8 + 8, 12)


def test_the_last_token_of_a_prompt_is_always_computed():
    cache = PrefixCache()
    take(cache, "aaaabbbb")
    assert take(cache, "aaaabbbb") == 7


def test_of_the_blocks_beyond_the_free_memory_the_end_of_the_oldest_prompt_is_evicted_first():
    cache = PrefixCache()
    take(cache, "aaaabbbb")
    take(cache, "cccc", room=2)
    assert take(cache, "aaaabbbb", room=2) == 4
    assert take(cache, "cccc", room=2) == 0
