"""Answers as Anthropic's documentation of its Messages API shows them, whole and streamed."""

import json
from typing import Any

_USAGE = {"input_tokens": 5, "cache_creation_input_tokens": 10, "cache_read_input_tokens": 15, "output_tokens": 6}
_MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None, "usage": _USAGE}
ANSWER: dict[str, Any] = {**_MESSAGE, "content": [{"type": "text", "text": "Hello there!"}], "stop_reason": "end_turn"}
CALL_ANSWER: dict[str, Any] = {
    **_MESSAGE,
    "content": [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"location": "Paris"}},
        {"type": "tool_use", "id": "toolu_2", "name": "get_time", "input": {}},
    ],
    "stop_reason": "tool_use",
}


def stream_events(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of the stream of an answer."""
    start = {**answer, "content": [], "stop_reason": None, "usage": {**answer["usage"], "output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            opened, half = {"type": "text", "text": ""}, len(block["text"]) // 2
            deltas = [{"type": "text_delta", "text": text} for text in (block["text"][:half], block["text"][half:])]
        else:
            text = json.dumps(block["input"]) if block["input"] else ""
            opened = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", text[:7], text[7:])]
        events.append({"type": "content_block_start", "index": index, "content_block": opened})
        if index == 0:
            events.append({"type": "ping"})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    ending = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ending, "usage": {"output_tokens": answer["usage"]["output_tokens"]}})
    return [*events, {"type": "message_stop"}]


def encode_events(events: list[dict[str, Any]]) -> bytes:
    """Return events as Anthropic frames them."""
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
