"""What keeps the house in order that no linter checks: its rooms, its names and its tail."""

import ast
import builtins
import re
from pathlib import Path

from tests import architecture
from tests.architecture import read_nodes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "din_extproc"
SOURCES = [path for path in PACKAGE.rglob("*.py") if "_proto" not in path.parts]
TOP_LEVEL = {
    "pyproject.toml", "README.md", "proto", "din_extproc", "envoy", "deploy", "tests", "Makefile", "LICENSE", "CHANGELOG.md", "SECURITY.md",
}  # fmt: skip
LONGEST_FUNCTION = 60
LONGEST_FILE = 400


def functions(path: Path):
    for item in read_nodes(path):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            yield item.end_lineno - item.lineno + 1, f"{path.relative_to(ROOT)}:{item.name}"


def test_the_top_level_holds_what_the_card_says_and_nothing_else():
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    extra = {name for name in found - TOP_LEVEL if name not in ignored and not name.endswith(".egg-info")}
    assert extra == set()


def test_every_module_opens_with_its_job():
    silent = [str(path.relative_to(ROOT)) for path in SOURCES if not ast.get_docstring(read_nodes(path)[0])]
    assert silent == []


def test_every_error_that_a_docstring_promises_exists():
    nodes = [(path, item) for path in SOURCES for item in read_nodes(path)]
    known = set(dir(builtins)) | {item.name for _, item in nodes if isinstance(item, ast.ClassDef)}
    known |= {item.asname or item.name for _, item in nodes if isinstance(item, ast.alias)}
    texts = [(path, ast.get_docstring(item) or "") for path, item in nodes if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    promised = [
        (name, str(path.relative_to(ROOT)))
        for path, text in texts
        for section in re.findall(r"^Raises:\n((?: {4}.+\n?)+)", text, re.MULTILINE)
        for name in re.findall(r"^ {4}(\w+):", section, re.MULTILINE)
    ]
    assert promised
    assert [each for each in promised if each[0] not in known] == []


def test_no_function_and_no_file_is_a_monster():
    tail = sorted((entry for path in SOURCES for entry in functions(path)), reverse=True)
    long_functions = [f"{lines} {where}" for lines, where in tail if lines > LONGEST_FUNCTION]
    files = sorted(((path.read_text().count("\n"), str(path.relative_to(ROOT))) for path in SOURCES), reverse=True)
    long_files = [f"{lines} {where}" for lines, where in files if lines > LONGEST_FILE]
    print("longest functions:", tail[:5], "longest files:", files[:5])
    assert long_functions == []
    assert long_files == []


def test_no_room_is_a_junk_drawer():
    junk = re.compile(r"^(utils?|common|helpers?|managers?|misc|base)(_|\.|$)")
    assert [str(path) for path in SOURCES if junk.match(path.name)] == []


def test_nothing_is_left_for_later_and_no_test_skips_itself():
    later = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    skips = re.compile(r"pytest\.sk" + r"ip\(|mark\.sk" + r"ip|importor" + r"skip|x" + r"fail\(")
    tests = list((ROOT / "tests").rglob("*.py"))
    assert [str(path) for path in SOURCES + tests if later.search(path.read_text())] == []
    assert [str(path) for path in tests if skips.search(path.read_text())] == []


def test_unit_contract_and_property_tests_wait_by_conditions_and_measure_no_time():
    timed = re.compile(r"\bsleep\(|\b(perf_counter|process_time|thread_time)\(")
    tests = [path for kind in ("unit", "contract", "property", "golden") for path in (ROOT / "tests" / kind).rglob("*.py")]
    assert [str(path) for path in tests if timed.search(path.read_text())] == [], "tests/support/waiting.py waits, tests/bench measures"


def test_every_test_asserts_something_itself():
    silent = [
        f"{path.relative_to(ROOT)}:{item.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for item in read_nodes(path)
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test_")
        if not any(isinstance(each, ast.Assert) or _expects_an_error(each) for each in ast.walk(item))
    ]
    assert silent == []


def _expects_an_error(node: ast.AST) -> bool:
    return isinstance(node, ast.withitem) and ast.unparse(node.context_expr).startswith(("pytest.raises(", "pytest.warns("))


def test_only_the_edges_read_the_environment():
    allowed = {"cli", "edge", "roles", "tools"}
    readers = [path.relative_to(PACKAGE) for path in SOURCES if re.search(r"\bos\.(environ|getenv)\b", path.read_text())]
    assert [str(path) for path in readers if path.parts[0] not in allowed] == []


def test_the_package_docstring_names_every_room():
    text = ast.get_docstring(read_nodes(PACKAGE / "__init__.py")[0])
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert {room for room in rooms if not re.search(rf"\b{room}\b", text)} == set()


def test_every_class_that_the_glossary_names_exists():
    glossary = (ROOT / "deploy" / "docs" / "pages" / "glossary.md").read_text()
    classes = {item.name for path in SOURCES for item in read_nodes(path) if isinstance(item, ast.ClassDef)}
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]?\w*)`", glossary))
    assert len(named) >= 10
    assert named - classes == set()


def test_the_structure_holds_nothing_that_make_arch_forbids(capsys):
    assert architecture.main() == 0, capsys.readouterr().out
