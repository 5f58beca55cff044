"""However a configuration file is broken, loading it says what is wrong and never fails itself."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings

EXAMPLE = Path(__file__).parents[2] / "envoy" / "din.yaml"
LINES = [line for line in EXAMPLE.read_text().splitlines() if line.split("#")[0].strip()]
SPOILERS = [
    "",
    "x",
    "null",
    "true",
    "-1",
    "1.5",
    "[]",
    "{}",
    "- a",
    "~",
    "!!binary eA==",
    "${X}",
    "${X:-y}",
    "&a",
    "*a",
    "\t",
    "'",
    "{",
    "a: b: c",
    "<<: *a",
]

replaced = st.tuples(st.integers(0, len(LINES) - 1), st.sampled_from(SPOILERS) | st.text(max_size=12))


def spoilt(edits):
    lines = list(LINES)
    for at, text in edits:
        key, colon, _ = lines[at].partition(":")
        lines[at] = f"{key}{colon} {text}" if len(text) % 2 else text
    return "\n".join(lines)


@settings(max_examples=150)
@given(st.lists(replaced, min_size=1, max_size=4).map(spoilt) | st.text(max_size=60))
def test_any_text_loads_or_is_rejected_with_reasons(text):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "din.yaml"
        path.write_text(text, encoding="utf-8", errors="replace")
        (Path(folder) / "models.json").write_text(EXAMPLE.with_name("models.json").read_text())
        loaded = load(path, {"X": "secret-value"})
    assert isinstance(loaded, Settings | ConfigRejected)
    if isinstance(loaded, ConfigRejected):
        assert loaded.problems
        assert "secret-value" not in str(loaded)
