"""Nodes of a Kubernetes cluster: the EndpointSlices of a Service, or pods by their labels, listed once and then watched.

The protocol is two kinds of GET request, and the official clients bring generated classes for the whole API: aiohttp, which is a
dependency anyway, and four small types do.

Rule: what was listed stays in use until the server has said otherwise, whatever fails.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from http import HTTPStatus

import aiohttp
import msgspec
from msgspec import Struct

from din_extproc.domain.membership import NodeState
from din_extproc.domain.node import Endpoint, KubernetesObjects
from din_extproc.edge.discovery.kube_access import AccessUnavailable, KubeAccess, load_access
from din_extproc.edge.discovery.kube_objects import EndpointSlice, Metadata, Pod, list_endpoints
from din_extproc.edge.discovery.source import FoundEndpoint, SourceAnswer

_WATCH_S = 60
"""After so long, the server ends a watch and another one follows."""
_SILENCE_S = _WATCH_S + 15
_CONNECT_S = 5.0
_LIST_S = 30.0
_PAGE = 500
_LONGEST_PAUSE_S = 15.0
_FIRST_PAUSE_S = 0.1
_LONGEST_LINE = 8 << 20
_LONGEST_STATUS = 1 << 16
_KEPT = "the last good answer stays in use"
_PREFERENCE = (NodeState.READY, NodeState.DRAINING, NodeState.LOADING)


class _WatchFailed(Exception):  # noqa: N818 - it says what failed
    """A list or a watch failed. `relist`: what is known may have holes, and has to be listed again."""

    def __init__(self, problem: str, remedy: str, *, relist: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.relist = relist


class _Expired(Exception):  # noqa: N818 - likewise
    """The server has compacted the history since the last version that is known."""


class _ListMessage(Struct, frozen=True):
    metadata: Metadata
    items: list[msgspec.Raw] | None = None


class _WatchEvent(Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Bookmark(Struct, frozen=True):
    metadata: Metadata


class _Status(Struct, frozen=True):
    code: int = 0
    message: str = ""


class KubernetesSource:
    """Follows the objects of one Service or label selector.

    Args:
        wanted: The objects.
        env: The environment variables, which name the API server of a pod's own cluster.
    """

    def __init__(self, wanted: KubernetesObjects, env: Mapping[str, str]) -> None:
        self._wanted = wanted
        self._env = env
        self._decoder: msgspec.json.Decoder[EndpointSlice | Pod] = msgspec.json.Decoder(EndpointSlice if wanted.service else Pod)
        group, self._resource = ("apis/discovery.k8s.io/v1", "endpointslices") if wanted.service else ("api/v1", "pods")
        self._path = f"/{group}/namespaces/{wanted.namespace}/{self._resource}"
        self._selector = f"kubernetes.io/service-name={wanted.service}" if wanted.service else wanted.selector
        self._objects: dict[str, EndpointSlice | Pod] = {}
        self._version = ""
        """The resource version up to which the objects are known; "": they have to be listed."""
        self._failures = 0
        """Connections that ended at once, since the last one by which something of use came."""

    async def follow(self) -> AsyncGenerator[SourceAnswer, None]:
        """Yield an answer when the objects are listed, for each change, and when something fails or works again."""
        while True:
            failed: _WatchFailed | None = None
            began = asyncio.get_running_loop().time()
            try:
                access = await asyncio.to_thread(load_access, self._wanted.kubeconfig, self._wanted.context, self._env)
                async with aclosing(self._connect(access)) as changes:
                    async for _ in changes:
                        yield self._make_answer()
            except _Expired:
                self._version = ""
            except _WatchFailed as error:
                failed = error
                self._version = "" if error.relist else self._version
            except AccessUnavailable as error:
                failed = _WatchFailed(str(error), "give the pod a service account with a token, or correct the kubeconfig")
            except TimeoutError:
                failed = _WatchFailed(f"the API server is silent while {self._resource} are read", "check the API server and the network")
            except (aiohttp.ClientError, OSError) as error:
                reason = f"the API server can't be reached: {error or type(error).__name__}"
                failed = _WatchFailed(reason, "check its address, its certificate and the network")
            if failed is not None:
                yield SourceAnswer(self._list_endpoints(), failed.problem, f"{_KEPT}; {failed.remedy}")
            if asyncio.get_running_loop().time() - began > _LONGEST_PAUSE_S:
                self._failures = 0
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures, 10))
            self._failures += 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter against simultaneous reconnects

    async def _connect(self, access: KubeAccess) -> AsyncGenerator[None, None]:
        """List, if necessary, and watch until the server ends it. Yields after every change.

        Raises:
            _Expired: the objects have to be listed again.
            _WatchFailed: the server refuses, or sends what can't be read.
            OSError, aiohttp.ClientError, TimeoutError: the connection failed.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        connector = aiohttp.TCPConnector(ssl=access.tls or True)
        async with aiohttp.ClientSession(headers=access.headers, timeout=timeout, connector=connector) as session:
            if not self._version:
                async with asyncio.timeout(_LIST_S):
                    await self._list(session, access)
                yield
            query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": self._version, "timeoutSeconds": str(_WATCH_S)}
            async with self._get(session, access, query) as reply:
                await self._check(reply, "watch")
                yield
                with suppress(aiohttp.ClientPayloadError):  # a watch that is cut goes on by the next connection
                    async for lines in _read_lines(reply.content):
                        for line in lines:
                            self._apply(line)
                        self._failures = 0
                        yield

    def _get(
        self, session: aiohttp.ClientSession, access: KubeAccess, query: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        query = {"labelSelector": self._selector, **query}
        return session.get(access.server + self._path, params=query, server_hostname=access.server_name, allow_redirects=False)

    async def _list(self, session: aiohttp.ClientSession, access: KubeAccess) -> None:
        """Replace the objects by those that there are."""
        objects: dict[str, EndpointSlice | Pod] = {}
        query = {"limit": str(_PAGE)}
        while True:
            async with self._get(session, access, query) as reply:
                await self._check(reply, "list")
                body = await reply.read()
            try:
                page = msgspec.json.decode(body, type=_ListMessage)
                found = [self._decoder.decode(each) for each in page.items or ()]
            except msgspec.DecodeError as error:
                raise self._malformed(str(error)) from error
            objects |= {each.metadata.name: each for each in found}
            if not page.metadata.continue_:
                break
            query["continue"] = page.metadata.continue_
        self._objects, self._version = objects, page.metadata.resource_version

    async def _check(self, reply: aiohttp.ClientResponse, verb: str) -> None:
        """Raise what a response other than 200 means."""
        if reply.status == HTTPStatus.OK:
            return
        try:
            status = msgspec.json.decode(await reply.content.read(_LONGEST_STATUS), type=_Status)
        except msgspec.DecodeError:
            status = _Status()
        raise self._make_failure(reply.status, status.message, verb)

    def _make_failure(self, code: int, message: str, verb: str, *, relist: bool = False) -> Exception:
        if code == HTTPStatus.GONE:
            return _Expired()
        what = f"{self._resource} in namespace {self._wanted.namespace}"
        detail = f": {' '.join(message.split())[:300]}" if message else ""
        if code == HTTPStatus.UNAUTHORIZED:
            return _WatchFailed(
                f"the API server does not accept the credentials (401){detail}", "renew the token or the client certificate"
            )
        if code == HTTPStatus.FORBIDDEN:
            remedy = f"bind a Role with the verbs list and watch on {self._resource} to this account"
            return _WatchFailed(f"the API server does not allow to {verb} {what} (403){detail}", remedy)
        problem = f"the API server answers {code} to {verb} {what}{detail}"
        return _WatchFailed(problem, "check the API server, `service` or `selector`, and `namespace`", relist=relist)

    def _apply(self, line: bytes) -> None:
        """Apply one event of a watch."""
        try:
            event = msgspec.json.decode(line, type=_WatchEvent)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=_Status)
                raise self._make_failure(status.code, status.message, "watch", relist=True)
            if event.type == "BOOKMARK":
                self._version = msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
                return
            found = self._decoder.decode(event.object)
        except msgspec.DecodeError as error:
            raise self._malformed(str(error)) from error
        if event.type in {"ADDED", "MODIFIED"}:
            self._objects[found.metadata.name] = found
        elif event.type == "DELETED":
            self._objects.pop(found.metadata.name, None)
        else:
            raise self._malformed(f"an event of type {event.type[:100]!r}")
        self._version = found.metadata.resource_version

    def _malformed(self, reason: str) -> _WatchFailed:
        remedy = "check what answers at the address of the API server"
        return _WatchFailed(f"the API server sends {self._resource} that can't be read: {reason}", remedy, relist=True)

    def _list_endpoints(self) -> dict[Endpoint, FoundEndpoint]:
        """Return the endpoints of all objects. One that is in several, as during a change of slices, has the best of its states."""
        endpoints: dict[Endpoint, FoundEndpoint] = {}
        for each in self._objects.values():
            for endpoint, found in list_endpoints(each, self._wanted.port):
                before = endpoints.get(endpoint)
                if before is None or _PREFERENCE.index(found.state) < _PREFERENCE.index(before.state):
                    endpoints[endpoint] = found
        return dict(sorted(endpoints.items(), key=lambda item: item[0]))

    def _make_answer(self) -> SourceAnswer:
        endpoints = self._list_endpoints()
        wanted = self._wanted
        if any(found.state is NodeState.READY for found in endpoints.values()):
            return SourceAnswer(endpoints)
        if endpoints:
            return SourceAnswer(
                endpoints, f"none of the {len(endpoints)} endpoints of {wanted.title} is ready", "check the pods' readiness"
            )
        names = sorted({name for each in self._objects.values() for name in each.ports_by_name if name})
        if names and isinstance(wanted.port, str) and wanted.port not in names:
            return SourceAnswer(endpoints, f"{wanted.title}: no port is named {wanted.port!r}", f"there are: {', '.join(names)}")
        remedy = "check `service`, `namespace` and the Service's selector" if wanted.service else "check `selector` and `namespace`"
        return SourceAnswer(endpoints, f"{wanted.title}: there is no pod", remedy)


async def _read_lines(stream: aiohttp.StreamReader) -> AsyncIterator[list[bytes]]:
    """Yield the complete lines of each piece that arrives.

    Raises:
        _WatchFailed: a line is longer than 8 MiB.
    """
    rest = b""
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise _WatchFailed("the API server sends an event of more than 8 MiB", "check what answers at its address", relist=True)
        if lines:
            yield [line for line in lines if line.strip()]
