"""Hand edits of a rendered file survive the next rendering, or are named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.control.hand_edits import EditConflict, merge_edits

BEFORE = "a: 1\nb: 2\nc: 3\nd: 4\n"


@pytest.mark.parametrize(
    ("by_hand", "rendered", "together"),
    [
        (BEFORE, "a: 1\nb: 9\nc: 3\nd: 4\n", "a: 1\nb: 9\nc: 3\nd: 4\n"),
        ("a: 1\nb: 2\nc: 3\nd: 5\n", BEFORE, "a: 1\nb: 2\nc: 3\nd: 5\n"),
        ("a: 1  # mine\nb: 2\nc: 3\nd: 4\n", "a: 1\nb: 2\nc: 3\nd: 9\n", "a: 1  # mine\nb: 2\nc: 3\nd: 9\n"),
        ("a: 1\nmine: yes\nb: 2\nc: 3\nd: 4\n", "a: 1\nb: 2\nd: 4\ne: 5\n", "a: 1\nmine: yes\nb: 2\nd: 4\ne: 5\n"),
        ("b: 2\nc: 3\nd: 4\n", "a: 1\nb: 2\nc: 3\nd: 4\nnew: 1\n", "b: 2\nc: 3\nd: 4\nnew: 1\n"),
        ("a: 1\nb: 9\nc: 3\nd: 4\n", "a: 1\nb: 9\nc: 3\nd: 4\n", "a: 1\nb: 9\nc: 3\nd: 4\n"),
    ],
)
def test_changes_at_different_places_are_both_kept(by_hand, rendered, together):
    assert merge_edits(BEFORE, by_hand, rendered) == together


def test_changes_at_one_place_are_named_with_what_each_says():
    [place] = merge_edits(BEFORE, "a: 1\nb: mine\nc: 3\nd: 4\n", "a: 1\nb: new\nc: 3\nd: 4\n")
    assert place == EditConflict(2, ("b: mine\n",), ("b: new\n",))
    assert str(place) == "line 2: by hand 'b: mine', now rendered 'b: new'"


TEXTS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=12).map(lambda lines: "".join(f"{line}\n" for line in lines))


@given(TEXTS, TEXTS)
def test_what_only_one_has_changed_is_taken_whole(before, after):
    assert merge_edits(before, before, after) == after
    assert merge_edits(before, after, before) == after
    assert merge_edits(before, after, after) == after
