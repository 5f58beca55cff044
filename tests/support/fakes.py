"""Hand-written fakes, each as small as its Protocol."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from din_extproc.admit.ledger import Claim, Denied, Granted, Ledger, LimitsUnavailable, RateLimitStatus, Settlement
from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import PASS, Replacement, ResponseHead, Treatment
from din_extproc.domain.verdict import ImmediateResponse, RefusalCode, Send, Verdict, error_body

Decision = Callable[[RequestHead, bytes], Awaitable[Verdict]]


async def send_on(_head: RequestHead, _body: bytes) -> Verdict:
    """Decide: send the request to one pool, unchanged."""
    return Send(cluster="pool", endpoints=("10.0.0.1:8000", "10.0.0.2:8000"), request_headers=(), response_headers=(), metadata={})


class FakeFlow:
    """A request handler that records its calls and decides as configured."""

    def __init__(self, decision: Decision, treat: Callable[[ResponseHead], Treatment]) -> None:
        self.decision = decision
        self.treat = treat
        self.instead: Replacement | None = None
        self.heads: list[ResponseHead] = []
        self.asked: list[tuple[RequestHead, bytes]] = []
        self.errors: list[BaseException] = []
        self.ends = 0

    async def decide(self, head: RequestHead, body: bytes) -> Verdict:
        self.asked.append((head, body))
        return await self.decision(head, body)

    def failed(self, error: BaseException) -> ImmediateResponse:
        self.errors.append(error)
        body = error_body(RefusalCode.INTERNAL_ERROR, "The gateway failed", trace_id="trace-1")
        return ImmediateResponse(status=500, headers=(("content-type", "application/json"), ("x-din-trace-id", "trace-1")), body=body)

    def on_response(self, head: ResponseHead) -> Treatment:
        self.heads.append(head)
        return self.treat(head)

    def on_response_failure(self, error: Exception) -> Replacement | None:
        self.errors.append(error)
        return self.instead

    def ended(self, *, cut: bool = True) -> None:
        self.ends += 1


class FakeHandlerFactory:
    """Makes a `FakeFlow` per stream and keeps them."""

    def __init__(self, decision: Decision = send_on, treat: Callable[[ResponseHead], Treatment] = lambda _head: PASS) -> None:
        self.decision = decision
        self.treat = treat
        self.flows: list[FakeFlow] = []

    def create_handler(self) -> FakeFlow:
        self.flows.append(FakeFlow(self.decision, self.treat))
        return self.flows[-1]


class FakeSink:
    """A call that keeps what was sent, and how it ended."""

    authorization = ""
    names: frozenset[str] = frozenset()
    lost = True

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.failures: list[tuple[int, str]] = []
        self.finished = 0

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def fail(self, status: int, detail: str) -> None:
        self.failures.append((status, detail))

    def finish(self) -> None:
        self.finished += 1


class BrokenLedger:
    """Counters that can't be reached until they are `mended`; they record calls after that."""

    def __init__(self, *, mended: bool = False) -> None:
        self.mended = mended
        self.settled: dict[str, int] = {}
        self.released: set[str] = set()

    def _reach(self) -> None:
        if not self.mended:
            raise LimitsUnavailable("gone")

    async def reserve(self, _claim: Claim) -> Granted | Denied:
        self._reach()
        return Granted(RateLimitStatus())

    async def renew(self, _tenant: str, _request_id: str, _lease_ms: int) -> None:
        self._reach()

    async def release(self, _tenant: str, request_id: str) -> None:
        self._reach()
        self.released.add(request_id)

    async def settle(self, _tenant: str, request_id: str, tokens: int, cost: int = 0) -> bool:
        self._reach()
        known = request_id in self.settled
        self.settled.setdefault(request_id, tokens)
        return not known


class OneByOne:
    """Settles in any ledger, request by request."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def settle_all(self, settlements: Sequence[Settlement]) -> int:
        return sum([await self.ledger.settle(each.tenant, each.request_id, each.tokens, each.cost) for each in settlements])


class FakeLearner:
    """Both learners of exchanges: records what it learns from."""

    def __init__(self) -> None:
        self.learned: list[tuple[object, ...]] = []

    def learn(self, *lesson: object) -> None:
        self.learned.append(lesson)


class LoopbackServer:
    """An HTTP server on loopback. It keeps its port when it is started again."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._runner: web.AppRunner | None = None

    async def serve(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class FakeRegistry(LoopbackServer):
    """A registry's HTTP interface on a free loopback port: records requests and refuses as configured."""

    def __init__(self) -> None:
        super().__init__()
        self.token = ""
        self.lease = ""
        self.drain = False
        self.refuse: tuple[int, str] | None = None
        self.refuse_registrations = ""
        self.registrations: list[dict[str, Any]] = []
        self.beats: list[dict[str, Any]] = []
        self.farewells: list[str] = []
        self.parted = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/nodes", self._register)
        app.router.add_post("/v1/nodes/{id}/heartbeat", self._beat)
        app.router.add_post("/v1/nodes/{id}/drain", self._drain)
        app.router.add_delete("/v1/nodes/{id}", self._deregister)
        await self.serve(app)

    def forget(self) -> None:
        """Forget all leases, as after a restart."""
        self.lease = ""

    def _denied(self, request: web.Request, lease: str) -> web.Response | None:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"detail": "the token is wrong"}, status=401)
        if self.refuse is not None:
            return web.json_response({"detail": self.refuse[1]}, status=self.refuse[0])
        return web.json_response({"detail": "no such lease"}, status=404) if lease != self.lease else None

    async def _register(self, request: web.Request) -> web.Response:
        denied = self._denied(request, self.lease)
        if denied is not None:
            return denied
        if self.refuse_registrations:
            return web.json_response({"detail": self.refuse_registrations}, status=409)
        self.registrations.append(await request.json())
        self.lease = f"lease-{len(self.registrations)}"
        return web.json_response({"lease": self.lease, "warnings": []}, status=201)

    async def _beat(self, request: web.Request) -> web.Response:
        beat = await request.json()
        denied = self._denied(request, beat["lease"])
        if denied is None:
            self.beats.append(beat)
        return denied or web.json_response({"drain": self.drain})

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._farewell(request, "drain")

    async def _deregister(self, request: web.Request) -> web.Response:
        return await self._farewell(request, "deregister")

    async def _farewell(self, request: web.Request, how: str) -> web.Response:
        denied = self._denied(request, (await request.json())["lease"])
        if denied is None:
            self.farewells.append(how)
            self.parted.set()
        return denied or web.json_response({})


class FakeEngine(LoopbackServer):
    """An engine's two pages on a free loopback port, as configured."""

    def __init__(self) -> None:
        super().__init__()
        self.models = ["m"]
        self.adapters: list[str] = []
        self.waiting = self.running = 0
        self.silent = False
        self.status = 200

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        await self.serve(app)

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(3600)
        return web.Response(text=f"vllm:num_requests_waiting {self.waiting}\nvllm:num_requests_running {self.running}\n")

    async def _models(self, _request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(3600)
        return web.json_response(
            {"object": "list", "data": [{"id": name} for name in self.models] + [{"id": name, "parent": "m"} for name in self.adapters]},
            status=self.status,
        )
