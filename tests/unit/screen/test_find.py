"""What counts as sensitive, and what only looks so."""

import pytest

from din_extproc.screen.find import Screen
from din_extproc.screen.kinds import BUILT_IN, custom

SCREEN = Screen(BUILT_IN.values())
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----"


def found(text: str, screen: Screen = SCREEN) -> list[tuple[str, str]]:
    places = screen.find([text.encode()]).places
    return [(place.kind.name, text.encode()[place.start : place.end].decode()) for place in places]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("email", "alice.b+c@mail.example.co.uk"),
        ("phone", "13800138000"),
        ("phone", "+86 138 0013 8000"),
        ("phone", "+44 20 7946 0958"),
        ("phone", "(415) 555-2671"),
        ("phone", "415-555-2671"),
        ("national_id", "11010519491231002X"),
        ("national_id", "078-05-1120"),
        ("national_id", "AB 12 34 56 C"),
        ("national_id", "12345678Z"),
        ("national_id", "X1234567L"),
        ("national_id", "1 85 05 78 006 084 91"),
        ("national_id", "529.982.247-25"),
        ("bank_card", "4111111111111111"),
        ("bank_card", "4111 1111 1111 1111"),
        ("bank_card", "5500-0000-0000-0004"),
        ("bank_card", "3782 822463 10005"),
        ("bank_card", "6222021234567890128"),
        ("secret", "sk-proj-abcdefghijklmnopqrstuvwxyz0123"),
        ("secret", "AKIAIOSFODNN7EXAMPLE"),
        ("secret", "ghp_" + "a1B2" * 9),
        ("secret", "xoxb-1234567890-abcdef"),
        ("secret", "AIza" + "x" * 35),
        ("secret", "din_fin-2026-11_HkQ67137dVaKBtXmnsUsVYdaeIAKHTDHsgnj2kNqFcy"),
        ("secret", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"),
        ("secret", PEM),
    ],
)
@pytest.mark.parametrize("around", ["{}", "see {}, please", "我的是{}。", "({})", '"x": "{}"', "line\n{}\nline", r"in a tool call:\n{}\n"])
def test_each_kind_is_found_to_the_byte_wherever_it_stands(kind, data, around):
    assert found(around.replace("{}", data)) == [(kind, data)]


@pytest.mark.parametrize(
    "text",
    [
        "4111111111111112",  # Luhn
        "4111 1111 1111 1112",
        "110105194912310021",  # check digit
        "000-12-3456",
        "666-12-3456",
        "12345678A",
        "111.111.111-11",
        "0.13812345678",
        "a13800138000f",
        "sha256 3f13800138000aa9e41111111111111110f",
        "order 20241231123456 of 2025-03-01 12:30:00",
        "alice at example.com, @mention, a@b",
        "sk-short and AKIA1234",
        "version 10.0.0.7:8000, 2025.3.1",
        "卡号没有",
        "",
    ],
)
def test_what_only_looks_so_is_left_alone(text):
    assert found(text) == []


def test_several_findings_come_in_order_and_side_by_side():
    text = "a@b.co;c@d.ef 13800138000 13900139000 4111111111111111"
    assert [kind for kind, _ in found(text)] == ["email", "email", "phone", "phone", "bank_card"]


def test_no_finding_goes_over_the_end_of_a_text():
    greedy = Screen([custom("until-semicolon", "key=[^;]+")])
    places = greedy.find([b"no", b"key=abc", b"def; key=x;", b"more"]).places
    assert [(place.text, place.start, place.end) for place in places] == [(1, 0, 7), (2, 5, 10)]
    assert SCREEN.find([b"4111 1111", b"1111 1111"]).places == ()


def test_a_finding_inside_another_belongs_to_the_kind_that_comes_first():
    screen = Screen([custom("account", "ACC-[0-9]+"), *BUILT_IN.values()])
    assert found("ACC-13800138000", screen) == [("account", "ACC-13800138000")]
    assert found("ACC-13800138000") == [("phone", "13800138000")]


@pytest.mark.parametrize("pattern", ["(unclosed", "a{3000}", r"(?=ahead)", r"(a)\1", "x*", ""])
def test_a_pattern_that_re2_does_not_take_or_that_matches_nothing_is_refused_with_the_reason(pattern):
    with pytest.raises(ValueError, match=r"\w"):
        custom("mine", pattern)


def test_more_findings_than_the_limit_are_reported_as_incomplete():
    few = Screen(BUILT_IN.values(), most=10)
    many = few.find([b"a@b.co " * 11])
    assert not many.whole
    assert len(many.places) == 10
    assert few.find([b"a@b.co " * 10]).whole
    assert not few.find([b"4111111111111112 " * 11]).whole


@pytest.mark.parametrize("unit", [b"41111111 ", b"a", b"a.a@"])
def test_a_megabyte_that_looks_like_beginnings_holds_what_stands_at_its_end(unit):
    """Patterns that would take for ever where engines go back and try again are among those that are looked for."""
    screen = Screen([*BUILT_IN.values(), custom("nested", "(a+)+b"), custom("either", "(a|aa)+c")])
    text = unit * (1_000_000 // len(unit)) + b" jane@example.com "
    assert b"jane@example.com" in {text[place.start : place.end] for place in screen.find([text]).places}


def test_counts_are_by_kind():
    assert SCREEN.find([b"a@b.co and c@d.ef", b"13800138000"]).counts() == {"email": 2, "phone": 1}
