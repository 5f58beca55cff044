"""The modelled engine as an HTTP server with the interface of vLLM, plus two switches `/_faults` and `/_seen`.

Rule: when a client disconnects, its sequences end at once.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import count
from zlib import crc32

from aiohttp import web

from din_extproc.tools.engine_model.answers import Identity, Reporting
from din_extproc.tools.engine_model.api import ApiEmulation, EngineStream, PoolingApiEmulation
from din_extproc.tools.engine_model.dialects import DIALECTS
from din_extproc.tools.engine_model.engine import Emission, EngineSpec, SimulatedSequence
from din_extproc.tools.engine_model.errors import NOT_FOUND, OUT_OF_MEMORY, UNAUTHORIZED, EngineFailure, refuse
from din_extproc.tools.engine_model.faults import Fault, FaultBoard
from din_extproc.tools.engine_model.metrics import EngineMetrics
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.requests import EngineRequest
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer
from din_extproc.tools.engine_sim.delivery import Delivery, reset
from din_extproc.tools.engine_sim.loop import EngineLoop
from din_extproc.tools.engine_sim.pages import HEADERS, EnginePages, answer_failure
from din_extproc.tools.engine_sim.request_history import RequestHistory, SeenRequest

_BODY_LIMIT = 256 * 2**20
_BLAMELESS = ("latency", "usage", "no_usage", "drip", "insert", "clock")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Work = Callable[[web.Request, SeenRequest, Mapping[str, Fault]], Awaitable[web.StreamResponse]]


class EngineServer:
    """One engine on one port. Start and stop it inside a running event loop."""

    def __init__(self, engine: EngineSpec, model: ModelSpec, tokenizer: SimulatedTokenizer, faults: FaultBoard) -> None:
        self.faults = faults
        self.seen = RequestHistory()
        self._spec = engine
        self._model = model
        self._tokenizer = tokenizer
        self._metrics = EngineMetrics(model.name, time.time())
        self._dialect = DIALECTS[model.api](model, tokenizer)
        self._numbers = count(1)
        self._open: set[Delivery] = set()
        self._loop: EngineLoop
        self._runner: web.AppRunner

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0: a free one. Return the port.

        Raises:
            OSError: the address is taken or not ours.
        """
        self._loop = EngineLoop(self._spec, self._metrics)
        app = web.Application(middlewares=[self._guard], client_max_size=_BODY_LIMIT)
        app.add_routes(self._routes())
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Abort open streams, and close."""
        for delivery in list(self._open):
            delivery.abort()
        await self._runner.cleanup()
        self._loop.close()

    def _routes(self) -> list[web.RouteDef]:
        pages = EnginePages(self._model, self._tokenizer, self.faults, self.seen, self._loop)
        dialect = self._dialect
        made = [*pages.routes(), web.post("/tokenize", self._wrap(pages.tokenize))]
        made += [web.get(path, _page(content)) for path, content in dialect.pages.items()]
        made += [web.post(path, self._wrap(self._pooling(emulation))) for path, emulation in dialect.counting.items()]
        if self._model.runner == "generate":
            return made + [web.post(path, self._wrap(self._generating(emulation))) for path, emulation in dialect.generating.items()]
        return made + [web.post(path, self._wrap(self._pooling(emulation))) for path, emulation in dialect.pooling.items()]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and answer wrong paths and methods as FastAPI does."""
        if (
            self._model.api_key
            and request.path.startswith("/v1/")
            and request.headers.get("authorization") != f"Bearer {self._model.api_key}"
        ):
            return answer_failure(UNAUTHORIZED)
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            allowed = ("allow", ", ".join(sorted(error.allowed_methods)))
            return answer_failure(EngineFailure(405, b'{"detail":"Method Not Allowed"}', (allowed,)))
        except web.HTTPNotFound:
            return answer_failure(NOT_FOUND)
        except web.HTTPRequestEntityTooLarge:
            return answer_failure(refuse(413, "Request entity too large"))

    def _wrap(self, work: Work) -> Handler:
        """Wrap the handler of a path that does work: record the request, and apply faults that need no answer of the engine."""

        async def handle(request: web.Request) -> web.StreamResponse:
            headers = [(name.lower(), value) for name, value in request.headers.items()]
            record = SeenRequest(request.method, request.path_qs, headers, await request.read(), time.time())
            self.seen.add(record)
            self.seen.in_flight += 1
            try:
                struck = self.faults.draw(request.path, record.body)
                response = await _apply_early_faults(request, struck, self._dialect.reword) or await work(request, record, struck)
            except asyncio.CancelledError:
                record.finish("aborted", None, time.time())
                raise
            else:
                outcome = "completed" if response.status < 400 else "refused"  # noqa: PLR2004 - an HTTP status class
                record.finish("faulted" if set(struck) - set(_BLAMELESS) else outcome, response.status, time.time())
                return response
            finally:
                self.seen.in_flight -= 1

        return handle

    def _generating(self, emulation: ApiEmulation) -> Work:
        async def work(request: web.Request, record: SeenRequest, struck: Mapping[str, Fault]) -> web.StreamResponse:
            parsed = emulation.read(record.body, request.headers.get("content-type", ""))
            return await self._generate(request, record, struck, parsed, emulation)

        return work

    def _pooling(self, emulation: PoolingApiEmulation) -> Work:
        async def work(request: web.Request, record: SeenRequest, _struck: Mapping[str, Fault]) -> web.StreamResponse:
            parsed = emulation.read(record.body, request.headers.get("content-type", ""))
            if isinstance(parsed, EngineFailure):
                return answer_failure(parsed)
            record.prompt_tokens = sum(parsed.prompts)
            record.sequences = [SimulatedSequence(tokens, 0) for tokens in parsed.prompts]
            try:
                await self._run(record, ["stop"] * len(record.sequences))
            finally:
                self._abort_rest(record)
            body = emulation.whole(parsed, self._number(request), int(time.time()), self._model.name)
            return web.Response(body=body, content_type="application/json", headers=HEADERS)

        return work

    async def _generate(
        self,
        request: web.Request,
        record: SeenRequest,
        struck: Mapping[str, Fault],
        parsed: EngineRequest | EngineFailure,
        emulation: ApiEmulation,
    ) -> web.StreamResponse:
        """Run the scripts of a request through the engine and answer."""
        if isinstance(parsed, EngineFailure):
            return answer_failure(parsed)
        self._metrics.on_request(parsed.n, parsed.max_tokens)
        record.prompt_tokens = parsed.prompt_tokens
        cached = self._take_cached(parsed)
        record.sequences = [
            SimulatedSequence(tokens, len(script.pieces), cached=found)
            for tokens, script, found in zip(parsed.prompts, parsed.scripts, cached, strict=True)
        ]
        ahead_s = struck["clock"].ms / 1000 if "clock" in struck else 0.0
        identity = Identity(f"{emulation.prefix}{self._number(request)}", int(time.time() + ahead_s), self._model.name)
        factor = struck["usage"].factor if "usage" in struck else 1.0
        reporting = Reporting(factor=factor, omit="no_usage" in struck, cached=sum(cached[:: parsed.n]) if parsed.blocks else None)
        try:
            if parsed.stream:
                events = emulation.stream(identity, parsed, reporting)
                return await self._stream(
                    request=request, record=record, struck=struck, parsed=parsed, content_type=emulation.content_type, events=events
                )
            await self._run(record, [script.finish_reason for script in parsed.scripts])
            body = emulation.whole(identity, parsed, reporting)
            return web.Response(body=body, content_type="application/json", headers={**HEADERS, **emulation.headers(parsed)})
        finally:
            self._abort_rest(record)

    def _take_cached(self, parsed: EngineRequest) -> list[int]:
        """Return how many tokens of each choice's prompt are in the prefix cache, and put the prompts into it."""
        if not parsed.blocks:
            return [0] * len(parsed.prompts)
        take, size, room = self._metrics.prefix_cache.take, self._model.cache_block, self._loop.engine.free_blocks
        pairs = zip(parsed.blocks, parsed.prompts, strict=True)
        return [take(blocks, tokens=tokens, size=size, room=room) for blocks, tokens in pairs]

    async def _stream(
        self,
        request: web.Request,
        record: SeenRequest,
        struck: Mapping[str, Fault],
        parsed: EngineRequest,
        content_type: str,
        events: EngineStream,
    ) -> web.StreamResponse:
        """Answer with events. The tick writes them; this task only begins and ends the response."""
        response = web.StreamResponse(headers={**HEADERS, "content-type": content_type})
        response.enable_chunked_encoding()
        await response.prepare(request)
        assert request.transport is not None  # noqa: S101 - set by prepare
        delivery = Delivery(request.transport, events, len(record.sequences), struck)
        self._open.add(delivery)
        try:
            delivery.begin()
            for index, (sequence, script) in enumerate(zip(record.sequences, parsed.scripts, strict=True)):
                self._submit(sequence, script.finish_reason, partial(_deliver, record, delivery, index))
            outcome = await delivery.done
            if outcome == "silent":
                await asyncio.Event().wait()
            await delivery.drained()
            await response.write_eof()
        except ConnectionError:
            record.finish("aborted", 200, time.time())
        finally:
            self._open.discard(delivery)
        return response

    async def _run(self, record: SeenRequest, reasons: list[str]) -> None:
        """Run every sequence of a request to its end."""
        left = len(record.sequences)
        done = asyncio.get_running_loop().create_future()

        def sink(emission: Emission) -> None:
            nonlocal left
            left -= emission.is_last
            if not left and not done.done():
                done.set_result(None)

        for sequence, reason in zip(record.sequences, reasons, strict=True):
            self._submit(sequence, reason, sink)
        if record.sequences:
            await done

    def _submit(self, sequence: SimulatedSequence, reason: str, sink: Callable[[Emission], None]) -> None:
        def counted(emission: Emission) -> None:
            if emission.is_last:
                self._metrics.on_end(sequence, reason)
            sink(emission)

        self._loop.submit(sequence, counted)

    def _abort_rest(self, record: SeenRequest) -> None:
        for sequence in record.sequences:
            if sequence.finished is None:
                self._loop.abort(sequence)

    def _number(self, request: web.Request) -> str:
        """Return the client's `X-Request-Id`, or the next of a repeatable series of ids."""
        number = next(self._numbers)
        return request.headers.get("x-request-id") or f"{crc32(b'%d' % number):08x}{number:08x}"


