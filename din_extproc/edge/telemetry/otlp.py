"""Exporter of spans and metrics by OTLP over HTTP, with OpenTelemetry's types and encoders.

Invariant: nothing waits for the collector. Data that it does not accept in time is dropped and counted; encoding yields to requests
every few spans or points.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

import aiohttp
from google.protobuf.message import Message
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from din_extproc import __version__
from din_extproc.domain.usage import ExchangeRecord, FailedAttempt
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.tls import ClientFiles, ReloadedFiles, client_context
from din_extproc.observe.families import Distribution, Family, Labels, Value
from din_extproc.observe.instruments import SEMCONV, Instrument, InstrumentKind
from din_extproc.observe.spans import Span, build_attempt_span, build_spans

_log = logging.getLogger(__name__)

_MOST_WAITING = 4096
"""Maximum exchanges with pending spans; beyond it the oldest are dropped."""
_AT_ONCE = 512
_SLICE_SPANS = 8
_SLICE_POINTS = 4
_NS = 1000
_NS_PER_S = 1_000_000_000
_GOOD = range(200, 300)
_SCOPE = InstrumentationScope("din_extproc", __version__, SEMCONV)
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpExporter:
    """Exporter to one collector.

    Args:
        endpoint: `http://host:4318`.
        headers: Headers of every request, such as a token.
        service: Resource attributes such as `service.name`.
        timeout_s: Time-out of a request.
        families: Yields the metrics; None: a point to yield to other work.
        tls: CA and client certificate. None: the system's CAs.
    """

    def __init__(
        self,
        endpoint: str,
        headers: Mapping[str, str],
        service: Mapping[str, str],
        timeout_s: float,
        families: Callable[[], Iterable[Family | None]],
        tls: ClientFiles | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._headers = {**headers, "content-type": "application/x-protobuf"}
        self._resource = Resource(dict(service))
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._families = families
        self._server_name = None if tls is None else tls.server_name
        self._tls = None if tls is None else ReloadedFiles(tls.files, lambda: client_context(tls))
        self._began_ns = int(SystemClock.wall() * _NS_PER_S)
        self._records: deque[ExchangeRecord | FailedAttempt] = deque()
        self._down = False
        self.exported = 0
        """Exported spans since the start."""
        self.dropped = 0
        """Exchanges whose spans were dropped."""

    def on_exchange(self, record: ExchangeRecord) -> None:
        """Queue the spans of a finished exchange."""
        if record.span:
            self._queue_record(record)

    def on_attempt_failed(self, attempt: FailedAttempt) -> None:
        """Record a failed attempt at a node."""
        if attempt.traceparent:
            self._queue_record(attempt)

    def _queue_record(self, record: ExchangeRecord | FailedAttempt) -> None:
        if len(self._records) >= _MOST_WAITING:
            self._records.popleft()
            self.dropped += 1
        self._records.append(record)

    async def push_spans(self) -> None:
        """Export all pending spans."""
        while self._records:
            records = [self._records.popleft() for _ in range(min(_AT_ONCE, len(self._records)))]
            found = [_make_readable(span, self._resource) for record in records for span in _build_readable_spans(record)]
            parts = []
            for start in range(0, len(found), _SLICE_SPANS):
                parts.append(encode_spans(found[start : start + _SLICE_SPANS]).SerializeToString())
                await asyncio.sleep(0)
            if await self._post("/v1/traces", b"".join(parts)):  # protobuf: messages one after the other are one message
                self.exported += len(found)
            else:
                self.dropped += len(records)
                return

    async def push_metrics(self) -> None:
        """Export the current metrics."""
        now_ns = int(SystemClock.wall() * _NS_PER_S)
        parts = []
        for family in self._families():
            if family is None:
                await asyncio.sleep(0)
                continue
            points = iter(family.points)
            while chunk := list(islice(points, _SLICE_POINTS)):
                parts.append(self._encode_metric(family.instrument, chunk, now_ns).SerializeToString())
                await asyncio.sleep(0)
        await self._post("/v1/metrics", b"".join(parts))

    def _encode_metric(self, instrument: Instrument, points: list[tuple[Labels, Value]], now_ns: int) -> Message:
        metric = Metric(instrument.name, instrument.about, instrument.unit, _make_data(instrument, points, self._began_ns, now_ns))
        scope = ScopeMetrics(_SCOPE, [metric], SEMCONV)
        encoded: Message = encode_metrics(MetricsData([ResourceMetrics(self._resource, [scope], SEMCONV)]))
        return encoded

    async def _post(self, path: str, body: bytes) -> bool:
        reason = ""
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.post(
                    self._endpoint + path,
                    data=body,
                    headers=self._headers,
                    allow_redirects=False,  # the headers hold a secret for this one
                    ssl=True if self._tls is None else self._tls.now(),
                    server_hostname=self._server_name,
                ) as reply,
            ):
                if reply.status not in _GOOD:
                    reason = f"status {reply.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
        if bool(reason) != self._down:
            self._down = bool(reason)
            if reason:
                _log.warning("OTLP export to %s failed: %s", self._endpoint, reason)
            else:
                _log.info("OTLP export to %s works again", self._endpoint)
        return not reason


def _build_readable_spans(record: ExchangeRecord | FailedAttempt) -> Iterable[Span]:
    if isinstance(record, ExchangeRecord):
        return build_spans(record)
    span = build_attempt_span(record)
    return () if span is None else (span,)


def _make_readable(span: Span, resource: Resource) -> ReadableSpan:
    trace_id = int(span.trace_id, 16)
    parent = SpanContext(trace_id, int(span.parent_id, 16), is_remote=True, trace_flags=_SAMPLED) if span.parent_id else None
    return ReadableSpan(
        name=span.name,
        context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=_SAMPLED),
        parent=parent,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(name, timestamp=at_us * _NS) for name, at_us in span.events],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=span.start_us * _NS,
        end_time=span.end_us * _NS,
        instrumentation_scope=_SCOPE,
    )


def _make_data(instrument: Instrument, points: list[tuple[Labels, Value]], began_ns: int, now_ns: int) -> Sum | Gauge | Histogram:
    if instrument.kind is InstrumentKind.HISTOGRAM:
        return Histogram(list(_make_distributions(instrument, points, began_ns, now_ns)), AggregationTemporality.CUMULATIVE)
    numbers = [
        NumberDataPoint(_make_attributes(instrument, labels), began_ns, now_ns, value)
        for labels, value in points
        if not isinstance(value, Distribution)
    ]
    if instrument.kind is InstrumentKind.GAUGE:
        return Gauge(numbers)
    return Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)


def _make_distributions(
    instrument: Instrument, points: list[tuple[Labels, Value]], began_ns: int, now_ns: int
) -> Iterator[HistogramDataPoint]:
    for labels, value in points:
        if isinstance(value, Distribution):
            yield HistogramDataPoint(
                attributes=_make_attributes(instrument, labels),
                start_time_unix_nano=began_ns,
                time_unix_nano=now_ns,
                count=sum(value.counts),
                sum=value.total,
                bucket_counts=tuple(value.counts),
                explicit_bounds=instrument.bounds,
                min=float("inf"),
                max=float("-inf"),
            )


def _make_attributes(instrument: Instrument, labels: Labels) -> dict[str, str]:
    return {name: text for name, text in zip(instrument.labels, labels, strict=True) if text}
