"""The two halves of a sidecar as they run in a process: the request plane, and the accounting plane.

Rule: either can run alone. What they share crosses processes: the counters in Redis, and lessons.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.admit.ledger import Ledger
from din_extproc.admit.queue import Queue
from din_extproc.admit.reservation import Mark, OutputHistory
from din_extproc.audit.records import Admitted
from din_extproc.domain.health import Standings
from din_extproc.domain.membership import Reading, Turnover
from din_extproc.domain.node import Node
from din_extproc.domain.usage import ExchangeRecord, FailedAttempt, Outcome, Pace
from din_extproc.edge.audit.gate import AuditGate
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.double_check import Checker
from din_extproc.edge.probe.envoy_admin import DroppedLogs
from din_extproc.edge.telemetry.counters import Counters
from din_extproc.edge.waiting_room import WaitingRoom
from din_extproc.flow.double_check import CheckSampler
from din_extproc.flow.gauges import Gauges
from din_extproc.flow.members import Members
from din_extproc.flow.place import Placer
from din_extproc.flow.request import Desk
from din_extproc.flow.settle import Observer, Settler
from din_extproc.flow.trace import Sampler, TraceIds
from din_extproc.flow.view import NO_COMMONS, TokenCounter
from din_extproc.intent.calibration import Calibration
from din_extproc.observe.accesslog import records
from din_extproc.observe.mixture import Mixture
from din_extproc.roles.health import Health
from din_extproc.roles.permits import Permits
from din_extproc.roles.view import half_lives_s, make_view, node_names, node_number
from din_extproc.schedule.load import Load
from din_extproc.schedule.pace import Paces
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_SEED_BITS = 64
_MS = 1000
_RETRY_S = 0.5
_LOOK_S = 1.0
_CHECK_S = 0.5
_ASK_S = 5.0
_REMEMBERED_NODES = 50_000
_FAULTS = frozenset({Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_TRUNCATED})
"""Outcomes that speak against the node."""
_RENEWALS_PER_LEASE = 3
_RENEWED_AT_ONCE = 64
_BETWEEN_RENEWALS_S = 0.005


class Lessons(Struct, frozen=True):
    """What finished exchanges taught, since it was last asked."""

    prompts: dict[str, Calibration]
    """By physical model."""
    outputs: tuple[Mark, ...]
    paces: tuple[Pace, ...]
    """How quick nodes are."""

    def __bool__(self) -> bool:
        return bool(self.prompts or self.outputs or self.paces)


class News(Struct, frozen=True):
    """What the process that keeps the accounts tells a worker."""

    lessons: Lessons | None = None
    turnover: Turnover | None = None
    readings: dict[str, Reading] = {}
    shut: bool | None = None
    """Requests may (False) or may not be taken, for the audit log's sake; None: as before."""
    configuration: str = ""
    """The fingerprint of the one that is in use now: Envoys know its pools."""
    standings: Standings | None = None
    """Of breakers that changed."""


class _Silence:
    """The bell of counters that no other process shares."""

    def want(self, tenant: str, lasting_ms: int) -> None:
        """Nothing is to be heard."""

    def granted(self, tenant: str, cost: float) -> None:
        """Nobody else is to be told."""


