"""The table of `tenants` on terminals of several widths."""

from io import StringIO

import pytest
from rich.console import Console

from din_extproc.roles.operate.tenants import _brief, _table

ROW = {
    "tenant": "department-of-finance",
    "priority": "critical",
    "enforced": False,
    "requests": 12_345,
    "rpm": 1_000_000,
    "tokens": 98_765_432,
    "tpm": 100_000_000,
    "streams": 127,
    "max_streams": 10_000,
    "waiting": 3,
    "today": {"requests": 1_234_567, "refused": 99, "would_refuse": 7, "prompt_tokens": 4_000_000_000, "completion_tokens": 567_000_000},
    "cost": "12.34 EUR",
}


@pytest.mark.parametrize("width", [60, 80, 100, 140, 160])
def test_every_width_shows_load_and_limits_in_full(width):
    output = StringIO()
    Console(width=width, file=output).print(_table({"network": "", "stale": False, "count": 1, "tenants": [ROW]}, width))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    columns = zip(*(line.strip("│").split("│") for line in lines if line.startswith("│")), strict=True)
    texts = ["".join(part.strip() for part in column) for column in columns]
    expected = ["department-of-finance", "12,345 / 1M", "98.8M / 100M", "127 / 10,000"]
    assert texts[: len(expected)] == expected if width < 120 else [texts[0], *texts[2:5]] == expected
    assert ("99 (shadow: 7)" in texts) is (width >= 80)
    assert ("4.57G" in texts) is (width >= 100)
    assert ("12.34 EUR" in texts) is (width >= 160)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (99_999, "99,999"), (123_456, "123k"), (999_999, "999k"), (1_000_000, "1M"), (4_567_000_000, "4.57G")]
)
def test_large_numbers_are_short(number, text):
    assert _brief(number) == text
