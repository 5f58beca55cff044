"""A server that answers as Anthropic's documentation of its Messages API says: fixed answers, whole and streamed, and its errors.

A prompt that contains `weather` gets tool calls, `too long` and `overloaded` get errors; everything else gets text.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

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
_ERRORS = {
    "too long": (400, "invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum"),
    "overloaded": (529, "overloaded_error", "Overloaded"),
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


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        if self.path != "/v1/messages" or "anthropic-version" not in self.headers or "max_tokens" not in body:
            return self._refuse(400, "invalid_request_error", "not a request of the Messages API")
        prompt = json.dumps(body["messages"])
        for words, error in _ERRORS.items():
            if words in prompt:
                return self._refuse(*error)
        answer = CALL_ANSWER if "weather" in prompt else ANSWER
        if body.get("stream"):
            return self._answer(200, encode_events(stream_events(answer)), "text/event-stream; charset=utf-8")
        return self._answer(200, json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Log nothing."""

    def _refuse(self, status: int, kind: str, message: str) -> None:
        self._answer(status, json.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}).encode())

    def _answer(self, status: int, body: bytes, media: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", media)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class AnthropicServer:
    """The server on a free loopback port. A context manager."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self._server.seen = self.seen  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
