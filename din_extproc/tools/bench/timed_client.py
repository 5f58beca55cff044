"""The client of `bench`: streamed chats, some at once, each known by its trace id.

Rule: every outcome of a request is a `TimedAnswer`; nothing is raised.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.measure.answer import NodeTimes, TimedAnswer, refused, streamed
from din_extproc.southbound.framing import EventSplitter
from din_extproc.tools.http_client import OutsideClient, OutsideResponse

_PATH = "/v1/chat/completions"
_JSON = {"content-type": "application/json"}


class TimedQuestion(Struct, frozen=True):
    """One request to send."""

    trace_id: str
    text: str
    tokens: int
    """Maximum output tokens."""


class TimedClient:
    """Sends timed requests to one gateway or one node.

    Args:
        client: The HTTP client of the target.
        model: The model's name at the target.
        more: Further fields of each body.
    """

    def __init__(self, client: OutsideClient, model: str, more: Mapping[str, object] | None = None) -> None:
        self._client = client
        self._model = model
        self._more = more or {}

    async def send(self, question: TimedQuestion) -> tuple[OutsideResponse, TimedAnswer]:
        """Send one request."""
        headers = {**_JSON, "x-din-trace-id": question.trace_id}
        outcome = await self._client.send("POST", _PATH, headers, chat_body(self._model, question.text, question.tokens, self._more))
        return outcome, to_answer(outcome)

    async def send_all(self, questions: Iterable[TimedQuestion], at_once: int) -> tuple[float, dict[str, TimedAnswer]]:
        """Send all requests, `at_once` at a time. Return the seconds it took, and the answers by trace id."""
        left = iter(questions)
        answers: dict[str, TimedAnswer] = {}

        async def lane() -> None:
            for question in left:
                answers[question.trace_id] = (await self.send(question))[1]

        began = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(at_once)))
        return time.perf_counter() - began, answers


def chat_body(model: str, text: str, tokens: int, more: Mapping[str, object] | None = None) -> bytes:
    """Return the body of a streamed chat, made as repeatable as the engine allows."""
    body: Mapping[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(more or {}),
    }
    return json.dumps(body).encode()


def to_answer(outcome: OutsideResponse) -> TimedAnswer:
    """Return the answer with timings by the client's clock."""
    total_ms = outcome.total_s * 1e3
    if outcome.failure:
        return TimedAnswer(total_ms, trouble=outcome.failure)
    if not outcome.good:
        return refused(outcome.status, outcome.body, total_ms)
    return replace(streamed(_read_events(outcome), total_ms), node=NodeTimes.of(outcome.headers, outcome.head_s * 1e3))


def _read_events(outcome: OutsideResponse) -> Iterable[tuple[float, bytes]]:
    """Yield the data of each event with the millisecond of its last byte."""
    framing, start = EventSplitter(), 0
    for at_s, end in outcome.arrivals:
        for data in framing.feed(outcome.body[start:end]):
            yield at_s * 1e3, data
        start = end
    for data in framing.end():
        yield outcome.total_s * 1e3, data
