"""The registry over gRPC, `din.v1.NodeRegistry`: one of the services that either transport carries.

Rule: messages are turned into forms and back here; whatever is decided is decided as for HTTP.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from google.protobuf.message import DecodeError, Message
from msgspec.structs import asdict

from din_extproc._proto.din.v1 import registry_pb2 as pb
from din_extproc.domain.membership import Heartbeat, InstanceLoad, Member, ModelInstance, NodeState
from din_extproc.edge.grpc.services import CallHandler, OpenCall, ServerCall
from din_extproc.edge.registry.auth import RegistryAuth, RegistryError, RegistryErrorCode, to_registry_error
from din_extproc.edge.registry.forms import NodeForm
from din_extproc.edge.registry.registrar import Registrar
from din_extproc.registry.row import RegistryDenial
from din_extproc.registry.table import NodeEvent

Start = Callable[[Coroutine[Any, Any, None]], None]
Handle = Callable[[Any, str, frozenset[str]], Coroutine[Any, Any, Message | RegistryError]]

_STATES = {
    NodeState.LOADING: pb.NODE_STATE_LOADING,
    NodeState.READY: pb.NODE_STATE_READY,
    NodeState.DRAINING: pb.NODE_STATE_DRAINING,
    NodeState.QUARANTINED: pb.NODE_STATE_QUARANTINED,
    NodeState.DEAD: pb.NODE_STATE_DEAD,
}
_STATE_BY_NUMBER = {number: state for state, number in _STATES.items()}
_LOAD = (
    "waiting",
    "running",
    "kv_cache_usage",
    "tokens_in_use",
    "prefill_rate",
    "decode_rate",
    "free_memory_bytes",
    "adapter_slots",
    "cached_share",
)
_DEFAULTS = {"tp_world_size": 1, "max_concurrency": 64}
"""Values of fields that are 0."""


class NodeRegistryService:
    """The service.

    Args:
        auth: What it stands behind.
        start: Runs a coroutine in the background.
    """

    name = "din.v1.NodeRegistry"

    def __init__(self, auth: RegistryAuth, start: Start) -> None:
        self._auth = auth
        self._start = start
        self._watches: set[_RegistryWatchCall] = set()

    def methods(self) -> Mapping[str, OpenCall]:
        """By name."""
        unary: dict[str, tuple[type[Message], Handle]] = {
            "Register": (pb.RegisterRequest, self._register),
            "Heartbeat": (pb.HeartbeatRequest, self._heartbeat),
            "Drain": (pb.DrainRequest, self._drain),
            "Deregister": (pb.DeregisterRequest, self._deregister),
        }
        takes: dict[str, OpenCall] = {name: self._unary(kind, handle) for name, (kind, handle) in unary.items()}
        return {**takes, "Watch": lambda call: _RegistryWatchCall(call, self._auth, self._watches)}

    async def drain(self) -> None:
        """Every watch ends."""
        for watch in list(self._watches):
            watch.close()

    def _unary(self, kind: type[Message], handle: Handle) -> OpenCall:
        return lambda call: _RegistryCall(call, kind, handle, self._start)

    async def _register(self, request: pb.RegisterRequest, authorization: str, names: frozenset[str]) -> Message | RegistryError:
        stopped = self._auth.find_denial(authorization, names, request.node.id)
        if stopped is not None:
            return stopped
        outcome = await self._auth.register(_make_form(request.node))
        if isinstance(outcome, RegistryError):
            return outcome
        registrar = self._auth.registrar
        response = pb.RegisterResponse(lease=outcome.lease, warnings=outcome.warnings)
        response.heartbeat_interval.FromMilliseconds(round(registrar.heartbeat_s * 1000))
        response.dead_after.FromMilliseconds(round(registrar.dead_after_s * 1000))
        return response

    async def _heartbeat(self, request: pb.HeartbeatRequest, authorization: str, names: frozenset[str]) -> Message | RegistryError:
        stopped = self._auth.find_denial(authorization, names, request.node_id)
        if stopped is not None:
            return stopped
        beat = request.beat
        state = _STATE_BY_NUMBER.get(beat.state)
        if state is None:
            return RegistryError(RegistryErrorCode.INVALID, "the beat's state is not given")
        load = {name: getattr(beat, name) for name in _LOAD if beat.HasField(name)}
        outcome = await self._auth.registrar.heartbeat(
            request.node_id,
            request.lease,
            Heartbeat(
                state=state,
                sequence=beat.sequence,
                reason=beat.reason,
                instances=_queues(beat),
                adapters=tuple(beat.adapters.names) if beat.HasField("adapters") else None,
                active_adapters=tuple(beat.active_adapters),
                **load,
            ),
        )
        return to_registry_error(outcome) if isinstance(outcome, RegistryDenial) else pb.HeartbeatResponse(drain=outcome.draining)

    async def _drain(self, request: pb.DrainRequest, authorization: str, names: frozenset[str]) -> Message | RegistryError:
        stopped = self._auth.find_denial(authorization, names, request.node_id)
        if stopped is not None:
            return stopped
        outcome = await self._auth.registrar.drain(request.node_id, request.reason, request.lease)
        return to_registry_error(outcome) if isinstance(outcome, RegistryDenial) else pb.DrainResponse()

    async def _deregister(self, request: pb.DeregisterRequest, authorization: str, names: frozenset[str]) -> Message | RegistryError:
        stopped = self._auth.find_denial(authorization, names, request.node_id)
        if stopped is not None:
            return stopped
        outcome = await self._auth.registrar.deregister(request.node_id, request.reason, request.lease)
        return pb.DeregisterResponse() if outcome is None else to_registry_error(outcome)


class _RegistryCall:
    """One question, one answer."""

    __slots__ = ("_call", "_handle", "_kind", "_received", "_start")

    def __init__(self, call: ServerCall, kind: type[Message], handle: Handle, start: Start) -> None:
        self._call = call
        self._kind = kind
        self._handle = handle
        self._start = start
        self._received = False

    def message(self, data: bytes) -> None:
        self._received = True
        try:
            request = self._kind.FromString(data)
        except DecodeError:
            self._call.fail(RegistryErrorCode.INVALID.grpc_status, f"not a {self._kind.__name__}")
            return
        self._start(self._answer(request))

    async def _answer(self, request: Message) -> None:
        answer = await self._handle(request, self._call.authorization, self._call.names)
        if isinstance(answer, RegistryError):
            self._call.fail(answer.code.grpc_status, answer.reason)
        else:
            self._call.send(answer.SerializeToString())
            self._call.finish()

    def ended(self, *, cancelled: bool) -> None:
        """Nothing is held. A peer that closes its half without a question gets an answer all the same."""
        if not cancelled and not self._received:
            self._call.fail(RegistryErrorCode.INVALID.grpc_status, f"no {self._kind.__name__} was sent")


class _RegistryWatchCall(CallHandler):
    """Sends every node, then each change, until the client disconnects or the server drains."""

    def __init__(self, call: ServerCall, auth: RegistryAuth, watches: set["_RegistryWatchCall"]) -> None:
        self._call = call
        self._auth = auth
        self._watches = watches
        self._model = ""

    @property
    def _registrar(self) -> Registrar:
        return self._auth.registrar

    def message(self, data: bytes) -> None:
        stopped = self._auth.find_denial(self._call.authorization, self._call.names)
        if stopped is not None:
            self._call.fail(stopped.code.grpc_status, stopped.reason)
            return
        try:
            self._model = pb.WatchRequest.FromString(data).model
        except DecodeError:
            self._call.fail(RegistryErrorCode.INVALID.grpc_status, "not a WatchRequest")
            return
        self._send_members(self._registrar.get_members(), complete=True)
        self._watches.add(self)
        self._registrar.watchers.add(self._on_changed)

    def ended(self, *, cancelled: bool) -> None:
        if cancelled:
            self._forget()

    def close(self) -> None:
        """End the call from this side."""
        self._forget()
        self._call.finish()

    def _forget(self) -> None:
        self._watches.discard(self)
        self._registrar.watchers.discard(self._on_changed)

    def _on_changed(self, events: list[NodeEvent]) -> None:
        self._send_members([event.member for event in events], complete=False)

    def _send_members(self, members: list[Member], *, complete: bool) -> None:
        wanted = [member for member in members if self._model in {"", member.registration.node.model}]
        if wanted or complete:
            self._call.send(pb.WatchResponse(complete=complete, nodes=map(_make_status, wanted)).SerializeToString())


def _make_form(node: pb.Node) -> NodeForm:
    fields = {name: getattr(node, name) or _DEFAULTS.get(name, getattr(node, name)) for name in NodeForm.__struct_fields__}
    if not node.HasField("free_memory_bytes"):
        fields["free_memory_bytes"] = None
    fields["instances"] = tuple(ModelInstance(each.model, each.version, each.max_concurrency) for each in node.instances)
    return NodeForm(**fields)


def _queues(beat: pb.Beat) -> tuple[InstanceLoad, ...]:
    return tuple(
        InstanceLoad(each.model, **{name: getattr(each, name) for name in ("waiting", "running") if each.HasField(name)})
        for each in beat.instances
    )


def _make_status(member: Member) -> pb.NodeStatus:
    form = NodeForm.of(member.registration)
    fields = {name: value for name in form.__struct_fields__ if (value := getattr(form, name)) is not None}
    node = pb.Node(**fields | {"instances": [pb.ModelInstance(**asdict(each)) for each in form.instances]})
    status = pb.NodeStatus(node=node, state=_STATES[member.state], trust=member.trust, reasons=member.reasons, stale=member.stale)
    if member.beat is not None:
        load = {name: value for name in _LOAD if (value := getattr(member.beat, name)) is not None}
        beat = pb.Beat(state=_STATES[member.beat.state], sequence=member.beat.sequence, reason=member.beat.reason, **load)
        for each in member.beat.instances:
            beat.instances.add(**{name: value for name, value in asdict(each).items() if value is not None})
        beat.active_adapters.extend(member.beat.active_adapters)
        if member.beat.adapters is not None:
            beat.adapters.names.extend(member.beat.adapters)
            beat.adapters.SetInParent()
        status.beat.CopyFrom(beat)
    if member.beat_at is not None:
        status.last_heartbeat.FromMilliseconds(round(member.beat_at * 1000))
    return status