class RequestPlane:
    """Decides about requests. Its `desk` is the conductor of ext_proc streams."""

    def __init__(
        self, settings: Settings, ledger: Ledger, background: Background, counters: Counters, waiting: WaitingRoom | None = None
    ) -> None:
        view = make_view(settings, {})
        if waiting is None:
            waiting = WaitingRoom(ledger, _Silence(), lambda: True, SystemClock.monotonic_ms, background.start, Queue())
        self._one_script = settings.store.one_script
        self.gauges = Gauges(view.table.preferred)
        self.outputs = OutputHistory()
        self.desk = Desk(
            view=view,
            ledger=ledger,
            placer=Placer(Load(), Members.of(settings.pools)),
            gauges=self.gauges,
            outputs=self.outputs,
            ids=TraceIds(node_number(settings), secrets.randbits(_SEED_BITS)),
            clock=SystemClock(),
            watcher=counters,
            start=background.start,
            lease_ms=settings.store.lease_ms,
            waiting=waiting,
            sampler=None if settings.telemetry is None else Sampler(settings.telemetry.sample),
            admissions=None if settings.audit is None else [],
        )
        authz = settings.gateway.ext_authz
        self.permits = None if authz is None else Permits(self.desk, authz.longest_s)
        """For Envoys that only ask whether a request may pass."""
        self._checker: Checker | None = None
        if settings.verification is not None:
            self.desk.checks = CheckSampler(settings.verification.policy(settings.gateway.workers))
            self._checker = Checker(self.desk.checks, self._nodes, self._trace_id)
        self._waiting = waiting
        self._patience_s = 0.0
        if settings.audit is not None and settings.audit.section.on_full == "block":
            self._patience_s = settings.audit.section.block_ms / _MS
        self._gate: AuditGate | None = None
        self._background = background
        self._moves = self.desk.placer.moves = settings.in_flight

    def start(self) -> None:
        """Renew the leases of what runs, from now on."""
        if self.permits is not None:
            self.permits.start(self._background)
        self._background.every(self.desk.lease_ms / 1000 / _RENEWALS_PER_LEASE, "renewing leases", self._renew)
        if self._checker is not None:
            self._background.every(_CHECK_S, "asking nodes once more", self._checker.work)

    def use(self, settings: Settings, tokenizers: Mapping[str, TokenCounter]) -> None:
        """Decide by this configuration from the next request on."""
        view = make_view(settings, tokenizers)
        if not self._one_script and view.commons is not NO_COMMONS:
            _log.warning("`limits` of all tenants together are not counted before the next start, for `store.one_slot` is read only then")
            view = replace(view, commons=NO_COMMONS)
        self.desk.change(view, self.desk.placer.members.under(settings.pools))
        moves = settings.in_flight
        self.desk.placer.moves = moves if settings.gateway.xds is not None else moves.among(self._moves)  # Envoy knows what it began with

    def turn(self, turnover: Turnover) -> None:
        """Registered nodes came or went."""
        self.desk.change_members(self.desk.placer.members.after(turnover))

    def hear(self, readings: Mapping[str, Reading]) -> None:
        """Nodes have said how they do."""
        for node_id, reading in readings.items():
            self.desk.placer.hear(node_id, reading)

    def judge(self, standings: Standings) -> None:
        """Breakers opened or closed."""
        self.desk.placer.judge(standings)

    def adopt(self, lessons: Lessons) -> None:
        """Know what was learned elsewhere."""
        self.gauges.adopt(lessons.prompts)
        self.outputs.adopt(lessons.outputs)
        self.desk.placer.learn(lessons.paces)

    def shut(self, *, shut: bool) -> None:
        """Take no requests, or take them again."""
        before, self._gate = self._gate, AuditGate(self._patience_s) if shut else None
        self.desk.gate = self._gate
        if before is not None:
            before.open()

    def admissions(self) -> list[Admitted]:
        """Requests that were sent on since this was last asked."""
        taken = self.desk.admissions
        if not taken:
            return []
        self.desk.admissions = []
        return taken

    def to_record(self) -> dict[str, list[Any]]:
        """What the accounts have to hear, since this was last asked: requests that were sent on, and double checks."""
        return {"admitted": self.admissions(), "compared": [] if self._checker is None else self._checker.found()}

    def _nodes(self, pool: str) -> tuple[Node, ...]:
        """The pool's nodes now: `members` is another one after each change."""
        return self.desk.placer.members.nodes(pool)

    def _trace_id(self) -> str:
        return self.desk.ids.make(self.desk.clock.wall())

    def shown(self) -> dict[str, object]:
        """For the admin page: nested numbers, which add up over processes."""
        placer = self.desk.placer
        return {
            "exchanges": {"open": len(self.desk.live)},
            "queue": self._waiting.shown(),
            "route_cache": {"hits": placer.cache.hits, "misses": placer.cache.misses},
            "nodes": {node: {"tokens_in_use": tokens} for node, tokens in placer.in_use().items()},
        }

    async def _renew(self) -> None:
        """A few at a time: thousands at once would hold up decisions, and the link to Redis takes only so many."""
        desk = self.desk
        held = list(desk.live.items())
        for start in range(0, len(held), _RENEWED_AT_ONCE):
            for request_id, tenant in held[start : start + _RENEWED_AT_ONCE]:
                if request_id in desk.live:
                    self._background.start(desk.ledger.renew(tenant, request_id, desk.lease_ms))
            await asyncio.sleep(_BETWEEN_RENEWALS_S)


