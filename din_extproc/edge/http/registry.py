"""Registry API over HTTP and JSON.

    POST   /v1/nodes                  register: {"id", "address", "model", "version", "dtype", "engine", "max_seq_len", ...}
    POST   /v1/nodes/{id}/heartbeat   {"lease", "sequence", "state", "waiting", "running", ...}
    POST   /v1/nodes/{id}/drain       {"reason", "lease"}, both optional
    DELETE /v1/nodes/{id}             the same
    GET    /v1/nodes                  every node

Invariant: an error is a problem document whose `detail` names the remedy.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from din_extproc.edge.http.port import HttpPort, HttpProblem
from din_extproc.edge.registry.auth import RegistryAuth, RegistryError, RegistryErrorCode, to_registry_error
from din_extproc.edge.registry.forms import BeatForm, LeaveForm, MemberForm, NodeForm
from din_extproc.edge.tls import names_of
from din_extproc.registry.row import RegistryDenial

_LONGEST_BODY = 64 * 1024
_EMPTY = b"{}"
Form = TypeVar("Form", NodeForm, BeatForm, LeaveForm)


class _LeaseReply(Struct, frozen=True):
    """Response to a registration."""

    lease: str
    heartbeat_s: float
    dead_after_s: float
    warnings: tuple[str, ...]


class _HeartbeatReply(Struct, frozen=True):
    """Response to a heartbeat."""

    drain: bool


class _NodeList(Struct, frozen=True):
    """Response to a list request."""

    nodes: list[MemberForm]
    stale: bool


class RegistryHttp:
    """HTTP handlers of the registry; `port` serves them."""

    def __init__(self, auth: RegistryAuth) -> None:
        self._auth = auth
        routes = [
            web.post("/v1/nodes", _answer_errors(self._register)),
            web.get("/v1/nodes", _answer_errors(self._list_nodes)),
            web.post("/v1/nodes/{id}/heartbeat", _answer_errors(self._heartbeat)),
            web.post("/v1/nodes/{id}/drain", _answer_errors(self._drain)),
            web.delete("/v1/nodes/{id}", _answer_errors(self._deregister)),
        ]
        self.port = HttpPort(routes, max_body_bytes=_LONGEST_BODY)

    async def _register(self, request: web.Request) -> object:
        form = await self._read_form(request, NodeForm)
        if isinstance(form, RegistryError):
            return form
        stopped = self._find_denial(request, form.id)
        if stopped is not None:
            return stopped
        outcome = await self._auth.register(form)
        if isinstance(outcome, RegistryError):
            return outcome
        registrar = self._auth.registrar
        return _LeaseReply(outcome.lease, registrar.heartbeat_s, registrar.dead_after_s, outcome.warnings)

    async def _heartbeat(self, request: web.Request) -> object:
        form = await self._read_form(request, BeatForm)
        if isinstance(form, RegistryError):
            return form
        outcome = await self._auth.registrar.heartbeat(request.match_info["id"], form.lease, form.to_heartbeat())
        return to_registry_error(outcome) if isinstance(outcome, RegistryDenial) else _HeartbeatReply(outcome.draining)

    async def _drain(self, request: web.Request) -> object:
        form = await self._read_form(request, LeaveForm)
        if isinstance(form, RegistryError):
            return form
        outcome = await self._auth.registrar.drain(request.match_info["id"], form.reason, form.lease)
        return to_registry_error(outcome) if isinstance(outcome, RegistryDenial) else {}

    async def _deregister(self, request: web.Request) -> object:
        form = await self._read_form(request, LeaveForm)
        if isinstance(form, RegistryError):
            return form
        outcome = await self._auth.registrar.deregister(request.match_info["id"], form.reason, form.lease)
        return {} if outcome is None else to_registry_error(outcome)

    async def _list_nodes(self, request: web.Request) -> object:
        stopped = self._find_denial(request)
        if stopped is not None:
            return stopped
        registrar = self._auth.registrar
        now = registrar.get_now()
        nodes = [MemberForm.of(member, registrar.table.get_pools(member.registration.node.id), now) for member in registrar.get_members()]
        return _NodeList(nodes, registrar.table.stale)

    def _find_denial(self, request: web.Request, node_id: str | None = None) -> RegistryError | None:
        names = names_of(request.get_extra_info("peercert"))
        return self._auth.find_denial(request.headers.get("authorization", ""), names, node_id)

    async def _read_form(self, request: web.Request, kind: type[Form]) -> Form | RegistryError:
        """Parse the request body after checking that the caller may act for the node in the path, if there is one."""
        stopped = self._find_denial(request, request.match_info.get("id"))
        if stopped is not None:
            return stopped
        try:
            return msgspec.json.decode(await request.read() or _EMPTY, type=kind)
        except msgspec.DecodeError as error:
            return RegistryError(RegistryErrorCode.INVALID, str(error))


def _answer_errors(handle: Callable[[web.Request], Awaitable[object]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Wrap a handler: encode its result as JSON and a `RegistryError` as a problem document."""

    async def respond(request: web.Request) -> web.Response:
        answer = await handle(request)
        if not isinstance(answer, RegistryError):
            return web.Response(body=msgspec.json.encode(answer) + b"\n", content_type="application/json")
        code = answer.code
        kind = f"urn:din-extproc:registry:{code.code}"
        return HttpProblem(type=kind, title=code.title, status=code.status, detail=answer.reason, code=code.code).response()

    return respond
