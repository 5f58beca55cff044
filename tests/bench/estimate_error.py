"""How wrong and how quick the token estimate is, against the exact tokenizers of real models.

Every text travels as a chat body. The calibration learns from one half of the corpus, as it would from settled requests, and is
measured on the other. Run: python -m tests.bench.estimate_error
"""

import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from msgspec import Struct
from tokenizers import Tokenizer

from din_extproc.domain.request import Operation
from din_extproc.intent.calibration import Calibration, update_calibration
from din_extproc.intent.estimate import TokenCalibrator, estimate_tokens
from din_extproc.intent.openai import Prompt, extract_prompt
from din_extproc.intent.outline import Outline, build_outline
from tests.bench.corpus import EVEN, KINDS, MOSTLY_SHORT, SIZES, Text, texts
from tests.bench.vocabularies import NAMES, tokenizer

TEMPLATE_TOKENS = 9
"""What a chat template adds around one message, here."""
_ROUNDS = 2
"""Times that the first half is learned from: settled requests come by the thousand."""


class Sample(Struct, frozen=True):
    """A text as a prompt, and its true size."""

    text: Text
    prompt: Prompt
    tokens: int


class Error(Struct, frozen=True):
    """Relative error of one estimate."""

    kind: str
    size: int
    error: float


def samples(exact: Tokenizer, half: int, counts: tuple[int, ...]) -> list[Sample]:
    """Texts of one half of the corpus, tokenized."""
    corpus = texts(half, counts)
    encoded = exact.encode_batch_fast([text.text for text in corpus], add_special_tokens=False)
    return [Sample(text, _prompt(text.text), len(found) + TEMPLATE_TOKENS) for text, found in zip(corpus, encoded, strict=True)]


def calibrated(half: list[Sample]) -> Calibration:
    """What is learned from these, in a random order."""
    calibration = Calibration()
    for turn in range(_ROUNDS):
        for sample in random.Random(turn).sample(half, len(half)):
            found = estimate_tokens(sample.prompt, TokenCalibrator())
            calibration = update_calibration(calibration, found.features, found.fixed, sample.tokens)
    return calibration


def errors(half: list[Sample], calibration: Calibration) -> list[Error]:
    """How wrong the estimates of these are."""
    gauge = TokenCalibrator(calibration)
    return [Error(one.text.kind, one.text.size, estimate_tokens(one.prompt, gauge).tokens / one.tokens - 1) for one in half]


def time_ratio(exact: Tokenizer) -> float:
    """Time to estimate a prompt of 32 thousand tokens of English over the time to tokenize it, both from the decoded body's bytes."""
    long = max((text for text in texts(1, (0, 0, 0, 0, 1)) if text.kind == "english"), key=lambda text: len(text.text))
    asked = _prompt(long.text)
    return _quickest(lambda: estimate_tokens(asked, TokenCalibrator()), 50) / _quickest(lambda: exact.encode_batch_fast([long.text]), 3)


def measure(names: tuple[str, ...] = NAMES) -> dict[str, float]:
    """The figures `estimate_error_p95`, `estimate_error_mean` and `estimate_32k_time_vs_tokenizer`: the mean over the tokenizers, the
    worst of each as `..._worst`, and each by its name.
    """
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            exact = tokenizer(name, Path(scratch))
            found = errors(samples(exact, 1, EVEN), calibrated(samples(exact, 0, MOSTLY_SHORT)))
            figures |= {f"estimate_error_mean_{name}": _mean(found), f"estimate_error_p95_{name}": _p95(found)}
            for kind in KINDS:
                figures[f"estimate_error_p95_{name}_{kind}"] = _p95([error for error in found if error.kind == kind])
            for size in SIZES:
                figures[f"estimate_error_p95_{name}_{size}"] = _p95([error for error in found if error.size == size])
            figures[f"estimate_32k_time_vs_tokenizer_{name}"] = time_ratio(exact)
    for figure in ("estimate_error_mean", "estimate_error_p95", "estimate_32k_time_vs_tokenizer"):
        each = [figures[f"{figure}_{name}"] for name in names]
        figures |= {figure: statistics.fmean(each), f"{figure}_worst": max(each)}
    return figures


def _prompt(text: str) -> Prompt:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
    found = build_outline(body)
    assert isinstance(found, Outline)
    return extract_prompt(Operation.CHAT, body, found)


def _mean(found: list[Error]) -> float:
    return statistics.fmean(abs(error.error) for error in found)


def _p95(found: list[Error]) -> float:
    ordered = sorted(abs(error.error) for error in found)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _quickest(action: object, times: int) -> float:
    best = float("inf")
    for _ in range(times):
        began = time.process_time()
        action()
        best = min(best, time.process_time() - began)
    return best


def main() -> None:
    """Print the table."""
    figures = measure()
    columns = (*KINDS, *map(str, SIZES))
    print(f"{'P95 of the relative error':14} {'mean':>6} {'all':>6} " + " ".join(f"{column:>8}" for column in columns) + "  time/exact")
    for name in NAMES:
        row = " ".join(f"{figures[f'estimate_error_p95_{name}_{column}']:8.3f}" for column in columns)
        mean, p95 = figures[f"estimate_error_mean_{name}"], figures[f"estimate_error_p95_{name}"]
        print(f"{name:25} {mean:6.3f} {p95:6.3f} {row}  {figures[f'estimate_32k_time_vs_tokenizer_{name}']:.4f}")


if __name__ == "__main__":
    main()
