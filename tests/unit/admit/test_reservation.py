"""How much is set aside before the answer is known."""

import random

from din_extproc.admit.reservation import OutputHistory, compute_reservation


def test_the_likely_output_is_the_smaller_of_what_is_asked_for_and_what_is_usual():
    assert compute_reservation(100, 400, None, 256, None) == 500
    assert compute_reservation(100, 4000, 300, 256, None) == 400
    assert compute_reservation(100, None, None, 256, None) == 356
    assert compute_reservation(100, None, 80, 256, None) == 180


def test_a_reservation_is_never_more_than_the_bucket_but_a_larger_prompt_keeps_its_size():
    assert compute_reservation(1386, 8000, None, 256, 8000) == 8000
    assert compute_reservation(9000, 10, None, 256, 8000) == 9010


def test_the_usual_output_settles_where_nine_answers_in_ten_are_shorter():
    history = OutputHistory()
    chance = random.Random(3)
    for _ in range(19):
        history.learn("t", "m", 10)
    assert history.expected_tokens("t", "m") is None
    for _ in range(5000):
        history.learn("t", "m", chance.randint(1, 1000))
    assert 800 <= history.expected_tokens("t", "m") <= 1000
    assert history.expected_tokens("t", "other") is None


def test_the_history_forgets_the_least_recently_used_pair():
    history = OutputHistory(limit=2, trusted_after=1)
    for tenant in ("a", "b", "a", "c"):
        history.learn(tenant, "m", 5)
    assert history.expected_tokens("b", "m") is None
    assert history.expected_tokens("a", "m") is not None
