"""Server-sent events by the letter of the WHATWG grammar, and what a stream of them cost: the oracle for the Lua filter.

Rule: written from the grammar and with a JSON parser, sharing nothing with the filter that it judges.
"""

import json
import re
from typing import Any

_LINE_END = re.compile(rb"\r\n|\n|\r")
_CHANNELS = frozenset({"content", "reasoning_content", "reasoning", "text", "refusal"})


def datas(stream: bytes) -> list[bytes]:
    """The data of every event that has some; an event that the stream's end cuts off is discarded."""
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
    """Deltas, finish reason, usage, end and malformed events of an OpenAI stream, under the filter's names."""
    known: dict[str, Any] = {"deltas": 0}
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
            _take(chunk, known)
    return known


def _take(chunk: dict[str, Any], known: dict[str, Any]) -> None:
    error = chunk.get("error")
    if error:
        code = error if isinstance(error, dict) else {}
        known.setdefault("error", code.get("type") or "error")
        return
    choices = chunk.get("choices") or []
    known["deltas"] += any(_speaks(choice) for choice in choices)
    for choice in choices:
        if choice.get("finish_reason"):
            known["finish_reason"] = choice["finish_reason"]
    usage = chunk.get("usage")
    if usage:
        known["prompt_tokens"], known["completion_tokens"] = usage["prompt_tokens"], usage.get("completion_tokens", 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            known["cached_tokens"] = cached


def _speaks(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return bool(delta.get("tool_calls")) or any(delta.get(channel) for channel in _CHANNELS)
