"""The route cache: kept for its time, bounded, and emptied at once."""

from din_extproc.route.cache import RouteCache


def test_a_decision_is_good_for_its_time_and_not_longer():
    cache = RouteCache(ttl_s=2.0)
    cache.store(("p", "", 1), "x", 10.0)
    assert cache.find(("p", "", 1), 11.9) == "x"
    assert cache.find(("p", "", 1), 12.0) is None
    assert (cache.hits, cache.misses) == (1, 1)


def test_another_segment_or_constraint_of_the_same_pool_is_another_decision():
    cache = RouteCache()
    cache.store(("p", "", 1), "x", 0.0)
    assert cache.find(("p", "", 2), 0.0) is None
    assert cache.find(("p", ">=2", 1), 0.0) is None


def test_a_change_of_topology_empties_it_at_once():
    cache = RouteCache()
    cache.store(("p", "", 1), "x", 0.0)
    cache.clear()
    assert cache.find(("p", "", 1), 0.0) is None


def test_it_never_grows_over_its_limit():
    cache = RouteCache(limit=8)
    for segment in range(100):
        cache.store(("p", "", segment), segment, 0.0)
    assert cache.find(("p", "", 99), 0.0) == 99
    assert sum(cache.find(("p", "", n), 0.0) is not None for n in range(100)) <= 8
