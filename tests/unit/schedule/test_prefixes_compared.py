"""What affinity to prefixes brings on modelled engines with prefix caches."""

from tests.bench.prefixes import measure


def test_behind_long_shared_prompts_the_first_token_comes_in_half_the_time_of_round_robin():
    measured = measure(120.0)
    affinity, turns = measured["prefix_affinity"].first_token_s, measured["round_robin"].first_token_s
    assert affinity.p90 <= 0.5 * turns.p90
