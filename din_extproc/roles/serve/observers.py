"""The observers of finished exchanges: metrics, usage per day, audit, exchange log and spans.

Rule: an observer takes microseconds and never fails; files and the network are written later, in slices.
"""

import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from din_extproc import __version__
from din_extproc.audit.records import Event
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.edge.telemetry.exchange_log import ExchangeLog
from din_extproc.observe import instruments as of
from din_extproc.observe.exchange_metrics import ExchangeMetrics
from din_extproc.observe.families import Family, make_family, make_labelled_family
from din_extproc.observe.recent import Recent
from din_extproc.registry.table import NodeEvent
from din_extproc.roles.serve.accounting_plane import AttemptObserver, ExchangeObserver
from din_extproc.roles.serve.audit_recorder import AuditRecorder
from din_extproc.roles.serve.budget_watch import BudgetWatch
from din_extproc.roles.serve.decision_view import node_number
from din_extproc.roles.serve.double_checks import DoubleChecks
from din_extproc.roles.serve.state_metrics import audit_families
from din_extproc.roles.serve.usage import UsageRecorder
from din_extproc.settings.settings import Settings
from din_extproc.settings.telemetry import TelemetrySection

_LOG_S = 0.2

if TYPE_CHECKING:
    from din_extproc.edge.telemetry.otlp import OtlpExporter

_USAGE_S = 1.0


class ExchangeObservers:
    """The observers of one sidecar.

    Args:
        settings: The configuration.
        link: Runs Redis commands.
        counters: The counters of the admin page.
        collect_state: Returns all other metrics.
        on_blocked: Called with True when requests must be held because they can't be recorded, with False when they may pass again.
    """

    def __init__(
        self,
        settings: Settings,
        link: Runner,
        counters: DecisionCounters,
        collect_state: Callable[[], Iterator[Family | None]],
        on_blocked: Callable[[bool], None],
    ) -> None:
        self._counters = counters
        self._collect_state = collect_state
        self._metrics = ExchangeMetrics()
        self._usage = UsageRecorder(link, settings.network)
        self.budgets = BudgetWatch(settings, link, self.record_event)
        self._background: Background | None = None
        self.checks = DoubleChecks(self.record_event)
        self.recent = Recent()
        """Statistics of the last minutes, for the dashboard."""
        self._auditor = None if settings.audit is None else AuditRecorder(settings.audit, settings.network, link, on_blocked)
        self._log = ExchangeLog(settings.gateway.log_exchanges, sys.stderr.buffer.write)
        self._telemetry = settings.telemetry
        self._exporter = None if settings.telemetry is None else _make_exporter(settings, settings.telemetry, self.collect_families)

    def start(self, background: Background) -> None:
        """Open the audit log and start the periodic writers.

        Raises:
            OSError: the audit log's folder can't be used.
        """
        self._background = background
        background.every(_USAGE_S, "writing usage to Redis", self._usage.flush)
        background.every(_LOG_S, "writing the exchange log", self._log.flush)
        self.budgets.start(background)
        if self._auditor is not None:
            self._auditor.start(background)
        if self._exporter is not None and self._telemetry is not None:
            background.every(self._telemetry.flush_s, "pushing spans", self._exporter.push_spans)
            if self._telemetry.metrics_every_s:
                background.every(self._telemetry.metrics_every_s, "pushing metrics", self._exporter.push_metrics)

    async def stop(self) -> None:
        """Write what is left."""
        await self._usage.flush()
        await self._log.flush()
        if self._auditor is not None:
            await self._auditor.stop()
        if self._exporter is not None:
            await self._exporter.push_spans()

    def reload(self, settings: Settings) -> None:
        """Use the audit settings and the budgets of this configuration."""
        self.budgets.reload(settings)
        if self._auditor is not None:
            self._auditor.reload(settings)

    def on_report(self, report: dict[str, Any]) -> None:
        """Take admissions and double checks out of a worker's report."""
        admitted, compared = report.pop("admitted", ()), report.pop("compared", ())
        if self._auditor is not None:
            self._auditor.record_admissions(admitted)
        if compared and self._background is not None:
            self._background.start(self.checks.on_results(compared))

    def exchange_observers(self) -> Iterator[ExchangeObserver]:
        """Return what every finished exchange is passed to."""
        yield self._counters.on_exchange
        yield self._metrics.on_exchange
        yield self._usage.on_exchange
        yield self.budgets.on_exchange
        yield lambda record: self.recent.on_exchange(record, SystemClock.monotonic())
        yield self._log.on_exchange
        if self._auditor is not None:
            yield self._auditor.on_exchange
        if self._exporter is not None:
            yield self._exporter.on_exchange

    def attempt_observers(self) -> Iterator[AttemptObserver]:
        """Return what every failed attempt is passed to."""
        if self._exporter is not None:
            yield self._exporter.on_attempt_failed

    def on_node_events(self, events: list[NodeEvent]) -> None:
        """Record that nodes joined, changed or left."""
        if self._auditor is not None:
            self._auditor.on_node_events(events)

    def record_event(self, event: Event) -> None:
        """Record another event."""
        if self._auditor is not None:
            self._auditor.record(event)

    @property
    def blocked_reason(self) -> str:
        """The reason why requests are held, "" when they are not."""
        return "" if self._auditor is None else self._auditor.blocked_reason

    def collect_families(self) -> Iterator[Family | None]:
        """Yield all metrics; None lets other tasks run."""
        yield from self._collect_state()
        yield from self._metrics.collect_families()
        yield from self.budgets.collect_families()
        yield make_labelled_family(of.DOUBLE_CHECKS, self.checks.counts.items())
        if self._auditor is not None:
            yield from audit_families(self._auditor.snapshot())
        if self._exporter is not None:
            yield make_family(of.SPANS, self._exporter.exported)
            yield make_family(of.SPANS_DROPPED, self._exporter.dropped)

    def snapshot(self) -> dict[str, object]:
        """Return the counts of double checks and the audit log's state for the admin page."""
        status: dict[str, object] = {"double_checks": self.checks.counts}
        return status if self._auditor is None else {**status, "audit": self._auditor.snapshot()}


def _make_exporter(settings: Settings, telemetry: TelemetrySection, families: Callable[[], Iterator[Family | None]]) -> "OtlpExporter":
    from din_extproc.edge.telemetry.otlp import OtlpExporter  # noqa: PLC0415 - half a second, and only where something is pushed

    service = {"service.name": telemetry.service_name, "service.version": __version__, "host.name": socket.gethostname()}
    service["service.instance.id"] = f"{socket.gethostname()}-{node_number(settings)}"
    if settings.network:
        service["service.namespace"] = settings.network
    headers = {name: value.get_secret_value() for name, value in telemetry.headers.items()}
    tls = None if telemetry.tls is None else telemetry.tls.files(settings.folder)
    return OtlpExporter(
        endpoint=telemetry.endpoint, headers=headers, service=service, timeout_s=telemetry.timeout_s, families=families, tls=tls
    )
