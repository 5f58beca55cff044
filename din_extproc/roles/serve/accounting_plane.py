"""The accounting plane of one sidecar: it settles finished exchanges and learns from them.

Rule: it does not need a request plane in its process; they share the counters in Redis and `WorkerUpdate`s.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from din_extproc.admit.ledger import SettlementLedger
from din_extproc.admit.reservation import OutputHistory
from din_extproc.domain.membership import MembershipDelta
from din_extproc.domain.usage import UPSTREAM_FAULTS, ExchangeRecord, FailedAttempt, Outcome
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.probe.envoy_admin import DroppedLogs
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.learning import ExchangeLearner
from din_extproc.flow.settlement import SettlementService
from din_extproc.observe.accesslog import read_fluentd_records, read_records
from din_extproc.observe.mixture import DtypeMixture
from din_extproc.roles.serve.decision_view import half_lives_s, node_names
from din_extproc.roles.serve.health import HealthMonitor
from din_extproc.roles.serve.worker_update import WorkerUpdate
from din_extproc.schedule.pace import NodePaces
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_RETRY_S = 0.5
_LOOK_S = 1.0
_ENVOY_POLL_S = 5.0
_REMEMBERED_NODES = 50_000
RECORDS_PER_ITERATION = 16
"""Log entries per iteration of the event loop: under a millisecond."""

ExchangeObserver = Callable[[ExchangeRecord], None]
"""Gets every finished exchange once; the record is final. It costs microseconds and never raises."""
AttemptObserver = Callable[[FailedAttempt], None]
"""Gets every failed attempt at a node; its exchange may go on."""


class AccountingPlane:
    """Settles finished exchanges and learns from them.

    Args:
        settings: The configuration.
        ledger: The rate-limit counters.
        background: Runs settlement.
        observers: Get every finished exchange, after those of this class.
        attempt_observers: Get every failed attempt, after the breakers.
        calibrators: Learns prompt lengths.
        outputs: Learns output lengths.
        health: Gets the outcome of requests.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: SettlementLedger,
        background: Background,
        observers: Iterable[ExchangeObserver],
        attempt_observers: Iterable[AttemptObserver],
        calibrators: TokenCalibrators,
        outputs: OutputHistory,
        health: HealthMonitor,
    ) -> None:
        self._prices = settings.prices
        self._nodes = node_names(settings)
        self._described = {node.id: node for pool in settings.pools for node in pool.nodes}
        self._background = background
        self._calibrators = calibrators
        self._outputs = outputs
        self._paces = NodePaces(half_lives_s(settings))
        self.settler = SettlementService(ledger)
        self._observers: tuple[ExchangeObserver, ...] = (
            lambda record: health.on_exchange(record, SystemClock.monotonic()),
            lambda record: self._paces.learn(record, SystemClock.monotonic()),
            self._count_exchange,
            self._compare_identity,
            ExchangeLearner(calibrators, outputs).on_exchange,
            *observers,
        )
        self._attempt_observers: tuple[AttemptObserver, ...] = (
            lambda attempt: health.on_attempt_failed(attempt, SystemClock.monotonic()),
            *attempt_observers,
        )
        self._registered: dict[str, str] = {}
        """Node id by endpoint. Nodes that left stay, because their last log entries arrive later."""
        self._tallies: dict[str, tuple[int, int]] = {}
        self._mismatches: dict[str, tuple[int, str]] = {}
        """Answers of nodes that stated another identity, with the latest reason, since they were last taken."""
        self._alarmed: set[str] = set()
        self._envoy = DroppedLogs(settings.envoy.admin)
        self._unreadable = 0
        self.mixture = DtypeMixture()
        self.capabilities = DtypeMixture()
        """The same of compute capabilities, of nodes that give one."""

    def start(self) -> None:
        """Start the periodic tasks."""
        self._background.every(_RETRY_S, "retrying settlements", self._retry)
        self._background.every(_LOOK_S, "checking for mixed dtypes", self._check_dtypes)
        self._background.every(_ENVOY_POLL_S, "reading Envoy's dropped log entries", self._envoy.count_new)

    def reload(self, settings: Settings) -> None:
        """Use the nodes, prices and half-lives of this configuration."""
        self._prices = settings.prices
        self._nodes = self._registered | node_names(settings)
        self._described |= {node.id: node for pool in settings.pools for node in pool.nodes}
        self._paces.half_lives_s = half_lives_s(settings)

    def on_membership(self, delta: MembershipDelta) -> None:
        """Remember the endpoints of nodes that joined."""
        for nodes in delta.joined.values():
            for node in nodes:
                self._registered.pop(str(node.endpoint), None)  # the newest ones last
                self._registered[str(node.endpoint)] = node.id
                self._nodes[str(node.endpoint)] = node.id
                self._described[node.id] = node
        while len(self._registered) > _REMEMBERED_NODES:
            endpoint = next(iter(self._registered))
            self._nodes.pop(endpoint, None)
            self._described.pop(self._registered.pop(endpoint), None)

    def take_counts(self) -> dict[str, tuple[int, int]]:
        """Return (answers, failures) per node since the last call."""
        tallies, self._tallies = self._tallies, {}
        return tallies

    def on_access_log(self, message: bytes) -> None:
        """Handle one message of Envoy's access log."""
        try:
            finished = read_records(message, self._nodes, self._described)
        except ValueError:
            self._unreadable += 1
            _log.warning("access log message of %d bytes ignored: it can't be decoded", len(message))
            return
        self._background.trickle(finished, self._on_logged, most=RECORDS_PER_ITERATION)

    def on_log_entries(self, tag: str, entries: list[Any]) -> None:
        """Take one Fluentd message of Envoy's access log."""
        finished = read_fluentd_records(tag, entries, self._nodes, self._described, unreadable=self._count_unreadable)
        self._background.trickle(finished, self._on_logged, most=RECORDS_PER_ITERATION)

    def take_learned(self) -> WorkerUpdate:
        """Return what was learned since the last call."""
        return WorkerUpdate(
            calibrations=self._calibrators.take_changes() or None,
            outputs=self._outputs.take_changes() or None,
            paces=self._paces.take_changes() or None,
        )

    def snapshot(self) -> dict[str, object]:
        """Return the settlement state for the admin page."""
        settler = self.settler
        return {
            "exchanges": {"unsettled": settler.waiting, "given_up": settler.dropped, "unknown": settler.unknown},
            "access_logs": {"unreadable": self._unreadable, "dropped": self._envoy.total},
            "mixed_dtype_share": self.mixture.shares(),
            "mixed_capability_share": self.capabilities.shares(),
        }

    def _count_unreadable(self) -> None:
        self._unreadable += 1

    def _on_logged(self, logged: list[ExchangeRecord | FailedAttempt]) -> None:
        """Handle some log entries, observer by observer: so the processor keeps each one's code and data in its caches."""
        finished: list[ExchangeRecord] = []
        for each in logged:
            if isinstance(each, FailedAttempt):
                for on_attempt in self._attempt_observers:
                    on_attempt(each)
            else:
                finished.append(each)
        if self._prices.models:
            finished = [self._priced(record) for record in finished]
        self._background.start(self.settler.settle(finished))
        for on_exchange in self._observers:
            for record in finished:
                try:
                    on_exchange(record)
                except Exception:  # noqa: BLE001 - last guard: the other observers get it all the same
                    _log.exception("an observer of finished exchanges failed")

    def _priced(self, record: ExchangeRecord) -> ExchangeRecord:
        cost, saved = self._prices.costs(record)
        return replace(record, cost=cost, saved=saved)

    def take_mismatches(self) -> dict[str, tuple[int, str]]:
        """Return how many answers of each node contradicted its identity since the last call, and how."""
        mismatches, self._mismatches = self._mismatches, {}
        return mismatches

    def _compare_identity(self, record: ExchangeRecord) -> None:
        """Hold what the node's own Envoy states against what the gateway believes."""
        if not record.stated_node:
            return
        reason = record.identity_mismatch
        if not reason:
            self._alarmed.discard(record.node_id)
            return
        count, _ = self._mismatches.get(record.node_id, (0, ""))
        self._mismatches[record.node_id] = (count + 1, reason)
        if record.node_id not in self._alarmed:
            self._alarmed.add(record.node_id)
            _log.error("%s (trace id %s): correct its address or id, `din-extproc verify` names all such nodes", reason, record.trace_id)

    def _count_exchange(self, record: ExchangeRecord) -> None:
        """Count the exchange for or against its node. An impossible token usage counts as a failure, even of a good answer."""
        failed = record.outcome in UPSTREAM_FAULTS or record.usage.disputed
        if not record.node_id or not (failed or record.outcome is Outcome.COMPLETED):
            return
        answers, failures = self._tallies.get(record.node_id, (0, 0))
        self._tallies[record.node_id] = (answers + (not failed), failures + failed)
        node = self._described.get(record.node_id)
        if node is not None and not failed:
            self.mixture.count(record.model, node.dtype)
            if node.compute_capability:
                self.capabilities.count(record.model, node.compute_capability)

    async def _check_dtypes(self) -> None:
        for what, mixture in (("dtype", self.mixture), ("compute capability", self.capabilities)):
            for alarm in mixture.look(SystemClock.monotonic()):
                names = ", ".join(alarm.dtypes)
                if alarm.mixed:
                    _log.warning("%.1f %% of the answers of %s have another %s than most (%s)", 100 * alarm.share, alarm.model, what, names)
                else:
                    _log.info("answers of %s have one %s again (%s)", alarm.model, what, alarm.dtypes[0])

    async def _retry(self) -> None:
        if self.settler.waiting:
            await self.settler.retry()