def _deliver(record: SeenRequest, delivery: Delivery, index: int, emission: Emission) -> None:
    if record.first_byte is None:
        record.first_byte = time.time()
    delivery.token(index, emission)


def _page(content: object) -> Handler:
    async def page(_request: web.Request) -> web.StreamResponse:
        return web.json_response(content, headers=HEADERS)

    return page


async def _apply_early_faults(
    request: web.Request, struck: Mapping[str, Fault], reword: Callable[[EngineFailure], EngineFailure]
) -> web.StreamResponse | None:
    """Apply faults that occur before the engine: wait, or answer in its place. None: continue."""
    if "exit" in struck:
        os._exit(1)
    if "latency" in struck:
        await asyncio.sleep(struck["latency"].ms / 1000)
    if "stall" in struck and struck["stall"].after is None:
        await asyncio.Event().wait()
    if "reset" in struck and struck["reset"].after is None and request.transport is not None:
        reset(request.transport)
        return web.Response()
    for kind in ("reply", "throttle", "oom", "unavailable"):
        if kind in struck:
            broken = _fault_answer(struck[kind])
            return answer_failure(broken if kind == "reply" else reword(broken))
    return None


def _fault_answer(fault: Fault) -> EngineFailure:
    """Return the answer of a fault."""
    message = fault.message
    if fault.kind == "reply":
        headers = tuple((name, value) for name, value in fault.headers.items() if name.lower() != "content-type")
        kind = next((value for name, value in fault.headers.items() if name.lower() == "content-type"), "")
        return EngineFailure(fault.status, fault.body.encode("latin-1", "replace"), headers, kind)
    if fault.kind == "oom":
        return refuse(500, message or OUT_OF_MEMORY, "InternalServerError")
    if fault.kind == "throttle":
        answer = refuse(429, message or "Too many requests are queued.", "TooManyRequestsError")
        return EngineFailure(429, answer.body, (("retry-after", str(fault.retry_after_s)),))
    return refuse(503, message or "The engine is unavailable.", "ServiceUnavailableError")
