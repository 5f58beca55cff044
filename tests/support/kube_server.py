"""A Kubernetes API server on loopback, as far as lists and watches go, whose objects and faults a test changes."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import web

_PATHS = ("/apis/discovery.k8s.io/v1/namespaces/inference/{resource:endpointslices}", "/api/v1/namespaces/inference/{resource:pods}")


def make_slice(name: str, service: str, endpoints: Iterable[tuple[str, dict[str, bool]]], port: int, **stated: str) -> dict[str, Any]:
    """Return an EndpointSlice with one port `http`. `endpoints`: addresses with their conditions; `stated`: labels `din.dev/...`."""
    labels = {"kubernetes.io/service-name": service, **{f"din.dev/{key.replace('_', '-')}": value for key, value in stated.items()}}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "inference", "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": conditions} for address, conditions in endpoints] or None,
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


def make_pod(name: str, address: str, port: int, *, ready: bool = True, **stated: str) -> dict[str, Any]:
    """Return a pod with the label `app: vllm` and a container port `http`. `stated`: annotations `din.dev/...`."""
    annotations = {f"din.dev/{key.replace('_', '-')}": value for key, value in stated.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "inference", "labels": {"app": "vllm"}, "annotations": annotations},
        "spec": {"containers": [{"name": "vllm", "ports": [{"name": "http", "containerPort": port}]}]},
        "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


class KubeServer:
    """Serves EndpointSlices and pods in a thread of its own. A context manager.

    Args:
        tls: The server's certificate, and which clients it asks for one. None: plain HTTP.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        """Version, resource and event of each change that is not compacted."""
        self._oldest = 0
        self._version = 100
        self._watchers: dict[asyncio.Queue[bytes | None], tuple[str, str, web.Request]] = {}
        """The queue of each watch, with its resource and selector."""
        self.token = "a-token-that-no-log-shows"
        """Requests need it, or a client certificate."""
        self.refusal: tuple[int, str] | None = None
        """Status and message that every request gets."""
        self.page = 500
        """Objects of one page at most."""
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        """Path and query of each request."""
        self.url = ""

    @property
    def lists(self) -> int:
        """The number of lists that were asked for, without further pages."""
        return sum("watch" not in query and "continue" not in query for _, query in self.asked)

    @property
    def watches(self) -> int:
        """The number of watches that were asked for."""
        return sum("watch" in query for _, query in self.asked)

    @property
    def watching(self) -> int:
        """The number of watches that are open."""
        return len(self._watchers)

    def put(self, *objects: dict[str, Any]) -> None:
        """Create these objects, or replace those of their names."""
        self._run(lambda: [self._change(each, None) for each in objects])

    def delete(self, resource: str, name: str) -> None:
        """Delete an object."""
        self._run(lambda: self._change(self._objects[resource, name], "DELETED"))

    def bookmark(self) -> None:
        """Send a bookmark with a new version to every watch."""

        def send() -> None:
            self._version += 1
            body = {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(self._version)}}}
            self._broadcast(json.dumps(body).encode() + b"\n")

        self._run(send)

    def send(self, line: bytes) -> None:
        """Send this line to every watch."""
        self._run(lambda: self._broadcast(line))

    def end_watches(self) -> None:
        """End every watch as a server does when its time is over."""
        self._run(lambda: [queue.put_nowait(None) for queue in self._watchers])

    def drop_connections(self) -> None:
        """Cut the connection of every watch."""
        self._run(lambda: [request.transport.abort() for *_, request in self._watchers.values() if request.transport])

    def compact(self) -> None:
        """Forget the history: a watch from an earlier version expires."""

        def forget() -> None:
            self._version += 1
            self._oldest = self._version
            self._history.clear()

        self._run(forget)

    def write_kubeconfig(self, file: Path, **user: str) -> Path:
        """Write a kubeconfig for this server, with its token unless the user is given."""
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": user or {"token": self.token}}],
        }
        file.write_text(yaml.safe_dump(config))
        return file

    def _run(self, step: Callable[[], Any]) -> None:
        """Run a step in the server's thread and wait for its end."""

        async def run() -> None:
            step()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _change(self, changed: dict[str, Any], kind: str | None) -> None:
        resource = "pods" if changed["kind"] == "Pod" else "endpointslices"
        key = resource, changed["metadata"]["name"]
        self._version += 1
        changed = {**changed, "metadata": {**changed["metadata"], "resourceVersion": str(self._version)}}
        event = {"type": kind or ("MODIFIED" if key in self._objects else "ADDED"), "object": changed}
        if kind == "DELETED":
            del self._objects[key]
        else:
            self._objects[key] = changed
        self._history.append((self._version, resource, event))
        for queue, (watched, selector, _) in self._watchers.items():
            if watched == resource and _matches(changed, selector):
                queue.put_nowait(json.dumps(event).encode() + b"\n")

    def _broadcast(self, line: bytes) -> None:
        for queue in self._watchers:
            queue.put_nowait(line)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        resource = request.match_info["resource"]
        self.asked.append((request.path, dict(request.query)))
        if self.refusal is not None:
            return _fail(*self.refusal)
        certified = request.transport is not None and request.transport.get_extra_info("peercert")
        if not certified and request.headers.get("authorization") != f"Bearer {self.token}":
            return _fail(401, "Unauthorized")
        selector = request.query.get("labelSelector", "")
        if "watch" in request.query:
            return await self._watch(request, resource, selector)
        found = [each for (kind, _), each in self._objects.items() if kind == resource and _matches(each, selector)]
        start = int(request.query.get("continue", 0))
        end = start + min(self.page, int(request.query.get("limit", len(found) + 1)))
        metadata = {"resourceVersion": str(self._version), **({"continue": str(end)} if end < len(found) else {})}
        return web.json_response({"kind": "List", "metadata": metadata, "items": found[start:end]})

    async def _watch(self, request: web.Request, resource: str, selector: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self._oldest:
            return _fail(410, f"too old resource version: {since}")
        reply = web.StreamResponse(headers={"content-type": "application/json"})
        await reply.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, changed, event in self._history:
            if version > since and changed == resource and _matches(event["object"], selector):
                queue.put_nowait(json.dumps(event).encode() + b"\n")
        self._watchers[queue] = resource, selector, request
        try:
            while (line := await queue.get()) is not None:
                await reply.write(line)
        finally:
            del self._watchers[queue]
        return reply

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        for path in _PATHS:
            app.router.add_get(path, self._serve)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def __enter__(self) -> Self:
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _matches(found: Mapping[str, Any], selector: str) -> bool:
    labels = found["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, _, value in (each.partition("=") for each in selector.split(",") if each))


def _fail(status: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": status, "message": message}, status=status)
