"""Writes a streamed answer to its connection token by token, from the engine's tick: no task wakes up per token.

Rule: all injected faults of streams happen here.
"""

import asyncio
import re
import socket
import struct
from collections.abc import Mapping
from typing import Final

from din_extproc.tools.engine_model.api import EngineStream
from din_extproc.tools.engine_model.engine import Emission
from din_extproc.tools.engine_model.errors import ENGINE_DIED
from din_extproc.tools.engine_model.faults import Fault

_event_ends = re.compile(rb"(?<=\n\n)").split
_STRIKES: Final = ("reset", "stall", "error_event", "truncate", "insert")


class Delivery:
    """One stream being sent. `done` gives its end: `completed`, `faulted` or `silent` (nothing more will come)."""

    def __init__(self, transport: asyncio.Transport, events: EngineStream, choices: int, faults: Mapping[str, Fault]) -> None:
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._transport = transport
        self._events = events
        self._positions = [0] * choices
        self._open = set(range(choices))
        self._sent = 0
        self._opened = False
        self._is_silent = False
        self._strikes = {kind: faults[kind] for kind in _STRIKES if kind in faults}
        drip = faults.get("drip")
        self._drip = None if drip is None else ThrottledWriter(transport, drip.bytes, drip.ms / 1000)

    def begin(self) -> None:
        """Begin after the response head. Faults without `after` occur now."""
        self._apply_faults()

    def token(self, index: int, emission: Emission) -> None:
        """Send a token of a choice."""
        if self._is_silent:
            return
        if not self._opened:
            self._opened = True
            self._write(self._events.opening())
        position = self._positions[index]
        self._positions[index] = position + 1
        self._write(self._events.token(index, position))
        self._sent += 1
        if emission.is_last:
            self._open.discard(index)
        self._apply_faults()
        if not self._open and not self._is_silent:
            self._write_chunks(self._events.closing())
            self._end("completed")

    def abort(self) -> None:
        """Abort because the engine shuts down: every running choice ends with `abort`, as vLLM does on SIGTERM."""
        if self._is_silent:
            return
        for index in self._open:
            self._write(self._events.token(index, max(0, self._positions[index] - 1), finish="abort"))
        self._write(self._events.aborted())
        self._end("faulted")

    async def drained(self) -> None:
        """Wait until everything written has left this object."""
        if self._drip is not None:
            await self._drip.empty()

    def _apply_faults(self) -> None:
        """Apply the faults that are due."""
        for kind, fault in self._strikes.items():
            if self._is_silent or (fault.after or 0) != self._sent:
                continue
            match kind:
                case "reset":
                    reset(self._transport)
                    self._end("faulted")
                case "stall":
                    self._end("silent")
                case "error_event":
                    self._write_chunks(self._events.failed(fault.message or ENGINE_DIED, as_text=fault.text))
                    self._end("faulted")
                case "truncate":
                    self._end("faulted")
                case _:
                    self._write(fault.body.encode())

    def _end(self, outcome: str) -> None:
        self._is_silent = True
        if not self.done.done():
            self.done.set_result(outcome)

    def _write_chunks(self, events: bytes) -> None:
        """Write each event as an HTTP chunk, all in one write."""
        parts = _event_ends(events)
        self._put(b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part))

    def _write(self, event: bytes) -> None:
        if event:
            self._put(b"%x\r\n%s\r\n" % (len(event), event))

    def _put(self, data: bytes) -> None:
        if self._drip is not None:
            self._drip.add(data)
        elif not self._transport.is_closing():
            self._transport.write(data)


class ThrottledWriter:
    """Writes bytes slowly, a few at a time."""

    def __init__(self, transport: asyncio.Transport, size: int, every_s: float) -> None:
        self._transport = transport
        self._size = size
        self._every_s = every_s
        self._pending = bytearray()
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, data: bytes) -> None:
        """Queue bytes."""
        self._pending += data
        if self._empty.is_set():
            self._empty.clear()
            self._drop()

    async def empty(self) -> None:
        """Wait until nothing is queued."""
        await self._empty.wait()

    def _drop(self) -> None:
        if not self._pending or self._transport.is_closing():
            self._empty.set()
            return
        self._transport.write(bytes(self._pending[: self._size]))
        del self._pending[: self._size]
        asyncio.get_running_loop().call_later(self._every_s, self._drop)


def reset(transport: asyncio.Transport) -> None:
    """Close a connection with RST instead of FIN, dropping unsent data."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
