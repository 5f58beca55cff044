"""The map of field cases is whole, and what it names exists. `make golden` writes the names of the tests anew.

Rule: which cases there are stands in the map.
"""

import ast
import os
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
MAP = TESTS / "field_cases.md"
SHOWN = 4
"""Tests of one case that are named; there may be more."""


def named_by_case() -> dict[str, list[str]]:
    """By the case's id, the tests whose names carry it."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for each in ast.walk(ast.parse(file.read_text())):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test_b"):
                for number in re.findall(r"(?<=_)b(\d{2,3})(?=_)", each.name):
                    found.setdefault(f"B{number}", []).append(f"{file.relative_to(TESTS)}::{each.name}")
    return found


def test_all_78_cases_are_there_each_with_tests_that_exist():
    found = named_by_case()
    text = MAP.read_text()
    cases = re.findall(r"^- \*\*(B\d+)\*\* ", text, re.MULTILINE)
    assert len(cases) == len(set(cases)) == 78
    assert [case for case in cases if case not in found] == []

    def line(at: re.Match[str]) -> str:
        return f"- **{at[1]}** " + ", ".join(f"`{name}`" for name in found[at[1]][:SHOWN])

    written = re.sub(r"^- \*\*(B\d+)\*\* .*$", line, text, flags=re.MULTILINE)
    if os.environ.get("DIN_REWRITE_GOLDENS") == "1":
        MAP.write_text(written)
    assert MAP.read_text() == written
