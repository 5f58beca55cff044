"""The common part of ext_proc and ext_authz: a call that is answered by a verdict, and a service that drains such calls.

Rule: whatever goes wrong in a decision, the client gets an answer with a body; only a peer that breaks the protocol loses its call.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import ImmediateResponse, Verdict
from din_extproc.edge.grpc.services import ServerCall
from din_extproc.edge.inline_task import InlineTask

INTERNAL = 13


class VerdictHandler(Protocol):
    """Decides about one HTTP request."""

    def decide(self, head: RequestHead, body: bytes) -> Coroutine[Any, Any, Verdict]:
        """Return the verdict (an `async def`). Called at most once; cancelled when the call ends first.

        `body` is b"" when there is none.
        """

    def failed(self, error: BaseException) -> ImmediateResponse:
        """Return what the client gets when `decide` raised `error`, or when its verdict could not be put on the wire."""


H = TypeVar("H", bound=VerdictHandler)
H_co = TypeVar("H_co", bound=VerdictHandler, covariant=True)


class HandlerFactory(Protocol[H_co]):
    """Makes one handler per call."""

    def create_handler(self) -> H_co:
        """Return the handler of a new call."""


class VerdictService(Generic[H]):
    """A gRPC service whose calls end with the decisions that they carry.

    Args:
        factory: Makes the handlers.
    """

    def __init__(self, factory: HandlerFactory[H]) -> None:
        self.factory = factory
        self.calls = 0
        """Those that are open."""
        self.idle = asyncio.Event()

    async def drain(self) -> None:
        """Wait for the end of the last call."""
        while self.calls:
            self.idle.clear()
            await self.idle.wait()


class VerdictCall(ABC, Generic[H]):
    """One call. The transport calls `message` for each message and `ended` at the end."""

    __slots__ = ("_call", "_deciding", "_handler", "_over", "_service")

    def __init__(self, call: ServerCall, service: VerdictService[H]) -> None:
        self._call = call
        self._service = service
        self._handler = service.factory.create_handler()
        self._deciding: InlineTask[Verdict] | None = None
        self._over = False
        service.calls += 1

    @abstractmethod
    def _send(self, verdict: Verdict) -> None:
        """Put a verdict on the wire.

        Raises:
            ValueError: it can't be put there; nothing was sent.
        """

    def _decide(self, head: RequestHead, body: bytes) -> None:
        self._deciding = InlineTask(self._handler.decide(head, body), self._on_verdict, self._on_failure)

    def _on_verdict(self, verdict: Verdict) -> None:
        if self._over:
            return
        self._deciding = None
        try:
            self._send(verdict)
        except ValueError as error:
            self._on_failure(error)

    def _on_failure(self, error: BaseException) -> None:
        if self._over:
            return
        try:
            self._send(self._handler.failed(error))
        except Exception as second:  # noqa: BLE001 - the last guard: a gRPC status is all that is left to say
            self._abort(INTERNAL, f"no answer could be made: {type(second).__name__}")

    def _abort(self, status: int, detail: str) -> None:
        self._call.fail(status, detail)
        self._close()

    def _close(self) -> None:
        """End the call's part in its service, and cancel a decision that still runs."""
        self._over = True
        deciding, self._deciding = self._deciding, None  # a reference cycle: without this only the garbage collector would free them
        if deciding is not None:
            deciding.cancel()
        service = self._service
        service.calls -= 1
        if not service.calls:
            service.idle.set()
