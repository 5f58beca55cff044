"""Count what the structure of the code does not allow, print one line for each, and fail unless all counts are 0.

`python -m tests.architecture` is a part of `make arch`. Who may import whom is for import-linter;
this module counts what it does not see.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "din_extproc"
SUPPORT = ROOT / "tests" / "support"
PRODUCT = ("roles", "settings", "edge", "flow", "wire", "intent", "route", "screen", "admit", "schedule", "health", "southbound", "observe",
           "registry", "control", "sim", "audit", "measure", "domain")  # fmt: skip
"""Everything but the tools and the command line that starts them."""
MAX_POSITIONAL = 5
PRIVATE_WORDS = {
    *("asker", "babbled", "beaten", "caught", "commons", "conductor", "crowd", "desk", "doorway", "doubtful", "face", "faces", "guest"),
    *("hear", "heard", "hears", "heed", "judge", "judged", "keeper", "lessons", "news", "nobody", "placer", "purse", "said", "saying"),
    *("shown", "standing", "standings", "stranger", "surface", "taker", "tally", "telling", "told", "turnover", "twin", "wish", "wishes"),
}
"""Words that no name of ours contains: for each there is a term of the field that an engineer would search for."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_TEXTS = {".py", ".md", ".lua", ".yaml", ".yml", ".mjs", ".toml", ".proto", ".sh", ""}
_IDS = re.compile(r"(?<![\w%.-])(?:[BNR]\d{2,3})\b(?!-)|\btest_(?:[bnr]\d{2,3}_)+")
"""A case's or requirement's id as a word of its own or at the head of a test's name. Linter codes are taken out first."""
_LINTER_CODES = re.compile(r"noqa: [A-Z0-9, ]+|\"[A-Z]{1,4}\d{3,4}\",")


def main() -> int:
    """Print every count with its places, and return 1 unless all are 0."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if "_proto" not in file.parts]
    checks = {
        "class names defined twice": class_names_twice(files),
        "own classes imported under another name": renamed_imports(files),
        "names with a private word": private_names([*files, *sorted(SUPPORT.rglob("*.py"))]),
        "docstrings that begin with 'What'": what_docstrings(files),
        "requirement and case ids": ids(),
        f"calls with more than {MAX_POSITIONAL} positional arguments": positional_calls(files),
        "product modules that import tools": imports_of_tools(files),
    }
    for title, found in checks.items():
        print(f"{len(found):4} {title}", *found, sep="\n       ")
    return 1 if any(checks.values()) else 0


def class_names_twice(files: Iterable[Path]) -> list[str]:
    """Classes of any nesting that share a name with one of another place."""
    places = defaultdict(list)
    for file, each in _walk(files, ast.ClassDef):
        places[each.name].append(_place(file, each))
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def renamed_imports(files: Iterable[Path]) -> list[str]:
    """`from din_extproc... import Name as Other`."""
    return [
        f"{_place(file, each)}: {alias.name} as {alias.asname}"
        for file, each in _walk(files, ast.ImportFrom)
        if each.level or (each.module or "").startswith("din_extproc")
        for alias in each.names
        if alias.asname and alias.name.lstrip("_")[:1].isupper()
    ]


def private_names(files: Iterable[Path]) -> list[str]:
    """Names of classes, functions, parameters, variables and attributes, where they are defined, that contain one of `PRIVATE_WORDS`."""
    return [
        f"{_place(file, each)}: {name}"
        for file, each in _walk(files, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.arg, ast.Name, ast.Attribute)
        if (name := _defined_name(each)) and not PRIVATE_WORDS.isdisjoint(word.lower() for word in _WORD.findall(name))
    ]


def what_docstrings(files: Iterable[Path]) -> list[str]:
    """Docstrings that begin with "What", instead of a noun or a verb that says what the thing is or does."""
    return [
        f"{_place(file, each)}: {each.value.split(maxsplit=4)[:4]}"
        for file, each in _walk(files, ast.Constant)
        if isinstance(each.value, str) and each.value.startswith("What ") and not each.value.endswith("?")
    ]


def ids() -> list[str]:
    """Ids in code, tests, documents and deployment files, generated messages and recorded traffic excepted."""
    return [
        f"{file.relative_to(ROOT)}:{number}: {match[0]}"
        for file in sorted(_files())
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for match in _IDS.finditer(_LINTER_CODES.sub("", line))
    ]


def positional_calls(files: Iterable[Path]) -> list[str]:
    """Calls of functions and classes of the package, by the last part of their name.

    A library's signature is not ours to change, and a function that takes any number of arguments (`*args`) has no keywords for them.
    """
    functions = [each for _, each in _walk(files, ast.FunctionDef, ast.AsyncFunctionDef)]
    own = {each.name for each in functions} | {each.name for _, each in _walk(files, ast.ClassDef)}
    own -= {each.name for each in functions if each.args.vararg}
    return [
        f"{_place(file, each)}: {ast.unparse(each.func)} with {len(each.args)}"
        for file, each in _walk(files, ast.Call)
        if len(each.args) > MAX_POSITIONAL and _last_name(each.func) in own - _library_names(file)
    ]


def imports_of_tools(files: Iterable[Path]) -> list[str]:
    """Imports of `din_extproc.tools` in whatever `serve` and `node` are made of, those inside functions included."""
    return [
        _place(file, each)
        for file, each in _walk(files, ast.Import, ast.ImportFrom)
        if file.relative_to(PACKAGE).parts[0] in PRODUCT
        for name in _imported(each)
        if f"{name}.".startswith("din_extproc.tools.")
    ]


@cache
def read_nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module, the module itself first."""
    return tuple(ast.walk(ast.parse(file.read_text())))


def _walk(files: Iterable[Path], *kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    return ((file, each) for file in files for each in read_nodes(file) if isinstance(each, kinds))


def _defined_name(node: ast.AST) -> str:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
    return ""


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def _last_name(callee: ast.expr) -> str:
    return callee.attr if isinstance(callee, ast.Attribute) else callee.id if isinstance(callee, ast.Name) else ""


def _library_names(file: Path) -> set[str]:
    return {
        alias.asname or alias.name
        for each in read_nodes(file)
        if isinstance(each, ast.ImportFrom) and not (each.module or "").startswith("din_extproc")
        for alias in each.names
    }


def _place(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"


def _files() -> Iterator[Path]:
    for top in ("din_extproc", "tests", "deploy", "envoy", "proto", ".ci"):
        for file in (ROOT / top).rglob("*"):
            if file.is_file() and file.suffix in _TEXTS and not {"_proto", "captures", "__pycache__"} & set(file.parts):
                yield file
    yield from (ROOT / name for name in ("Makefile", "README.md", "CHANGELOG.md", "pyproject.toml"))


if __name__ == "__main__":
    sys.exit(main())
