"""The map of field cases is whole, and what it names exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
CASES = re.findall(r"^- \*\*(B\d+)\*\* (.*)$", (TESTS / "field_cases.md").read_text(), re.MULTILINE)


def functions(file: Path) -> set[str]:
    return {each.name for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_all_78_cases_are_there_once():
    assert len(CASES) == len({case for case, _ in CASES}) == 78


def test_every_test_that_is_named_exists_and_carries_the_case_s_id():
    for case, listed in CASES:
        named = re.findall(r"`([^`]+)::([^`]+)`", listed)
        assert named, case
        for file, name in named:
            assert name in functions(TESTS / file), f"{case}: {file}::{name}"
            assert re.search(rf"_b0?{case[1:]}_", name), f"{case}: {name}"