class AccountingPlane:
    """Settles finished exchanges, and learns from them.

    Args:
        settings: The configuration.
        ledger: The counters.
        background: Runs the settling.
        observer: Told of every exchange and of attempts that failed.
        gauges: What prompts teach.
        outputs: What answers teach.
        health: Told what becomes of requests.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        background: Background,
        observer: Observer,
        gauges: Gauges,
        outputs: OutputHistory,
        health: Health,
    ) -> None:
        self._health = health
        self._observer = observer
        self._nodes = node_names(settings)
        self._described = {node.id: node for pool in settings.pools for node in pool.nodes}
        self._background = background
        self._gauges = gauges
        self._outputs = outputs
        self._paces = Paces(half_lives_s(settings))
        self.settler = Settler(ledger, gauges, outputs, observer)
        self._registered: dict[str, str] = {}
        """Node id by endpoint; of those that left, too: their last entries come later."""
        self._tallies: dict[str, tuple[int, int]] = {}
        self._envoy = DroppedLogs(settings.envoy.admin)
        self._unreadable = 0
        self.mixture = Mixture()

    def start(self) -> None:
        """Settle again and again what could not be settled at once."""
        self._background.every(_RETRY_S, "settling what waits", self._retry)
        self._background.every(_LOOK_S, "looking for mixed dtypes", self._look)
        self._background.every(_ASK_S, "asking Envoy what it dropped", self._envoy.ask)

    def use(self, settings: Settings) -> None:
        """Know the nodes of this configuration."""
        self._nodes = self._registered | node_names(settings)
        self._described |= {node.id: node for pool in settings.pools for node in pool.nodes}
        self._paces.half_lives_s = half_lives_s(settings)

    def turn(self, turnover: Turnover) -> None:
        """Registered nodes came or went."""
        for nodes in turnover.joined.values():
            for node in nodes:
                self._registered.pop(str(node.endpoint), None)  # the newest stand last
                self._registered[str(node.endpoint)] = node.id
                self._nodes[str(node.endpoint)] = node.id
                self._described[node.id] = node
        while len(self._registered) > _REMEMBERED_NODES:
            endpoint = next(iter(self._registered))
            self._nodes.pop(endpoint, None)
            self._described.pop(self._registered.pop(endpoint), None)

    def tallies(self) -> dict[str, tuple[int, int]]:
        """Requests that nodes answered and that failed at them, since this was last asked."""
        tallies, self._tallies = self._tallies, {}
        return tallies

    def received(self, message: bytes) -> None:
        """Take one message of Envoy's access log."""
        try:
            finished = records(message, self._nodes, self._described)
        except ValueError:
            self._unreadable += 1
            _log.warning("an access log message of %d bytes could not be read", len(message))
            return
        self._background.trickle(finished, self._finished)

    def lessons(self) -> Lessons:
        """What was learned since this was last asked."""
        return Lessons(self._gauges.changed(), self._outputs.changed(), self._paces.changed())

    def shown(self) -> dict[str, object]:
        """For the admin page."""
        settler = self.settler
        return {
            "exchanges": {"unsettled": settler.waiting, "given_up": settler.dropped, "unknown": settler.unknown},
            "access_logs": {"unreadable": self._unreadable, "dropped": self._envoy.total},
            "mixed_dtype_share": self.mixture.shares(),
        }

    def _finished(self, record: ExchangeRecord | FailedAttempt) -> None:
        now = SystemClock.monotonic()
        if isinstance(record, FailedAttempt):
            self._health.attempt_failed(record, now)
            self._observer.attempt_failed(record)
            return
        self._health.finished(record, now)
        self._paces.learn(record, now)
        self._tally(record)
        self._background.start(self.settler.settle(record))

    def _tally(self, record: ExchangeRecord) -> None:
        """What the exchange says of its node."""
        failed = record.outcome in _FAULTS
        if not record.node_id or not (failed or record.outcome is Outcome.COMPLETED):
            return
        answers, failures = self._tallies.get(record.node_id, (0, 0))
        self._tallies[record.node_id] = (answers + (not failed), failures + failed)
        node = self._described.get(record.node_id)
        if node is not None and not failed:
            self.mixture.count(record.model, node.dtype)

    async def _look(self) -> None:
        for alarm in self.mixture.look(SystemClock.monotonic()):
            names = ", ".join(alarm.dtypes)
            if alarm.mixed:
                _log.warning("%.1f %% of the answers of %s are not in its commonest dtype (%s)", 100 * alarm.share, alarm.model, names)
            else:
                _log.info("%s is answered in one dtype again (%s)", alarm.model, alarm.dtypes[0])

    async def _retry(self) -> None:
        if self.settler.waiting:
            await self.settler.retry()
