"""Requests and answers of engines' own interfaces, for tests of their translation."""

import json
from typing import Any

from din_extproc.domain.request import Operation
from din_extproc.domain.response import ResponseHead
from din_extproc.domain.verdict import Refusal
from din_extproc.southbound.dialect import AnswerContext, Dialect, PlainRequest

OK = ResponseHead(200, {})


def ask(dialect: Dialect, operation: Operation, *, stream: bool = False, drop: bool = False, **fields: Any):
    """Return the engine's request: path, decoded body and dropped fields; or the refusal."""
    made = dialect.build_request(PlainRequest(operation, {"model": "alias", **fields}, "m", stream, drop))
    return made if isinstance(made, Refusal) else (made.path, json.loads(made.body), made.dropped)


def asked(operation: Operation = Operation.CHAT, **fields: Any) -> AnswerContext:
    """Return the context of an answer."""
    return AnswerContext(operation, "id1", 1700000000, "m", fields)


def streamed(dialect: Dialect, of: AnswerContext, *parts: bytes) -> list[Any]:
    """Return the data of the events that these bytes are translated to, `[DONE]` as text."""
    pieces = dialect.create_translator(of)
    whole = b"".join([*map(pieces.feed, parts), pieces.end()])
    assert whole == b"" or whole.endswith(b"\n\n")
    data = [event.removeprefix(b"data: ") for event in whole.split(b"\n\n")[:-1]]
    return [each.decode() if each == b"[DONE]" else json.loads(each) for each in data]


def text_of(events: list[Any]) -> str:
    """Return the text of a stream's events."""
    choices = [event["choices"][0] for event in events if isinstance(event, dict) and event.get("choices")]
    return "".join(choice.get("text", "") + choice.get("delta", {}).get("content", "") for choice in choices)
