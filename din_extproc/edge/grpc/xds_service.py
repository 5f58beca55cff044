"""Discovery as a service: Envoys' streams, and the updates that they receive.

Invariant: one Envoy gets a change per turn of the loop, and each one only after it has answered the previous one. A
slow Envoy misses intermediate changes, never the newest.
"""

import asyncio
from collections.abc import Mapping

from din_extproc.control.discovery import LABELS, DiscoveryStream
from din_extproc.control.snapshot import Snapshot
from din_extproc.edge.grpc.services import INVALID_ARGUMENT, CallHandler, OpenCall, ServerCall


class DiscoveryService:
    """`AggregatedDiscoveryService`, whole and in changes.

    Args:
        snapshot: What is served first.
    """

    name = "envoy.service.discovery.v3.AggregatedDiscoveryService"

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.streams: dict[_XdsStream, None] = {}
        self._waiting: dict[_XdsStream, None] = {}
        """Streams that have not been told of the latest change."""
        self._publishing = False
        self._moved = asyncio.Event()

    def methods(self) -> Mapping[str, OpenCall]:
        """One for each protocol."""
        return {
            "StreamAggregatedResources": lambda call: self._open(call, delta=False),
            "DeltaAggregatedResources": lambda call: self._open(call, delta=True),
        }

    async def drain(self) -> None:
        """End every stream: its Envoy looks for another server, and goes on meanwhile with what it knows."""
        for stream in list(self.streams):
            stream.ended(cancelled=False)

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this from now on."""
        self.snapshot = snapshot
        self._waiting = dict(self.streams)
        if not self._publishing:
            self._publishing = True
            asyncio.get_running_loop().call_soon(self._publish_next)

    async def wait_settled(self) -> None:
        """Wait until every Envoy that is connected has answered to all there is."""
        while self._waiting or not all(stream.discovery.settled for stream in self.streams):
            self._moved.clear()
            await self._moved.wait()

    def snapshot_status(self) -> dict[str, object]:
        """The versions that are served, and how each Envoy stands, in the order in which they came."""
        served = {label: self.snapshot.versions[type_url] for type_url, label in LABELS.items()}
        return {"served": served, "envoys": [stream.discovery.status() for stream in self.streams]}

    def on_progress(self) -> None:
        """A stream has got further, or is gone."""
        self._moved.set()

    def remove(self, stream: "_XdsStream") -> None:
        """A stream is over."""
        self.streams.pop(stream, None)
        self._waiting.pop(stream, None)
        self.on_progress()

    def _open(self, call: ServerCall, *, delta: bool) -> CallHandler:
        stream = _XdsStream(call, self, DiscoveryStream(self.snapshot, delta=delta))
        self.streams[stream] = None
        return stream

    def _publish_next(self) -> None:
        stream = next(iter(self._waiting), None)
        if stream is None:
            self._publishing = False
            self.on_progress()
            return
        del self._waiting[stream]
        asyncio.get_running_loop().call_soon(self._publish_next)
        stream.publish(self.snapshot)


class _XdsStream:
    """One Envoy's call."""

    __slots__ = ("_call", "_service", "discovery")

    def __init__(self, call: ServerCall, service: DiscoveryService, discovery: DiscoveryStream) -> None:
        self._call = call
        self._service = service
        self.discovery = discovery

    def message(self, data: bytes) -> None:
        try:
            responses = self.discovery.receive(data)
        except ValueError as error:
            self._call.fail(INVALID_ARGUMENT, str(error))
            self._service.remove(self)
            return
        self._send(responses)

    def publish(self, snapshot: Snapshot) -> None:
        """The snapshot is another."""
        self._send(self.discovery.publish(snapshot))

    def ended(self, *, cancelled: bool) -> None:
        self._service.remove(self)
        if not cancelled:
            self._call.finish()

    def _send(self, responses: list[bytes]) -> None:
        for response in responses:
            self._call.send(response)
        self._service.on_progress()
