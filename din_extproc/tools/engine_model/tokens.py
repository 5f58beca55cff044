"""Tokenizers of the modelled engine: text to pieces whose join is the text; their number is billed.

The built-in one needs no files: a token is a special marker (`<|im_start|>`), up to seven letters with the space before them, up to three
digits, a run of other space, or one other character (so one per CJK character). Prompts are rendered as ChatML first, as Qwen's are.
"""

import re
from collections.abc import Sequence
from typing import Any, Protocol
from zlib import crc32

_PIECE = re.compile(r"<\|[a-z_]+\|>| ?[A-Za-z]{1,7}|\d{1,3}| ?[^\sA-Za-z\d]|\s+")
_VOCABULARY = 50000


class SimulatedTokenizer(Protocol):
    """The interface of a tokenizer."""

    def pieces(self, text: str) -> Sequence[str]:
        """Return the text of each token, in order."""
        ...

    def ids(self, text: str) -> list[int]:
        """Return the id of each token, in order."""
        ...

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        ...


class PatternTokenizer:
    """The built-in tokenizer: one regular expression."""

    def pieces(self, text: str) -> Sequence[str]:
        """Return the text of each token, in order."""
        return _PIECE.findall(text)

    def ids(self, text: str) -> list[int]:
        """Return an id per piece, equal for equal pieces."""
        return [crc32(piece.encode("utf-8", "surrogatepass")) % _VOCABULARY for piece in self.pieces(text)]

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(_PIECE.findall(text))


class Media(Exception):  # noqa: N818 - the name says what was found
    """A message has a non-text part, and the model reads only text."""


def chat_prompt(messages: Sequence[Any], *, tools: str = "", media_tokens: int = 0) -> tuple[str, int]:
    """Render messages as ChatML with the assistant's turn opened.

    Args:
        messages: OpenAI messages, as decoded.
        tools: the tools' JSON text, put before the messages; "" when there are none.
        media_tokens: what an image, audio or file part costs; 0: the model reads only text.

    Returns:
        The prompt text, and the tokens that its non-text parts cost.

    Raises:
        Media: there is a non-text part and `media_tokens` is 0.
    """
    turns = [f"<|im_start|>tools\n{tools}<|im_end|>\n"] if tools else []
    media = 0
    for message in messages:
        text, parts = _read_content(message)
        media += parts
        turns.append(f"<|im_start|>{message.get('role') or ''}\n{text}<|im_end|>\n")
    if media and not media_tokens:
        raise Media
    return "".join(turns) + "<|im_start|>assistant\n", media * media_tokens


def _read_content(message: dict[str, Any]) -> tuple[str, int]:
    """Return a message's text (content and tool calls) and the number of its non-text parts."""
    content = message.get("content")
    texts: list[str] = []
    media = 0
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, list):
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                texts.append(text)
            else:
                media += 1
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            texts.append(f"{function.get('name') or ''}{function.get('arguments') or ''}")
    return "".join(texts), media
