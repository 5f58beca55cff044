"""Prose linter: a small house style for documentation pages and docstrings. Run: python -m tests.prose [PATH ...]

Checks banned phrases and sentence length, and prints one line per finding; exits 1 if there are any. Code blocks, tables' code spans and
generated pages are not prose.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_SENTENCE = 40
"""Words. Longer sentences hide their subject."""
BANNED = {
    r"\bwho(so)?ever\b": "name the role",
    r"\bis told\b|\bare told\b": "say who reports or receives it",
    r"\bstands? (in|for it|there)\b": "use 'is in', 'is part of', 'represents'",
    r"\bspeaks? against\b|\bheld against\b": "use 'counts against'",
    r"\bleft alone\b": "use 'ejected'",
    r"\bin the row\b|\bfailures in a row\b": "use 'consecutive'",
    r"\bpatience\b(?!:)": "use 'deadline'",
    r"\bnobody\b": "name the component",
    r"\bwhat befalls\b": "use 'failures'",
    r"\bkeeps the accounts\b": "use 'accounting process'",
    r"\b[Bb]y then\b": "give the time",
}
_GENERATED = {"configuration.md", "cli.md", "metrics.md", "parameters.md", "operations.md"}


def prose_of_markdown(text: str) -> str:
    """Return the text without code blocks, code spans, comments, links' targets and table rows' separators."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))


def findings(where: str, prose: str, *, sentences: bool) -> Iterator[str]:
    """Yield what breaks the house style in one text."""
    for pattern, advice in BANNED.items():
        yield from (f"{where}: {match.group(0)!r}: {advice}" for match in re.finditer(pattern, prose))
    if sentences:
        for block in re.split(r"\n\s*\n|\n(?=[-#|>\d])|\|", prose):
            for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(block.split())):
                if len(sentence.split()) > LONGEST_SENTENCE:
                    yield f"{where}: {len(sentence.split())} words: {sentence[:80]}..."


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each docstring and attribute text of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield f"{path.relative_to(ROOT)}:{node.lineno}", re.sub(r"`[^`]*`", "code", node.value.value)


def pages() -> list[Path]:
    """Return the Markdown pages that people write."""
    written = [page for page in (ROOT / "deploy" / "docs" / "pages").rglob("*.md") if page.name not in _GENERATED]
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted(written)]


def main(paths: list[Path]) -> int:
    """Lint the paths, by default every page and module; return the exit code."""
    chosen = paths or [*pages(), *(path for path in sorted((ROOT / "din_extproc").rglob("*.py")) if "_proto" not in path.parts)]
    found: list[str] = []
    for path in chosen:
        if path.suffix == ".md" and path.name not in _GENERATED:
            found += findings(str(path.relative_to(ROOT)), prose_of_markdown(path.read_text()), sentences=True)
        else:
            found += [each for where, text in docstrings(path) for each in findings(where, text, sentences=False)]
    print("\n".join([*found, f"prose: {len(found)} findings in {len(chosen)} files"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve() for name in sys.argv[1:]]))
