"""Version constraints: every spelling that clients and configurations may use."""

import pytest

from din_extproc.route.versions import ANY, MAX_LENGTH, combine, parse_constraint


@pytest.mark.parametrize(
    ("constraint", "inside", "outside"),
    [
        (">=2025.3,<2026", "2025.3 2025.12.31 2025.03.1", "2025.2.9 2026 2026.1 2026rc1"),
        ("2025.03.1", "2025.3.1 2025.03.01 2025.3.1.0 2025.3.1+awq", "2025.3 2025.3.2"),
        ("=2025.3", "2025.3 2025.3.0", "2025.3.1"),
        ("~2025.3", "2025.3 2025.3.9", "2025.4 2025.2"),
        ("~2025", "2025 2025.12", "2026 2024.9"),
        ("~1.2.3", "1.2.3 1.2.9", "1.3 1.2.2"),
        ("^2025.3", "2025.3 2025.12", "2026 2025.2"),
        ("^0.3.1", "0.3.1 0.3.9", "0.4 1.0"),
        ("^0.0.3", "0.0.3", "0.0.4"),
        ("^0", "0.9", "1"),
        ("2025.3.*", "2025.3 2025.3.7", "2025.30 2025.4"),
        ("!=2025.3.2", "2025.3.1", "2025.3.2"),
        (" >= 2025.3 , < 2026 ", "2025.5", "2026"),
        ("v1.2", "1.2", "1.3"),
        (">=1.0-rc.1", "1.0rc1 1.0", "1.0b1"),
    ],
)
def test_a_constraint_lets_in_what_it_says(constraint, inside, outside):
    parsed = parse_constraint(constraint)
    assert parsed is not None
    assert [version for version in inside.split() if not parsed.allows(version)] == []
    assert [version for version in outside.split() if parsed.allows(version)] == []


@pytest.mark.parametrize("constraint", ["", "  ", "*", "==*", "*,*"])
def test_nothing_and_a_star_allow_even_a_version_that_is_none(constraint):
    parsed = parse_constraint(constraint)
    assert parsed is not None
    assert parsed.allows("nightly")


def test_an_unreadable_version_meets_no_real_constraint():
    assert not parse_constraint(">=0").allows("nightly")
    assert not parse_constraint("!=1").allows("")


@pytest.mark.parametrize(
    "constraint",
    [
        "latest",
        ">=",
        ">=1,,<2",
        ">=1,",
        ">=1 <2",
        "1 || 2",
        "~latest",
        "^*",
        ">*",
        "===1",
        "1.*.2",
        ">=1.*",
        "\ud83d",
        "1" * (MAX_LENGTH + 1),
    ],
)
def test_a_text_that_is_no_constraint_is_none(constraint):
    assert parse_constraint(constraint) is None


def test_constraints_are_read_once_and_combined_by_and():
    assert parse_constraint("~2025.3") is parse_constraint("~2025.3")
    assert combine("", " ") is ANY
    both = combine(">=2025.3", "", "<2026")
    assert both.allows("2025.3")
    assert not both.allows("2026")
    assert combine(">=1", "nonsense") is None
