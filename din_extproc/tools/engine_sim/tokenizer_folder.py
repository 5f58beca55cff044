"""A real tokenizer from a folder with `tokenizer.json`, with the interface of the modelled engine."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Fast


class FolderTokenizer:
    """The tokenizer of a folder.

    Raises:
        ValueError: there is no readable `tokenizer.json` in the folder.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        try:
            self._fast = Fast.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from error

    def pieces(self, text: str) -> Sequence[str]:
        """Return the text of each token, in order: cut where the token begins, so that the pieces join to the text."""
        offsets = self._fast.encode(text, add_special_tokens=False).offsets
        starts = [start for start, _ in offsets]
        return [text[start:end] for start, end in zip([0, *starts[1:]], [*starts[1:], len(text)], strict=True)] if starts else []

    def ids(self, text: str) -> list[int]:
        """Return the id of each token, in order."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)
