"""Request handler at a node, for an Envoy in front of its engine: trace id -> version -> size -> batch window -> engine.

Invariant: a node trusts what the gateway decided and refuses only requests without a trace id and requests for another version.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.domain.request import BUILT_IN, Operation, RequestHead
from din_extproc.domain.response import PASS, ResponseHead, Treatment
from din_extproc.domain.verdict import Headers, ImmediateResponse, Refusal, RefusalCode, Send, Verdict
from din_extproc.flow import answers
from din_extproc.flow.decision import Clock
from din_extproc.flow.request import DecisionObserver
from din_extproc.flow.trace import TraceIds, is_trace_id
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.read import parse_request
from din_extproc.route.versions import combine
from din_extproc.southbound.engines import is_native_path

ENGINE = "engine"
"""The Envoy cluster of the node's own engine."""
_GAUGE = TokenCalibrator()
_BYTES_PER_TOKEN = 4
"""Of a request in the engine's own words, which the gateway has written: nothing of it is refused here."""


class BatchWindow(Protocol):
    """Holds requests back until their batch goes."""

    async def hold(self, tokens: int) -> None:
        """Return when a request with a prompt of so many tokens may go. A cancelled request no longer holds up others."""


class NodeHandlerFactory(Struct):
    """Everything that the requests of one node share."""

    node: Node
    engine: str
    """The engine's `address:port`."""
    gate: BatchWindow | None
    """None: requests go as they come."""
    ids: TraceIds
    """For refusals of requests that bring no id."""
    clock: Clock
    watcher: DecisionObserver
    body_limit: int
    """Bytes."""
    operations: Mapping[str, Operation] = BUILT_IN
    """Every operation that the node takes, by path."""
    in_flight: int = 0
    """Requests that were sent to the engine and have not ended, or are held back."""

    def create_handler(self) -> "NodeRequestHandler":
        """A stream was opened: one HTTP exchange begins."""
        return NodeRequestHandler(self)

    @property
    def identity_headers(self) -> Headers:
        """On every answer: who gave it."""
        return (("x-din-node-id", self.node.id), ("x-din-model-version", self.node.version))


class NodeRequestHandler:
    """One HTTP exchange at the node."""

    __slots__ = ("_counted", "_factory", "_head", "_trace_id")

    def __init__(self, factory: NodeHandlerFactory) -> None:
        self._factory = factory
        self._head = RequestHead(method="", path="", headers={})
        self._trace_id = ""
        self._counted = False

    async def decide(self, head: RequestHead, body: bytes) -> Verdict:
        """The verdict on a whole request; it may take as long as the batch window."""
        factory = self._factory
        began = factory.clock.monotonic()
        self._head = head
        given = head.header("x-din-trace-id")
        self._trace_id = given if is_trace_id(given) else factory.ids.make(factory.clock.wall())
        tokens = self._accept_request(head, body, traced=self._trace_id == given)
        if isinstance(tokens, Refusal):
            factory.watcher.on_decision(factory.clock.monotonic() - began, tokens.code.code)
            return answers.build_refusal_response(tokens, head, self._trace_id, factory.identity_headers)
        factory.watcher.on_decision(factory.clock.monotonic() - began, "")
        factory.in_flight += 1
        self._counted = True
        if factory.gate is not None and body:
            await factory.gate.hold(tokens)
        return Send(
            cluster=ENGINE,
            endpoints=(factory.engine,),
            request_headers=(),
            response_headers=(("x-din-trace-id", self._trace_id),),
            metadata={"trace_id": self._trace_id},
        )

    def failed(self, error: BaseException) -> ImmediateResponse:
        """The answer to the gateway after a fault."""
        self._factory.watcher.on_fault(error, self._trace_id)
        self._count_end()
        return answers.build_internal_error(self._head, self._trace_id)

    def on_response(self, _head: ResponseHead) -> Treatment:
        """The gateway gets the engine's answer as it is."""
        return PASS

    def on_response_failure(self, error: Exception) -> None:
        """The answer went on as it is, for a fault of ours."""
        self._factory.watcher.on_fault(error, self._trace_id)

    def ended(self, *, cut: bool = True) -> None:  # noqa: ARG002 - a node frees its place either way
        """The exchange is over."""
        self._count_end()

    def _count_end(self) -> None:
        if self._counted:
            self._counted = False
            self._factory.in_flight -= 1

    def _accept_request(self, head: RequestHead, body: bytes, *, traced: bool) -> int | Refusal:
        """Return the token count of the prompt, or a refusal."""
        factory = self._factory
        if not traced:
            return Refusal(RefusalCode.TRACE_MISSING, "A node runs nothing that has no x-din-trace-id.", param="x-din-trace-id")
        version = head.header("x-din-model-version")
        constraint = combine(version)
        if constraint is None:
            return Refusal(RefusalCode.INVALID_REQUEST, "x-din-model-version is no version constraint.", param="x-din-model-version")
        if not constraint.allows(factory.node.version):
            message = f"The node serves version {factory.node.version}, which does not meet {constraint.text!r}."
            return Refusal(RefusalCode.VERSION_MISMATCH, message, param="x-din-model-version")
        if head.method == "POST" and is_native_path(head.path):
            return len(body) // _BYTES_PER_TOKEN
        reading = parse_request(head, body, lambda _: _GAUGE, factory.body_limit, factory.operations)
        return reading if isinstance(reading, Refusal) else reading.intent.prompt_tokens
