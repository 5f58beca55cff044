"""A Python client for programs that call the network: OpenAI's client plus provenance and timings. Needs the extra `client`.

Rule: an answer without the headers that prove its origin raises an error.

    from din_extproc.client import Client

    with Client("http://gateway:10000", key) as network:
        answer = network.chat(model="bx-fast-chat", messages=[...], version=">=2025.3", deadline_ms=10_000)
        print(answer.content.choices[0].message.content, answer.provenance.node_id, answer.times.total_ms)
        with network.stream(model="bx-fast-chat", messages=[...]) as stream:
            for chunk in stream:
                ...
        print(stream.times.ttft_ms, stream.times.tpot_ms)
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from msgspec import Struct
from openai import APIError, APIStatusError, OpenAI, Stream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from din_extproc.measure import answer as measured
from din_extproc.measure.provenance import Provenance


class NetworkError(Exception):
    """The network did not return a valid answer.

    Attributes:
        code: A code of the documentation's table of errors; "unproven" if headers are missing.
        status: The HTTP status.
        trace_id: The id by which operators find the request, "" if there is none.
        retry_after_s: Seconds after which to retry; None: unknown.
    """

    def __init__(self, message: str, code: str, status: int, trace_id: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.trace_id = trace_id
        self.retry_after_s = retry_after_s


class RequestRefused(NetworkError):  # noqa: N818 - the name says what happened
    """The request is invalid; retrying it unchanged fails again."""


class VersionMismatch(RequestRefused):
    """No node serves a version that the request accepts."""


class LimitReached(NetworkError):  # noqa: N818 - the name says what happened
    """A limit of the tenant is reached, or nodes are busy; retry later."""


class Unavailable(NetworkError):  # noqa: N818 - the name says what happened
    """The network or its nodes failed."""


class Unproven(NetworkError):  # noqa: N818 - the name says what happened
    """The answer has no proof of its origin, or has that of another request."""


class AnswerTimes(Struct, frozen=True):
    """Timings of one answer in milliseconds, measured by the client."""

    head_ms: float
    """Until the response headers."""
    total_ms: float
    transfer_ms: float
    """The part of `head_ms` outside of the gateway and the node: network transfer."""
    ttft_ms: float | None = None
    """Until the first token of a stream; None: no token, or not a stream."""
    tpot_ms: float | None = None
    """Average time per token after the first."""


class Answer(Struct, frozen=True):
    """A complete answer."""

    content: ChatCompletion
    provenance: Provenance
    times: AnswerTimes


class Streamed:
    """An open stream. `times` is available at its end."""

    def __init__(self, chunks: Stream[ChatCompletionChunk], provenance: Provenance, began: float) -> None:
        self.provenance = provenance
        self._chunks = chunks
        self._began = began
        self._head_ms = _measure_ms(began)
        self._arrivals: list[float] = []
        self._times: AnswerTimes | None = None

    def __iter__(self) -> Iterator[ChatCompletionChunk]:
        tokens = None
        with _translate_errors(self.provenance.trace_id):
            for chunk in self._chunks:
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
                if any(_has_token(choice.delta.model_dump(exclude_none=True)) for choice in chunk.choices):
                    self._arrivals.append(_measure_ms(self._began))
                yield chunk
        seen = self._arrivals
        first, last = (seen[0], seen[-1]) if seen else (None, None)
        answer = measured.TimedAnswer(_measure_ms(self._began), first, last, len(seen) if tokens is None else tokens)
        self._times = _times(self._head_ms, answer.total_ms, self.provenance, first, answer.per_token_ms)

    @property
    def times(self) -> AnswerTimes:
        """The timings.

        Raises:
            RuntimeError: the stream has not ended.
        """
        if self._times is None:
            raise RuntimeError("the stream has not ended; read it to its end first")
        return self._times


class Client:
    """A client of one tenant, and a context manager.

    Args:
        url: The gateway's URL, without `/v1`.
        key: The tenant's API key.
        options: Further arguments of `openai.OpenAI`, such as `timeout` and `max_retries`.
    """

    def __init__(self, url: str, key: str, **options: Any) -> None:
        self.openai = OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.openai.close()

    def chat(self, *, version: str = "", deadline_ms: int | None = None, trace_id: str = "", traceparent: str = "", **body: Any) -> Answer:
        """Create a chat completion.

        Args:
            version: A constraint on the model's version, such as `>=2025.3,<2026`.
            deadline_ms: The deadline in milliseconds, including time spent queued.
            trace_id: The trace id of the request; "": the gateway makes one.
            traceparent: The W3C trace context that it belongs to.
            body: The arguments of `chat.completions.create`.

        Raises:
            NetworkError: no valid answer arrived; the subclass says what to do about it.
        """
        began = time.perf_counter()
        headers = _make_headers(version, body.pop("patience_ms", deadline_ms), trace_id, traceparent)  # the argument's former name
        with _translate_errors():
            raw = self.openai.chat.completions.with_raw_response.create(extra_headers=headers, **body)
            head_ms = _measure_ms(began)
            proof = _read_provenance(raw.headers, raw.status_code, trace_id)
            return Answer(raw.parse(), proof, _times(head_ms, _measure_ms(began), proof))

    @contextmanager
    def stream(
        self, *, version: str = "", deadline_ms: int | None = None, trace_id: str = "", traceparent: str = "", **body: Any
    ) -> Iterator[Streamed]:
        """Create a streamed chat completion: iterate over it, then read its `times`. Raises as `chat` does."""
        began = time.perf_counter()
        headers = _make_headers(version, body.pop("patience_ms", deadline_ms), trace_id, traceparent)  # the argument's former name
        with _translate_errors():
            raw = self.openai.chat.completions.with_raw_response.create(extra_headers=headers, stream=True, **body)
        with raw.parse() as chunks:
            yield Streamed(chunks, _read_provenance(raw.headers, raw.status_code, trace_id), began)


def _make_headers(version: str, deadline_ms: int | None, trace_id: str, traceparent: str) -> dict[str, str]:
    deadline = "" if deadline_ms is None else str(deadline_ms)
    found = {"x-din-model-version": version, "x-din-timeout-ms": deadline, "x-din-trace-id": trace_id, "traceparent": traceparent}
    return {name: value for name, value in found.items() if value}


def _read_provenance(headers: Mapping[str, str], status: int, trace_id: str) -> Provenance:
    found = Provenance.of(headers)
    if found.missing:
        raise Unproven(f"the answer has no {', '.join(found.missing)}", "unproven", status, found.trace_id)
    if trace_id and found.trace_id != trace_id:
        raise Unproven(f"the answer has trace id {found.trace_id}, the request had {trace_id}", "unproven", status, found.trace_id)
    return found


@contextmanager
def _translate_errors(trace_id: str = "") -> Iterator[None]:
    """Translate refusals and failures into this module's errors. `trace_id`: of a stream that has begun."""
    try:
        yield
    except APIStatusError as error:
        headers, status = error.response.headers, error.status_code
        code = error.code or str(status)
        after = headers.get("retry-after", "")
        raise _choose_error_class(status, code)(
            error.message, code, status, headers.get("x-din-trace-id", ""), float(after) if after.isdigit() else None
        ) from error
    except APIError as error:  # inside a stream, or a connection error
        raise Unavailable(error.message, error.code or "unreachable", 0, trace_id) from error


def _choose_error_class(status: int, code: str) -> type[NetworkError]:
    if code == "version_mismatch":
        return VersionMismatch
    if status == 429:  # noqa: PLR2004 - an HTTP status
        return LimitReached
    return RequestRefused if status < 500 else Unavailable  # noqa: PLR2004 - an HTTP status class


def _times(head_ms: float, total_ms: float, proof: Provenance, ttft_ms: float | None = None, tpot_ms: float | None = None) -> AnswerTimes:
    return AnswerTimes(head_ms, total_ms, max(0.0, head_ms - (proof.exec_time_ms or 0)), ttft_ms, tpot_ms)


def _has_token(delta: Mapping[str, Any]) -> bool:
    return any(delta.get(channel) for channel in measured.CHANNELS)


def _measure_ms(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
