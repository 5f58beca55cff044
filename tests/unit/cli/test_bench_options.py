"""Options of `bench split` that hold several numbers."""

import pytest
import typer

from din_extproc.cli.plan.bench import _parse_counts


def test_numbers_come_with_commas_and_again_and_again():
    assert _parse_counts(["1,20", "300", " 4 , 5 "]) == (1, 20, 300, 4, 5)


@pytest.mark.parametrize("text", ["", "0", "1,", "-3", "ten", "1.5"])
def test_what_is_no_list_of_positive_numbers_is_refused(text):
    with pytest.raises(typer.BadParameter, match="not a list of positive numbers such as 1,20"):
        _parse_counts([text])
