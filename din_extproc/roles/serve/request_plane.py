"""The request plane of one process: it decides about requests by one configuration and the current nodes.

Rule: it does not need the accounting plane in its process; they share the counters in Redis and `WorkerUpdate`s.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from din_extproc.admit.ledger import Ledger
from din_extproc.admit.queue import QueueState
from din_extproc.admit.reservation import OutputHistory
from din_extproc.audit.records import AdmissionRecord
from din_extproc.domain.node import Node
from din_extproc.edge.admission_queue import AdmissionQueue
from din_extproc.edge.audit.gate import AuditGate
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.double_check import DoubleChecker
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.double_check import CheckSampler
from din_extproc.flow.node_selector import NodeSelector
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.request import WorkerContext
from din_extproc.flow.trace import Sampler, TraceIds
from din_extproc.flow.view import NO_GLOBAL_LIMITS, TokenCounter
from din_extproc.roles.serve.decision_view import make_view, node_number
from din_extproc.roles.serve.ext_authz_leases import ExtAuthzLeases
from din_extproc.schedule.load import LoadModel
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_SEED_BITS = 64
_MS = 1000
_CHECK_S = 0.5
_RENEWALS_PER_LEASE = 3
_RENEWED_AT_ONCE = 64
_BETWEEN_RENEWALS_S = 0.005


class _NoWakeups:
    """The wake-up channel of counters that no other process shares."""

    def request_wakeup(self, tenant: str, lasting_ms: int) -> None:
        """Ignore: wake-ups come from this process only."""

    def announce_grant(self, tenant: str, cost: float) -> None:
        """Ignore: no other process waits."""


class RequestPlane:
    """Decides about requests. `desk` is the worker's shared state and makes the handlers of ext_proc streams."""

    def __init__(
        self, settings: Settings, ledger: Ledger, background: Background, counters: DecisionCounters, waiting: AdmissionQueue | None = None
    ) -> None:
        view = make_view(settings, {})
        if waiting is None:
            waiting = AdmissionQueue(
                ledger=ledger,
                wakeups=_NoWakeups(),
                shared=lambda: True,
                now_ms=SystemClock.monotonic_ms,
                start=background.start,
                queue=QueueState(),
            )
        self._one_script = settings.store.one_script
        self.gauges = TokenCalibrators(view.table.preferred_model)
        self.outputs = OutputHistory()
        self.selector = NodeSelector(LoadModel(), PoolMembership.from_pools(settings.pools), settings.gateway.route_cache_s)
        self.context = WorkerContext(
            view=view,
            ledger=ledger,
            selector=self.selector,
            calibrators=self.gauges,
            outputs=self.outputs,
            ids=TraceIds(node_number(settings), secrets.randbits(_SEED_BITS)),
            clock=SystemClock(),
            observer=counters,
            start=background.start,
            lease_ms=settings.store.lease_ms,
            queue=waiting,
            sampler=None if settings.telemetry is None else Sampler(settings.telemetry.sample),
            admissions=None if settings.audit is None else [],
            started=int(SystemClock.wall()),
        )
        authz = settings.gateway.ext_authz
        self.ext_authz_leases = None if authz is None else ExtAuthzLeases(self.context, authz.longest_s)
        """The leases of requests that ext_authz permitted; None: ext_authz is off."""
        self._checker: DoubleChecker | None = None
        if settings.verification is not None:
            self.context.checks = CheckSampler(settings.verification.policy(settings.gateway.workers))
            self._checker = DoubleChecker(self.context.checks, self._get_nodes, self._make_trace_id)
        self._waiting = waiting
        self._block_s = 0.0
        if settings.audit is not None and settings.audit.section.on_full == "block":
            self._block_s = settings.audit.section.block_ms / _MS
        self._gate: AuditGate | None = None
        self._background = background
        self._moves = self.selector.in_flight = settings.in_flight

    def start(self) -> None:
        """Start renewing leases and double checks."""
        if self.ext_authz_leases is not None:
            self.ext_authz_leases.start(self._background)
        self._background.every(self.context.lease_ms / 1000 / _RENEWALS_PER_LEASE, "renewing leases", self._renew_leases)
        if self._checker is not None:
            self._background.every(_CHECK_S, "running double checks", self._checker.run_checks)

    def reload(self, settings: Settings, tokenizers: Mapping[str, TokenCounter]) -> None:
        """Decide by this configuration from the next request on."""
        view = make_view(settings, tokenizers)
        if not self._one_script and view.global_limits is not NO_GLOBAL_LIMITS:
            _log.warning("`limits` of all tenants together are not counted: restart to apply `store.one_slot`")
            view = replace(view, global_limits=NO_GLOBAL_LIMITS)
        self.context.reload(view, self.selector.members.with_pools(settings.pools))
        moves = settings.in_flight
        self.selector.in_flight = (
            moves if settings.gateway.xds is not None else moves.intersect(self._moves)
        )  # without xDS, Envoy knows only the clusters it started with

    def block_requests(self, blocked: bool) -> None:  # noqa: FBT001 - a handler takes the value alone
        """Hold requests while the audit log can't be written, or accept them again."""
        before, self._gate = self._gate, AuditGate(self._block_s) if blocked else None
        self.context.gate = self._gate
        if before is not None:
            before.open()

    def stop_requests(self, origins: frozenset[str]) -> None:
        """Send requests of these origins to no node."""
        self.context.stopped = origins

    def on_missing_adapters(self, missing: Mapping[str, str]) -> None:
        """Ask nodes that answered 404 for an adapter for it no more. `missing`: adapter by node id."""
        now = self.context.clock.monotonic()
        for node_id, adapter in missing.items():
            self.selector.load.adapters.on_missing(node_id, adapter, now)

    def take_admissions(self) -> list[AdmissionRecord]:
        """Return the requests that were sent on since the last call."""
        taken = self.context.admissions
        if not taken:
            return []
        self.context.admissions = []
        return taken

    def take_records(self) -> dict[str, list[Any]]:
        """Return admissions and double checks since the last call, for the accounting service."""
        return {"admitted": self.take_admissions(), "compared": [] if self._checker is None else self._checker.take_results()}

    def _get_nodes(self, pool: str) -> tuple[Node, ...]:
        """Return the current nodes of a pool."""
        return self.selector.members.get_nodes(pool)

    def _make_trace_id(self) -> str:
        return self.context.ids.make(self.context.clock.wall())

    def snapshot(self) -> dict[str, object]:
        """Return the numbers for the admin page: nested, so that they add up over processes."""
        return {
            "exchanges": {"open": len(self.context.live)},
            "queue": self._waiting.snapshot(),
            "route_cache": {"hits": self.selector.cache.hits, "misses": self.selector.cache.misses},
            "nodes": {node: {"tokens_in_use": tokens} for node, tokens in self.selector.load.tokens_in_flight().items()},
        }

    async def _renew_leases(self) -> None:
        """Renew leases in small groups: thousands at once would delay decisions and overfill the link to Redis."""
        context = self.context
        held = list(context.live.items())
        for start in range(0, len(held), _RENEWED_AT_ONCE):
            for request_id, tenant in held[start : start + _RENEWED_AT_ONCE]:
                if request_id in context.live:
                    self._background.start(context.ledger.renew(tenant, request_id, context.lease_ms))
            await asyncio.sleep(_BETWEEN_RENEWALS_S)
