"""Exact token counts with the tokenizer of a model from a local folder.

Invariant: only short texts are counted on the event loop. `transformers` is imported and tokenizers are loaded once, in a thread, before
the first request; long texts are counted in a thread; nothing is downloaded.
"""

import asyncio
import logging
from concurrent.futures import Executor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct

from din_extproc.domain.request import Estimate
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.openai import Prompt

_INLINE_BYTES = 2048
"""Maximum size of a text that is counted on the event loop, within about 1 ms."""


def missing() -> str:
    """Return the missing requirement of tokenizers; "" if there is none."""
    return "" if find_spec("transformers") else "din-extproc[exact]"


class TokenizerUnavailable(Exception):  # noqa: N818 - the name says what is the matter
    """A configured folder holds no loadable tokenizer."""


class _Frame(Struct, frozen=True, gc=False):
    """Tokens that a chat template adds."""

    request: int
    message: int


class _Loaded(Struct, frozen=True):
    backend: Any
    """A `tokenizers.Tokenizer`."""
    frame: _Frame | None
    special: int
    """Special tokens around an input that is not a chat."""

    def count(self, texts: list[str]) -> int:
        """Return the number of tokens of the texts."""
        return sum(map(len, self.backend.encode_batch_fast(texts, add_special_tokens=False)))

    def around(self, prompt: Prompt, calibrator: TokenCalibrator) -> int:
        """Return the number of tokens outside the texts of the prompt."""
        if not prompt.templated:
            return self.special * prompt.messages
        if self.frame is not None:
            return self.frame.request + self.frame.message * prompt.messages
        message, request = calibrator.calibration.weights[-2:]
        return max(0, round(message * prompt.messages + request))


class ModelTokenizer:
    """Tokenizer of one model.

    Args:
        folder: Folder of `tokenizer.json` and, for the chat template, `tokenizer_config.json`.
        executor: Executor for loading and long texts; None: the event loop's default.
    """

    def __init__(self, folder: Path, executor: Executor | None = None) -> None:
        self._folder = folder
        self._executor = executor
        self._loaded: _Loaded | None = None

    async def load(self) -> None:
        """Load the tokenizer. Until then, `count` returns the estimate.

        Raises:
            TokenizerUnavailable: The folder holds no loadable tokenizer.
        """
        self._loaded = await asyncio.get_running_loop().run_in_executor(self._executor, _load_tokenizer, self._folder)

    async def count(self, prompt: Prompt, estimate: Estimate, calibrator: TokenCalibrator) -> Estimate:
        """Count the tokens of a prompt.

        Text is counted by the tokenizer, the chat template's frame is added as it was measured when it was loaded; without a template it
        is what the calibration has learned. Media stay what they were estimated at.

        Args:
            prompt: A request's input.
            estimate: Of that prompt.
            calibrator: The calibration of the request's model.

        Returns:
            An estimate of exact tokens that can be learned from like the given one; the given one when the tokenizer is not loaded or
            fails, and of a list of documents, each of which is read with the query.
        """
        loaded = self._loaded
        if loaded is None or prompt.repeated:
            return estimate
        try:
            if len(prompt.strings) + len(prompt.objects) <= _INLINE_BYTES:
                tokens = loaded.count(prompt.texts())
            else:
                loop = asyncio.get_running_loop()
                tokens = await loop.run_in_executor(self._executor, lambda: loaded.count(prompt.texts()))
        except Exception:  # noqa: BLE001 - the tokenizer is foreign code that meets any text, and an estimate is at hand
            return estimate
        tokens += estimate.fixed + loaded.around(prompt, calibrator)
        longest = estimate.longest
        if prompt.longest is not None and longest is not None:
            longest = await self.count(prompt.longest, longest, calibrator)
        return Estimate(tokens, estimate.features, estimate.fixed, exact=True, longest=longest)


def _load_tokenizer(folder: Path) -> _Loaded:
    if missing():
        raise TokenizerUnavailable(f"{folder}: exact counts need transformers: pip install '{missing()}'")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and only those who name a folder need it

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        special = backend.num_special_tokens_to_add(is_pair=False)
        return _Loaded(backend, _measure_frame(tokenizer) if tokenizer.chat_template else None, special)
    except Exception as error:
        raise TokenizerUnavailable(f"{folder}: no tokenizer could be loaded: {error}") from error


def _measure_frame(tokenizer: Any) -> _Frame:
    """Return the tokens of one and of three short messages beyond those of their words."""

    def length(text: str) -> int:
        return len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False))

    def rendered(messages: int) -> int:
        chat = [{"role": ("user", "assistant")[index % 2], "content": "a"} for index in range(messages)]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return length(text) - messages * word

    word = length("a")
    one, three = rendered(1), rendered(3)
    message = (three - one) // 2
    return _Frame(one - message, message)
