"""How the commands that measure ask: streamed chats over an outside client, some at once, each known by its trace id.

Rule: whatever becomes of a request, an `TimedAnswer` says so.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.measure.answer import NodeTimes, TimedAnswer, refused, streamed
from din_extproc.southbound.framing import Events
from din_extproc.tools.http_client import OutsideClient, OutsideResponse

_PATH = "/v1/chat/completions"
_JSON = {"content-type": "application/json"}


class TimedQuestion(Struct, frozen=True):
    """One request."""

    trace_id: str
    text: str
    tokens: int
    """Of output, at most."""


class TimedClient:
    """Asks one gateway, or one node.

    Args:
        client: Reaches it.
        model: The name that it knows.
        more: Further fields of each body.
    """

    def __init__(self, client: OutsideClient, model: str, more: Mapping[str, object] | None = None) -> None:
        self._client = client
        self._model = model
        self._more = more or {}

    async def ask(self, question: TimedQuestion) -> tuple[OutsideResponse, TimedAnswer]:
        """One question."""
        headers = {**_JSON, "x-din-trace-id": question.trace_id}
        outcome = await self._client.ask("POST", _PATH, headers, chat(self._model, question.text, question.tokens, self._more))
        return outcome, answer_of(outcome)

    async def ask_all(self, questions: Iterable[TimedQuestion], at_once: int) -> tuple[float, dict[str, TimedAnswer]]:
        """All of them, so many at once. Returns the seconds that took, and the answers by trace id."""
        left = iter(questions)
        answers: dict[str, TimedAnswer] = {}

        async def lane() -> None:
            for question in left:
                answers[question.trace_id] = (await self.ask(question))[1]

        began = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(at_once)))
        return time.perf_counter() - began, answers


def chat(model: str, text: str, tokens: int, more: Mapping[str, object] | None = None) -> bytes:
    """A streamed chat, the same answer each time as far as the engine can."""
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


def answer_of(outcome: OutsideResponse) -> TimedAnswer:
    """What came back, by the client's stopwatch."""
    total_ms = outcome.total_s * 1e3
    if outcome.failure:
        return TimedAnswer(total_ms, trouble=outcome.failure)
    if not outcome.good:
        return refused(outcome.status, outcome.body, total_ms)
    return replace(streamed(_events(outcome), total_ms), node=NodeTimes.of(outcome.headers, outcome.head_s * 1e3))


def _events(outcome: OutsideResponse) -> Iterable[tuple[float, bytes]]:
    """The data of each event, with the millisecond in which its last byte arrived."""
    framing, start = Events(), 0
    for at_s, end in outcome.arrivals:
        for data in framing.feed(outcome.body[start:end]):
            yield at_s * 1e3, data
        start = end
    for data in framing.end():
        yield outcome.total_s * 1e3, data
