"""The list of field cases names tests that exist, at least one for every case."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
LIST = TESTS / "field_cases.md"


def test_every_field_case_names_tests_that_exist():
    tests = {
        f"{file.relative_to(TESTS)}::{each.name}"
        for file in TESTS.rglob("test_*.py")
        for each in ast.walk(ast.parse(file.read_text()))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    cases = {sentence: re.findall(r"^  - `(.+)`$", names, re.MULTILINE) for sentence, names in _entries()}
    assert [sentence for sentence, names in cases.items() if not names] == []
    assert [name for names in cases.values() for name in names if name not in tests] == [], "renamed or removed: correct field_cases.md"
    assert len(cases) >= 78, "a case was lost"


def _entries() -> list[tuple[str, str]]:
    """Every case's sentence, and the lines of its tests."""
    return re.findall(r"^- (.+)\n((?:  - .+\n)*)", LIST.read_text(), re.MULTILINE)
