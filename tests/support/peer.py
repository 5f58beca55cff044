"""Envoy's side of ext_proc, without sockets: which messages it sends, when, and what it accepts as a reply.

Rule: `EnvoyPeer` waits where Envoy waits (one reply per message, in order) and is as strict as Envoy with mutations.
Modelled on the filter of Envoy 1.36 to 1.40 with `request_body_mode: BUFFERED`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.json_format import MessageToDict

from din_extproc._proto.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValueOption
from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import HeaderMutation, ProcessingRequest, ProcessingResponse

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_REFUSED = frozenset({"host", ":authority", ":scheme", ":method"})


class SpuriousError(AssertionError):
    """A reply that Envoy would count as spurious or reject."""


def message(kind: str, headers: dict[str, str] | None = None, *, body: bytes = b"", end: bool = False) -> bytes:
    """Return a serialised `ProcessingRequest`: `kind` is its member, such as `request_headers`."""
    request = ProcessingRequest()
    part = getattr(request, kind)
    part.SetInParent()
    if kind.endswith("headers"):
        part.headers.CopyFrom(header_map(headers or {}))
        part.end_of_stream = end
    elif kind.endswith("body"):
        part.body = body
        part.end_of_stream = end
    return request.SerializeToString()


def header_map(headers: dict[str, str]) -> HeaderMap:
    made = HeaderMap()
    for name, value in headers.items():
        made.headers.add(key=name, raw_value=value.encode("latin-1"))
    return made


@dataclass
class Reached:
    """The request that the node would have received."""

    headers: dict[str, str]
    body: bytes


@dataclass
class Answered:
    """The answer that the client received."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class EnvoyPeer:
    """One HTTP exchange. `body` None: the head ends the request. `trailers`: they follow the body, and `request_trailer_mode` is SEND.

    `node_status` and `node_headers`: how the node answers.
    """

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = b"{}"
    method: str = "POST"
    path: str = "/v1/chat/completions"
    trailers: bool = False
    node_status: int = 200
    node_headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    reached: Reached | None = None
    answered: Answered | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    _waits_for: str = ""

    def messages(self) -> Iterator[bytes]:
        """Yield Envoy's messages. Before the next one, the reply to this one must have been given to `reply`."""
        head = {":method": self.method, ":path": self.path, ":authority": "localhost", ":scheme": "http", **self.headers}
        if self.body is not None:
            head.setdefault("content-length", str(len(self.body)))
        self.reached = Reached(head, self.body or b"")
        yield self._ask("request_headers", message("request_headers", head, end=self.body is None and not self.trailers))
        if self.body is not None:
            yield self._ask("request_body", message("request_body", body=self.body, end=not self.trailers))
        if self.trailers and self.answered is None:
            yield self._ask("request_trailers", message("request_trailers"))
        if self.answered is not None:
            self.reached = None
            return
        self.answered = Answered(self.node_status, {":status": str(self.node_status), **self.node_headers}, b"")
        yield self._ask("response_headers", message("response_headers", self.answered.headers))

    def reply(self, data: bytes) -> None:
        """Take one reply.

        Raises:
            SpuriousError: Envoy would reject it.
        """
        response = ProcessingResponse.FromString(data)
        kind = response.WhichOneof("response")
        waited_for, self._waits_for = self._waits_for, ""
        self._take_metadata(response)
        if kind == "immediate_response" and waited_for:
            given = response.immediate_response
            headers: dict[str, str] = {}
            _mutate(headers, given.headers)
            self.answered = Answered(given.status.code, headers, given.body)
            return
        if kind != waited_for:
            raise SpuriousError(f"{kind} came while Envoy waited for {waited_for or 'nothing'}")
        if kind == "request_trailers":
            return
        assert self.reached is not None
        common = getattr(response, kind).response
        if kind == "response_headers":
            assert self.answered is not None
            _mutate(self.answered.headers, common.header_mutation)
            return
        if common.clear_route_cache and not common.HasField("header_mutation"):
            raise SpuriousError("clear_route_cache without a header mutation is ignored")
        _mutate(self.reached.headers, common.header_mutation)
        if common.HasField("body_mutation"):
            if kind != "request_body":
                raise SpuriousError(f"a body mutation at {kind}")
            self.reached.body = common.body_mutation.body
        length = self.reached.headers.get("content-length", "")
        if kind == "request_body" and length and int(length) != len(self.reached.body):
            raise SpuriousError(f"content-length {length} for a body of {len(self.reached.body)}")

    def _ask(self, kind: str, data: bytes) -> bytes:
        if self._waits_for:
            raise SpuriousError(f"{self._waits_for} was never answered")
        self._waits_for = kind
        return data

    def _take_metadata(self, response: ProcessingResponse) -> None:
        given = MessageToDict(response.dynamic_metadata)
        if given.keys() - {"din"}:
            raise SpuriousError(f"metadata namespaces {set(given)} are not received")
        self.metadata.update(given.get("din", {}))


def _mutate(headers: dict[str, str], mutation: HeaderMutation) -> None:
    for name in mutation.remove_headers:
        headers.pop(name, None)
    for option in mutation.set_headers:
        name, value = option.header.key, option.header.raw_value
        if name in _REFUSED or name.startswith("x-envoy-"):
            raise SpuriousError(f"{name} may not be mutated")
        if option.append_action != HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD:
            raise SpuriousError(f"{name} would be appended")
        if option.header.value or _CONTROL.search(value):
            raise SpuriousError(f"{name} has a value that is rejected")
        headers[name] = value.decode("latin-1")


class Stream(Protocol):
    """The client's end of one call, as a stream-stream call of `grpc.aio`."""

    async def write(self, request: bytes) -> None: ...

    async def read(self) -> Any: ...

    async def done_writing(self) -> None: ...


async def play(peer: EnvoyPeer, stream: Stream) -> EnvoyPeer:
    """Play the whole exchange over a call, close it as Envoy does, and return the peer."""
    for data in peer.messages():
        await stream.write(data)
        given = await stream.read()
        if not isinstance(given, bytes):
            raise SpuriousError("the stream ended while a reply was due")
        peer.reply(given)
    await stream.done_writing()
    assert not isinstance(await stream.read(), bytes), "a reply that nothing asked for"
    return peer
