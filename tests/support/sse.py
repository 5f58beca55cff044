"""Server-sent events by the WHATWG grammar, and the facts of an OpenAI stream: the oracle for the Lua filter.

Rule: it is written from the grammar with a JSON parser and shares nothing with the filter.
"""

import json
import re
from typing import Any

_LINE_END = re.compile(rb"\r\n|\n|\r")
_CHANNELS = frozenset({"content", "reasoning_content", "reasoning", "text", "refusal"})


def datas(stream: bytes) -> list[bytes]:
    """Return the data of every event that has some; an event that is cut off by the end is discarded."""
    found, lines = [], []
    for line in _LINE_END.split(stream.removeprefix(b"\xef\xbb\xbf"))[:-1]:
        if not line:
            if lines:
                found.append(b"\n".join(lines))
            lines = []
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return found


def facts(stream: bytes) -> dict[str, Any]:
    """Return deltas, finish reason, usage, end and malformed events of an OpenAI stream, under the filter's names."""
    known: dict[str, Any] = {"deltas": 0}
    begun: dict[int, bool] = {}
    for data in datas(stream):
        if data == b"[DONE]":
            known["done"] = True
            continue
        try:
            chunk = json.loads(data) if data else None
        except ValueError:
            known["bad_events"] = known.get("bad_events", 0) + 1
            continue
        if isinstance(chunk, dict):
            _take(chunk, known, begun)
    return known


def ended(known: dict[str, Any]) -> bool:
    """Whether a stream with these facts is complete."""
    return "done" in known or ("finish_reason" in known and not known.get("open_choices"))


def _take(chunk: dict[str, Any], known: dict[str, Any], begun: dict[int, bool]) -> None:
    error = chunk.get("error")
    if error:
        code = error if isinstance(error, dict) else {}
        known.setdefault("error", code.get("type") or "error")
        return
    choices = chunk.get("choices") or []
    known["deltas"] += any(_speaks(choice) for choice in choices)
    for choice in choices:
        index = choice.get("index", 0)
        begun[index] = begun.get(index, False) or bool(choice.get("finish_reason"))
        if choice.get("finish_reason"):
            known["finish_reason"] = choice["finish_reason"]
    still_open = list(begun.values()).count(False)
    if choices and "finish_reason" in known and (still_open or "open_choices" in known):
        known["open_choices"] = still_open
    usage = chunk.get("usage")
    if usage:
        _use(usage, known, len(begun))


def _use(usage: dict[str, Any], known: dict[str, Any], choices: int) -> None:
    prompt, completion = usage["prompt_tokens"], usage.get("completion_tokens") or 0
    if not (_counts(prompt) and _counts(completion)):
        known["bad_usage"] = True
        return
    falls = prompt < known.get("prompt_tokens", 0) or completion < known.get("completion_tokens", 0)
    if falls and not prompt and not completion:
        return
    if falls and choices < 2:
        known["bad_usage"] = True
    known["prompt_tokens"], known["completion_tokens"] = int(prompt), int(completion)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        known["cached_tokens"] = cached


def _counts(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e12 and value == int(value)


def _speaks(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return bool(delta.get("tool_calls")) or any(delta.get(channel) for channel in _CHANNELS)
