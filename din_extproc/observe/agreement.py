"""Two answers compared token by token, with the engine's own log probabilities as the measure of what chance explains.

Rule: greedy answers of honest nodes part where two tokens are all but equally likely, for batches round differently; anywhere else,
parting is a difference. Where an engine gives no probabilities, only answers that have hardly a word in common differ.
"""

from difflib import SequenceMatcher
from typing import Any

import msgspec
from msgspec import Struct

from din_extproc.domain.agreement import Agreement

NEAR = 1.0
"""Nats between two tokens that rounding may swap: one is at most e times as likely as the other."""
_ALIKE = 0.3
"""Share of words in common from which on answers without probabilities are not called different."""
_decode = msgspec.json.decode


class TokenizedAnswer(Struct, frozen=True):
    """An answer."""

    tokens: tuple[str, ...]
    chances: tuple[dict[str, float], ...] = ()
    """By token: the log probabilities of it and of what stood beside it. (): not told."""


def read_tokenized_answer(body: bytes) -> TokenizedAnswer | None:
    """The first choice of an answer of chat or text completions; None: there is none that can be compared."""
    try:
        choice = _decode(body)["choices"][0]
        logprobs = choice.get("logprobs") or {}
        if "content" in logprobs:
            return _read_chat(logprobs["content"])
        if "tokens" in logprobs:
            return _read_text(logprobs)
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return TokenizedAnswer(tuple(text.split())) if text.strip() else None
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError):
        return None


def compare_answers(one: TokenizedAnswer, other: TokenizedAnswer, *, sampled: bool = False) -> tuple[Agreement, int]:
    """Compare two responses; return the result and the index of the first token that differs.

    `sampled`: the answers are drawn with a seed, so that rounding may swap any two of a token's candidates, not only the likeliest.
    """
    pairs = zip(one.tokens, other.tokens, strict=False)
    at = next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one.tokens), len(other.tokens)))
    if at == max(len(one.tokens), len(other.tokens)):
        return Agreement.AGREE, at
    if at == min(len(one.tokens), len(other.tokens)):
        return Agreement.CLOSE, at  # one ends where the other goes on: the chance of an end is not told
    if one.chances and other.chances:
        near = _is_near(one.chances[at], other.tokens[at], sampled) or _is_near(other.chances[at], one.tokens[at], sampled)
        return (Agreement.CLOSE if near else Agreement.DIFFER), at
    alike = SequenceMatcher(None, one.tokens, other.tokens, autojunk=False).ratio() >= _ALIKE
    return (Agreement.CLOSE if alike else Agreement.DIFFER), at


def _is_near(chances: dict[str, float], token: str, sampled: bool) -> bool:  # noqa: FBT001 - it is `compare`'s
    """Return whether the token was almost chosen at this place."""
    return token in chances and (sampled or max(chances.values()) - chances[token] <= NEAR)


def _read_chat(content: list[dict[str, Any]]) -> TokenizedAnswer | None:
    tokens = tuple(str(each["token"]) for each in content)
    chances = tuple({str(top["token"]): float(top["logprob"]) for top in (each, *(each.get("top_logprobs") or ()))} for each in content)
    return TokenizedAnswer(tokens, chances) if tokens else None


def _read_text(logprobs: dict[str, Any]) -> TokenizedAnswer | None:
    tokens = tuple(map(str, logprobs["tokens"]))
    tops: Any = logprobs.get("top_logprobs") or [{}] * len(tokens)
    own = zip(tokens, logprobs["token_logprobs"], tops, strict=True)
    chances = tuple(
        {**{str(token): float(chance) for token, chance in (top or {}).items()}, token: float(chance)} for token, chance, top in own
    )
    return TokenizedAnswer(tokens, chances) if tokens else None
