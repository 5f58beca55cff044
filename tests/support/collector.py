"""An OpenTelemetry collector on loopback that keeps what it receives and can be made to refuse it."""

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """A context manager. `status`: the HTTP status of its answers. `tls`: its certificate."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.status = 200
        self.headers: list[dict[str, str]] = []
        self.spans: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        self.resource: dict[str, str] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    def of_trace(self, trace_id: str) -> dict[str, dict[str, Any]]:
        """Return the spans of an exchange by name, found by `x-din-trace-id`."""
        roots = [span for span in self.spans if span["attributes"].get("din.trace_id") == trace_id]
        return {span["name"]: span for root in roots for span in self.spans if span["trace_id"] == root["trace_id"]}

    def _handler(self):
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                if collector.status == 200:
                    collector._take(self.path, body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_) -> None:
                return

        return Handler

    def _take(self, path: str, body: bytes) -> None:
        if path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        self.metrics.setdefault(metric.name, []).append(metric)
            return
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_span(span) for span in scope.spans]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _span(span) -> dict[str, Any]:
    return {
        "name": span.name,
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "kind": span.kind,
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "attributes": _attributes(span.attributes),
        "events": [(event.name, event.time_unix_nano) for event in span.events],
        "error": span.status.message,
    }


def _attributes(pairs) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
