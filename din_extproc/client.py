"""For programs that ask the network: OpenAI's own client, its answers with their proof and their times. Needs the extra `client`.

Rule: an answer without the headers that prove where it comes from is an error, never an answer.

    from din_extproc.client import Client

    with Client("http://gateway:10000", key) as network:
        answer = network.chat(model="bx-fast-chat", messages=[...], version=">=2025.3", patience_ms=10_000)
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
    """The network did not give a good answer.

    Attributes:
        code: As in the documentation's table of errors; "unproven" where headers are missing.
        status: Of HTTP.
        trace_id: What operators find the request by, "" when there was none.
        retry_after_s: When it may be tried again; None: that was not said.
    """

    def __init__(self, message: str, code: str, status: int, trace_id: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.trace_id = trace_id
        self.retry_after_s = retry_after_s


class RequestRefused(NetworkError):  # noqa: N818 - it says what came
    """The request is at fault: as it is, it will be refused again."""


class VersionMismatch(RequestRefused):
    """No node serves a version that was asked for."""


class LimitReached(NetworkError):  # noqa: N818 - it says what came
    """A limit of the tenant is reached, or nodes are busy: later it passes."""


class Unavailable(NetworkError):  # noqa: N818 - it says what came
    """The network or its nodes failed."""


class Unproven(NetworkError):  # noqa: N818 - it says what came
    """The answer does not say where it comes from, or it is another one's."""


class AnswerTimes(Struct, frozen=True):
    """One answer by the client's stopwatch, in milliseconds."""

    head_ms: float
    """Until the answer's head."""
    total_ms: float
    transfer_ms: float
    """Of the head: what was not spent between the gateway's first byte of the request and the node's first of the answer."""
    ttft_ms: float | None = None
    """Until the first token of a stream; None: there was none, or it was no stream."""
    tpot_ms: float | None = None
    """Each token after the first, on the average."""


class Answer(Struct, frozen=True):
    """A whole answer."""

    content: ChatCompletion
    provenance: Provenance
    times: AnswerTimes


class Streamed:
    """A stream that is being read. `times` is there when it is over."""

    def __init__(self, chunks: Stream[ChatCompletionChunk], provenance: Provenance, began: float) -> None:
        self.provenance = provenance
        self._chunks = chunks
        self._began = began
        self._head_ms = _since(began)
        self._arrivals: list[float] = []
        self._times: AnswerTimes | None = None

    def __iter__(self) -> Iterator[ChatCompletionChunk]:
        tokens = None
        with _told(self.provenance.trace_id):
            for chunk in self._chunks:
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
                if any(_has_token(choice.delta.model_dump(exclude_none=True)) for choice in chunk.choices):
                    self._arrivals.append(_since(self._began))
                yield chunk
        seen = self._arrivals
        first, last = (seen[0], seen[-1]) if seen else (None, None)
        told = measured.TimedAnswer(_since(self._began), first, last, len(seen) if tokens is None else tokens)
        self._times = _times(self._head_ms, told.total_ms, self.provenance, first, told.per_token_ms)

    @property
    def times(self) -> AnswerTimes:
        """How long it took.

        Raises:
            RuntimeError: the stream is not over.
        """
        if self._times is None:
            raise RuntimeError("the stream is not over")
        return self._times


class Client:
    """One tenant's client. A context manager.

    Args:
        url: The gateway's, without `/v1`.
        key: The tenant's.
        options: Further arguments of `openai.OpenAI`, such as `timeout` and `max_retries`.
    """

    def __init__(self, url: str, key: str, **options: Any) -> None:
        self.openai = OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.openai.close()

    def chat(self, *, version: str = "", patience_ms: int | None = None, trace_id: str = "", traceparent: str = "", **body: Any) -> Answer:
        """A whole chat completion.

        Args:
            version: A constraint on the model's version, such as `>=2025.3,<2026`.
            patience_ms: How long the answer may take, waiting in the gateway included.
            trace_id: Under which it is to be found; "": the gateway makes one.
            traceparent: Of the W3C trace that it belongs to.
            body: As `chat.completions.create` takes it.

        Raises:
            NetworkError: no good answer came; its classes say what to do about it.
        """
        began = time.perf_counter()
        asked = _headers(version, patience_ms, trace_id, traceparent)
        with _told():
            raw = self.openai.chat.completions.with_raw_response.create(extra_headers=asked, **body)
            head_ms = _since(began)
            proof = _proven(raw.headers, raw.status_code, trace_id)
            return Answer(raw.parse(), proof, _times(head_ms, _since(began), proof))

    @contextmanager
    def stream(
        self, *, version: str = "", patience_ms: int | None = None, trace_id: str = "", traceparent: str = "", **body: Any
    ) -> Iterator[Streamed]:
        """The same as a stream: iterate over it, then read its `times`. Raises as `chat` does."""
        began = time.perf_counter()
        asked = _headers(version, patience_ms, trace_id, traceparent)
        with _told():
            raw = self.openai.chat.completions.with_raw_response.create(extra_headers=asked, stream=True, **body)
        with raw.parse() as chunks:
            yield Streamed(chunks, _proven(raw.headers, raw.status_code, trace_id), began)


def _headers(version: str, patience_ms: int | None, trace_id: str, traceparent: str) -> dict[str, str]:
    patience = "" if patience_ms is None else str(patience_ms)
    found = {"x-din-model-version": version, "x-din-timeout-ms": patience, "x-din-trace-id": trace_id, "traceparent": traceparent}
    return {name: value for name, value in found.items() if value}


def _proven(headers: Mapping[str, str], status: int, trace_id: str) -> Provenance:
    found = Provenance.of(headers)
    if found.missing:
        raise Unproven(f"the answer has no {', '.join(found.missing)}", "unproven", status, found.trace_id)
    if trace_id and found.trace_id != trace_id:
        raise Unproven(f"the answer is that of {found.trace_id}, asked was {trace_id}", "unproven", status, found.trace_id)
    return found


@contextmanager
def _told(trace_id: str = "") -> Iterator[None]:
    """The gateway's refusals and failures under their own names. `trace_id`: of a stream that has begun."""
    try:
        yield
    except APIStatusError as error:
        headers, status = error.response.headers, error.status_code
        code = error.code or str(status)
        after = headers.get("retry-after", "")
        raise _kind(status, code)(
            error.message, code, status, headers.get("x-din-trace-id", ""), float(after) if after.isdigit() else None
        ) from error
    except APIError as error:  # inside a stream, or on the way
        raise Unavailable(error.message, error.code or "unreachable", 0, trace_id) from error


def _kind(status: int, code: str) -> type[NetworkError]:
    if code == "version_mismatch":
        return VersionMismatch
    if status == 429:  # noqa: PLR2004 - HTTP's own number
        return LimitReached
    return RequestRefused if status < 500 else Unavailable  # noqa: PLR2004 - HTTP's own border


def _times(head_ms: float, total_ms: float, proof: Provenance, ttft_ms: float | None = None, tpot_ms: float | None = None) -> AnswerTimes:
    return AnswerTimes(head_ms, total_ms, max(0.0, head_ms - (proof.exec_time_ms or 0)), ttft_ms, tpot_ms)


def _has_token(delta: Mapping[str, Any]) -> bool:
    return any(delta.get(channel) for channel in measured.CHANNELS)


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
