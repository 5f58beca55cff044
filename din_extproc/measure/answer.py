"""A streamed answer as its client saw it arrive: when the first token came, how many, and what the engine says of itself.

Rule: an event that can't be read counts for nothing; only what is missing at the end is an error.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from din_extproc.domain.usage import Outcome
from din_extproc.domain.verdict import RefusalCode
from din_extproc.measure.provenance import Provenance

_DONE = b"[DONE]"
_NODE_TIMES = re.compile(r'node;dur=(\d{1,9});desc="(\d{1,12}\.\d{1,9})"').fullmatch


class NodeTimes(Struct, frozen=True):
    """Times that the Envoy in front of an engine gives in an answer's headers, and when others received those headers."""

    received_at: float
    """The request came: seconds since the epoch, by the node's clock."""
    answered_ms: float
    """From then to the first byte of the engine's answer."""
    seen_ms: float
    """That byte at the gateway: milliseconds since the request's first byte there."""
    head_ms: float
    """That byte at the client: milliseconds since the request was sent."""

    @classmethod
    def of(cls, headers: Mapping[str, str], head_ms: float) -> "NodeTimes | None":
        """From an answer's headers, names in lower case; None when they do not tell."""
        times = _NODE_TIMES(headers.get("server-timing", ""))
        seen_ms = Provenance.of(headers).exec_time_ms
        return None if times is None or seen_ms is None else cls(float(times[2]), float(times[1]), float(seen_ms), head_ms)


class TimedAnswer(Struct, frozen=True, omit_defaults=True):
    """One answer by the client's stopwatch. Milliseconds since the request was sent."""

    total_ms: float
    first_token_ms: float | None = None
    """In any channel; None: there was none."""
    last_token_ms: float | None = None
    tokens: int = 0
    """As the engine counted, else as many as came."""
    executed_ms: float | None = None
    """Execution time that the engine reports, prompt and output; None: it reports none."""
    created: tuple[tuple[float, float], ...] = ()
    """Each second of the engine's own clock that it wrote, with the moment its first event arrived."""
    node: NodeTimes | None = None
    """None: the node has no Envoy of its own in front."""
    trouble: str = ""
    """Reason why it is not a successful response: an error code where there is one."""

    @property
    def per_token_ms(self) -> float | None:
        """TPOT: the mean time of each token after the first."""
        if self.first_token_ms is None or self.last_token_ms is None or self.tokens < 2:  # noqa: PLR2004 - a gap needs two
            return None
        return (self.last_token_ms - self.first_token_ms) / (self.tokens - 1)


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_token(self) -> bool:
        return any(getattr(self, channel) for channel in CHANNELS)


CHANNELS = _Delta.__struct_fields__
"""Of a stream's delta: a value in one of them is a token."""


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_token)


class _Usage(Struct):
    completion_tokens: int = 0


class _Timings(Struct):
    """llama.cpp's own stopwatch."""

    prompt_ms: float = 0.0
    predicted_ms: float = 0.0


class _Chunk(Struct):
    choices: list[_Choice] = []
    created: float | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


class _Code(Struct):
    code: str | int | None = None
    type: str | None = None


class _Refusal(Struct):
    error: _Code


_chunk = msgspec.json.Decoder(_Chunk).decode
_refusal = msgspec.json.Decoder(_Refusal).decode


def streamed(events: Iterable[tuple[float, bytes]], total_ms: float) -> TimedAnswer:
    """A stream that was read to its end.

    Args:
        events: The data of each event, with the millisecond in which it arrived.
        total_ms: When the stream was over.
    """
    arrivals: list[float] = []
    created: dict[float, float] = {}
    reported: int | None = None
    executed_ms, trouble, ended = None, "", False
    for at_ms, data in events:
        if data == _DONE:
            ended = True
            continue
        try:
            chunk = _chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if chunk.created is not None:
            created.setdefault(chunk.created, at_ms)
        arrivals += [at_ms for choice in chunk.choices if choice.has_token]
        ended = ended or any(choice.finish_reason for choice in chunk.choices)
        if chunk.usage is not None:
            reported = chunk.usage.completion_tokens
        if chunk.timings is not None:
            executed_ms = chunk.timings.prompt_ms + chunk.timings.predicted_ms
        if chunk.error is not None:
            trouble = trouble or _name_error(chunk.error)
    return TimedAnswer(
        total_ms,
        first_token_ms=arrivals[0] if arrivals else None,
        last_token_ms=arrivals[-1] if arrivals else None,
        tokens=len(arrivals) if reported is None else reported,
        executed_ms=executed_ms,
        created=tuple(created.items()),
        trouble=trouble or ("" if ended else Outcome.UPSTREAM_TRUNCATED.value),
    )


def refused(status: int, body: bytes, total_ms: float) -> TimedAnswer:
    """An answer with another status than a good one."""
    try:
        error = _refusal(body).error
        cause = str(error.code or error.type or "")
    except (msgspec.DecodeError, UnicodeDecodeError):
        cause = ""
    return TimedAnswer(total_ms, trouble=cause or str(status))


def _name_error(error: Any) -> str:
    """The code of an error inside a stream."""
    found = error if isinstance(error, dict) else {}
    return str(found.get("code") or found.get("type") or RefusalCode.UPSTREAM_ERROR.code)
