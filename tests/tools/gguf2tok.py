"""A Hugging Face tokenizer folder from the vocabulary inside a GGUF file, without torch.

Run: python gguf2tok.py MODEL.gguf FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL = 3
"""llama.cpp's type of a token that no text spells."""


def write_folder(source: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a `gpt2` vocabulary."""
    fields = GGUFReader(str(source)).fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    if field("ggml.model") != "gpt2":
        raise ValueError(f"{source}: only byte-level BPE is understood")
    words = field("ggml.tokens")
    tokenizer = _tokenizer(words, field("ggml.merges"), field("ggml.pre"))
    kinds = zip(words, field("ggml.token_type"), strict=True)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word, kind in kinds if kind == _CONTROL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"].contents(),
        "clean_up_tokenization_spaces": False,
        "chat_template": field("chat_template"),
    }
    settings |= {name: words[field(f"ggml.{key}_token_id")] for name, key in named.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _tokenizer(words: list[str], merges: list[str], pre: str) -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ", 1)) for merge in merges]))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
