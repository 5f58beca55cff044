"""Agent of one node: monitors the engine, keeps the node registered, and sends heartbeats.

Invariant: a change of state is reported at once, everything else with the next heartbeat; a lost lease leads to a new registration.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import asdict, replace

from din_extproc.domain.membership import Heartbeat, ModelInstance, NodeState, Registration
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.node.engine_probe import EngineProbe, EngineStatus
from din_extproc.edge.node.memory import free_memory_bytes
from din_extproc.edge.registry.client import RegistrationLease, RegistrationRefused, RegistryClient, RegistryUnreachable
from din_extproc.flow.node_condition import NodeCondition
from din_extproc.southbound.load import add_adapters, add_load

_log = logging.getLogger(__name__)

_FRESH_S = 0.2
_MEMORY_EVERY_S = 30.0
_SETTLE_S = 1.0
"""Time after a drain call in which requests may still arrive."""
_POLL_S = 0.1
_LONGEST_PAUSE_S = 30.0
_LONGEST_REASON = 300
_MOST_OTHERS = 64
"""Models beside the node's own that it registers."""


class EnvoyLoad(Struct, frozen=True):
    """Requests in the Envoy in front of the engine."""

    in_flight: int
    waiting: int
    """Requests of these that wait in the batch window."""


class NodeAgent:
    """Agent of one node.

    Args:
        registration: Registration of the node. Its epoch is the start of the agent: of two agents with one id, the later one stays
            registered.
        engine_url: URL of the engine's HTTP interface.
        served_model: Model name that the engine must list.
        probe: Queries the engine.
        client: Calls the registry.
        held: Returns the load of the Envoy in front. None: no Envoy.
        all_models: Whether the other models that the engine lists are registered, too.
    """

    def __init__(
        self,
        registration: Registration,
        engine_url: str,
        served_model: str,
        probe: EngineProbe,
        client: RegistryClient,
        held: Callable[[], EnvoyLoad] | None,
        *,
        all_models: bool = False,
    ) -> None:
        self.registration = registration
        self.condition = NodeCondition()
        self.look = EngineStatus(at=0.0)
        self._engine = engine_url, served_model
        self._all_models = all_models
        self._outdated = False
        """The registry knows other models than the registration has."""
        self._probe = probe
        self._client = client
        self._held = held
        self._lease: RegistrationLease | None = None
        self._sequence = 0
        self._memory: tuple[float, int | None] | None = None
        self._looking, self._reporting = asyncio.Lock(), asyncio.Lock()
        self._complaint = ""
        self._drain_requested = False
        self._refusals, self._again_at = 0, 0.0

    @property
    def registered(self) -> bool:
        """Return whether the last known registration is valid."""
        return self._lease is not None

    @property
    def in_flight(self) -> int:
        """Return the number of requests in flight, from the Envoy in front or else from the engine."""
        if self._held is not None:
            return self._held().in_flight
        return (self.look.load.running or 0) + (self.look.load.waiting or 0)

    def on_verified(self, sha256: str) -> None:
        """Set the digest of the weights."""
        self.registration = replace(self.registration, weights_sha256=sha256)

    async def watch(self) -> None:
        """Query the engine and report a change of state at once."""
        if await self.refresh(0.0):
            await self.report()

    async def refresh(self, age_s: float) -> bool:
        """Query the engine unless the last status is at most `age_s` old. Return whether state, reason or models changed."""
        async with self._looking:
            if self.look.at and SystemClock.monotonic() - self.look.at <= age_s:
                return False
            self.look = await self._probe.check_health(*self._engine)
            before, self.condition = self.condition, self.condition.with_reading(self.look.problem, slow=self.look.slow)
            others = self._all_models and self._find_other_models()
        if (before.state, before.reason) != (self.condition.state, self.condition.reason):
            _log.info("%s is %s: %s", self.registration.node.id, self.condition.state.value, self.condition.reason or "the engine answers")
            return True
        return others

    def _find_other_models(self) -> bool:
        """Take over which other models the engine lists. Return whether they changed: then the node registers anew."""
        if self.look.problem or self.look.names is None:
            return False
        found = tuple(map(ModelInstance, sorted(self.look.names.models - {self._engine[1]})[:_MOST_OTHERS]))
        if found == self.registration.instances:
            return False
        _log.info("%s also serves %s", self.registration.node.id, ", ".join(each.model for each in found) or "no other model")
        self.registration, self._outdated = replace(self.registration, instances=found), True
        return True

    async def report(self) -> None:
        """Register if necessary, then send a heartbeat."""
        async with self._reporting:
            try:
                if (self._lease is None or self._outdated) and not await self._register() and self._lease is None:
                    return
                await self._heartbeat()
            except RegistryUnreachable as error:
                self._log_complaint(f"no registry can be told: {error}")

    async def drain(self, reason: str, wait_s: float) -> None:
        """Drain the node, wait at most `wait_s` for requests in flight, and deregister."""
        self._drain_requested, self.condition = False, self.condition.with_drain(reason)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.report()
        await self._leave("drain", reason)
        while loop.time() < began + wait_s and (self.in_flight or loop.time() < began + min(_SETTLE_S, wait_s)):
            await asyncio.sleep(_POLL_S)
            await self.refresh(_POLL_S)
        if self.in_flight:
            _log.warning("%d requests have not ended after %g s", self.in_flight, wait_s)
        async with self._reporting:
            await self._leave("deregister", reason)
            self._lease = None

    async def get_health(self) -> tuple[bool, Mapping[str, object]]:
        """Return whether the node accepts requests, and the body of `/health` with the current queue."""
        if self.look.at:
            await self.refresh(_FRESH_S)
        node, beat = self.registration.node, self._now()
        report = {
            "node_id": node.id,
            "model": node.model,
            "version": node.version,
            "state": self.condition.state.value,
            "reason": self.condition.reason,
            "registered": self.registered,
            "waiting": beat.waiting,
            "running": beat.running,
            "kv_cache_usage": beat.kv_cache_usage,
            "tokens_in_use": beat.tokens_in_use,
            "in_flight": self.in_flight,
            "instances": [asdict(each) for each in beat.instances],
        }
        return self.condition.state is NodeState.READY, report

    def _now(self) -> Heartbeat:
        reason = "".join(filter(str.isprintable, self.condition.reason))[:_LONGEST_REASON]
        own = Heartbeat(state=self.condition.state, sequence=self._sequence, reason=reason)
        beat = add_load(self.look.load, self.look.rates, add_adapters(self.look.names, self.registration.engine, own))
        named = {each.model for each in self.registration.instances} | {self.registration.node.model}
        queues = [replace(each, model=self.registration.node.model) if each.model == self._engine[1] else each for each in beat.instances]
        beat = replace(beat, instances=tuple(each for each in queues if each.model in named) if self.registration.instances else ())
        if self._held is None:
            return beat
        held = self._held()
        running = held.in_flight - held.waiting if beat.running is None else beat.running
        return replace(beat, running=running, waiting=(beat.waiting or 0) + held.waiting)

    async def _register(self) -> bool:
        """Register the node. A node that is not ready registers too, so that its reason is visible."""
        now = SystemClock.monotonic()
        if self.condition.state is NodeState.DRAINING or now < self._again_at:
            return False
        self.registration = replace(self.registration, free_memory_bytes=await self._free_memory())
        sent = self.registration
        reply = await self._client.register(sent)
        if isinstance(reply, RegistrationRefused):
            self._refusals += 1
            self._again_at = now + min(2.0**self._refusals, _LONGEST_PAUSE_S)
            self._log_complaint(f"the registry refuses the node: {reply.reason}")
            return False
        self._lease, self._sequence, self._refusals, self._complaint = reply, 0, 0, ""
        self._outdated = self.registration.instances != sent.instances
        _log.info("%s is registered", self.registration.node.id)
        for warning in reply.warnings:
            _log.warning("%s", warning)
        return True

    async def _heartbeat(self) -> None:
        assert self._lease is not None  # noqa: S101 - called only with a lease
        self._sequence += 1
        beat = replace(self._now(), free_memory_bytes=await self._free_memory())
        reply = await self._client.heartbeat(self.registration.node.id, self._lease.lease, beat)
        if isinstance(reply, RegistrationRefused):
            self._log_complaint(f"the registry refuses a heartbeat: {reply.reason}")
            if reply.unknown:
                self._lease = None
                if await self._register():
                    await self._heartbeat()
            return
        self._complaint = ""
        if reply.drain and self.condition.state is not NodeState.DRAINING:
            self._drain_requested, self.condition = True, self.condition.with_drain("the registry asked for it")
        elif self._drain_requested and not reply.drain:
            self._drain_requested, self.condition = False, self.condition.with_undrain()

    async def _leave(self, how: str, reason: str) -> None:
        if self._lease is None:
            return
        leave = self._client.drain if how == "drain" else self._client.deregister
        try:
            reply = await leave(self.registration.node.id, self._lease.lease, reason)
        except RegistryUnreachable as error:
            _log.warning("can't %s: %s", how, error)
            return
        if isinstance(reply, RegistrationRefused):
            _log.warning("can't %s: %s", how, reply.reason)

    async def _free_memory(self) -> int | None:
        now = SystemClock.monotonic()
        if self._memory is None or now - self._memory[0] > _MEMORY_EVERY_S:
            self._memory = now, await free_memory_bytes()
        return self._memory[1]

    def _log_complaint(self, complaint: str) -> None:
        """Log a problem once, not with every heartbeat."""
        if complaint != self._complaint:
            _log.warning("%s", complaint)
        self._complaint = complaint
