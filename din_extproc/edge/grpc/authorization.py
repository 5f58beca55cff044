"""`envoy.service.auth.v3.Authorization`: one question, one answer, whichever transport carries them."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import ImmediateResponse, Verdict
from din_extproc.edge.grpc.services import CallHandler, ServerCall, Take
from din_extproc.edge.grpc.session import INTERNAL, INVALID_ARGUMENT
from din_extproc.edge.inline_task import InlineTask
from din_extproc.wire.check import decode_check, encode_check
from din_extproc.wire.events import ProtocolError


class CheckHandler(Protocol):
    """Decides about one request of a proxy that only asks."""

    def decide(self, head: RequestHead, body: bytes) -> Coroutine[Any, Any, Verdict]:
        """Return whether the request may pass (an `async def`). Called at most once; cancelled when the proxy does not wait any more."""

    def failed(self, error: BaseException) -> ImmediateResponse:
        """Return what the client gets when `decide` raised `error`, or when its verdict could not be put on the wire."""


class CheckHandlerFactory(Protocol):
    """Makes one `CheckHandler` per call."""

    def begin(self) -> CheckHandler:
        """Return the handler of a new call."""


class AuthorizationService:
    """`Authorization`: each call has a handler of its own.

    Args:
        conductor: Makes the handlers.
    """

    name = "envoy.service.auth.v3.Authorization"

    def __init__(self, conductor: CheckHandlerFactory) -> None:
        self.conductor = conductor
        self.calls = 0
        self.idle = asyncio.Event()

    def methods(self) -> Mapping[str, Take]:
        """The one method."""
        return {"Check": self._check}

    async def drain(self) -> None:
        """Wait for the last answer."""
        while self.calls:
            self.idle.clear()
            await self.idle.wait()

    def _check(self, answers: ServerCall) -> CallHandler:
        return _AuthzCall(answers, self)


class _AuthzCall:
    """One call."""

    __slots__ = ("_answers", "_deciding", "_flow", "_over", "_service")

    def __init__(self, answers: ServerCall, service: AuthorizationService) -> None:
        self._answers = answers
        self._service = service
        self._flow = service.conductor.begin()
        self._deciding: InlineTask[Verdict] | None = None
        self._over = False
        service.calls += 1

    def message(self, data: bytes) -> None:
        if self._over or self._deciding is not None:
            return
        try:
            head, body = decode_check(data)
        except ProtocolError as error:
            self._answers.fail(INVALID_ARGUMENT, str(error))
            self._end()
            return
        self._deciding = InlineTask(self._flow.decide(head, body), self._decided, self._failed)

    def ended(self, *, cancelled: bool) -> None:
        """The client has asked (False), or does not wait for the answer any more (True)."""
        if not cancelled or self._over:
            return
        deciding = self._deciding
        self._end()
        if deciding is not None:
            deciding.cancel()

    def _decided(self, verdict: Verdict) -> None:
        if self._over:
            return
        try:
            answer = encode_check(verdict)
        except ValueError as error:
            self._failed(error)
            return
        self._answers.send(answer)
        self._answers.finish()
        self._end()

    def _failed(self, error: BaseException) -> None:
        if self._over:
            return
        try:
            answer = encode_check(self._flow.failed(error))
        except Exception as second:  # noqa: BLE001 - the last guard: a gRPC status is all that is left to say
            self._answers.fail(INTERNAL, f"no answer could be made: {type(second).__name__}")
        else:
            self._answers.send(answer)
            self._answers.finish()
        self._end()

    def _end(self) -> None:
        self._over = True
        self._deciding = None
        self._service.calls -= 1
        if not self._service.calls:
            self._service.idle.set()
