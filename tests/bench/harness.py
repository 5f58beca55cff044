"""The basis of all measurements: CPU pinning, CPU time and memory of processes, child programs, and the load.

Rule: CPU time is the kernel's count for the process and all its threads; nothing is sampled.
"""

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct

_BOOT_SECONDS = 90.0
_ROLES = {1: {}, 2: {"envoy": 0}, 3: {"envoy": 0, "server": 1, "redis": 1}, 4: {"envoy": 0, "server": 1, "redis": 2}}
"""Core of each role by number of cores; other roles run on the last one."""
_TICKS = os.sysconf("SC_CLK_TCK")


def core(role: str) -> int | None:
    """The core of a role: `envoy` (or another whole gateway), `server` (ext_proc), `redis`, `load` (node and client). None: any."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    used = cores[:4]
    return used[_ROLES[len(used)].get(role, len(used) - 1)]


def pin(pid: int, role: str) -> None:
    """Pin a process with all its threads to its role's core."""
    chosen = core(role)
    for task in Path(f"/proc/{pid}/task").iterdir() if chosen is not None else ():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {chosen})


def pin_self(role: str) -> None:
    """Pin this process, as its first action."""
    pin(os.getpid(), role)


def ahead(pid: int) -> bool:
    """Let the process, with every thread it has, go before all that is scheduled as usual. False: the kernel does not let us."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += int((task / "schedstat").read_bytes().split()[0])
    except (PermissionError, IndexError):
        total = 0
    if total:
        return total / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a kernel without scheduler statistics: 10 ms steps
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_bytes(pid: int) -> int:
    """Return the private, anonymous memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


class Child:
    """A program of this package that prints `LISTENING` when it is ready, and answers lines. A context manager."""

    def __init__(self, *command: object) -> None:
        self._command = [str(part) for part in command]
        self.process: subprocess.Popen[str] | None = None

    @classmethod
    def module(cls, name: str, *arguments: object) -> Self:
        """`python -m tests.bench.<name>`."""
        return cls(sys.executable, "-m", f"tests.bench.{name}", *arguments)

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    def start(self) -> Self:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=os.environ | {"PYTHONWARNINGS": ""}
        )
        if self.read(_BOOT_SECONDS).strip() != "LISTENING":
            self.stop()
            raise RuntimeError(f"{' '.join(self._command[:4])} did not start")
        return self

    def ask(self, line: str, seconds: float) -> str:
        """Write a line and return the answer."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read(seconds)

    def read(self, seconds: float) -> str:
        """Return the next line.

        Raises:
            TimeoutError: none came in time.
        """
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            raise TimeoutError(f"{' '.join(self._command[:4])} printed nothing for {seconds:.0f} s")
        return self.process.stdout.readline()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


class Load(Child):
    """The load generator."""

    def __init__(self) -> None:
        super().__init__(sys.executable, "-m", "tests.bench.load")

    def run(self, port: int, request: str, seconds: float, *, connections: int = 16, rate: float = 0.0) -> Mapping[str, float]:
        """One run; see `tests.bench.load.Tally` for what comes back.

        Raises:
            RuntimeError: something failed.
        """
        order = {"port": port, "request": request, "seconds": seconds, "connections": connections, "rate": rate}
        result = json.loads(self.ask(json.dumps(order), seconds + 60))
        if result["failures"] or not result["requests"]:
            raise RuntimeError(f"{result['failures']} of {result['requests']} requests failed: {result['first_failure']}")
        return result


class Spent(Struct, frozen=True):
    """The cost of one run: CPU in microseconds per request, by part."""

    requests: int
    per_second: float
    cpu_us: dict[str, float]
    p50_ms: float
    p99_ms: float


def spend(parts: Mapping[str, int], run: Callable[[], Mapping[str, float]], *, rest_s: float = 0.08) -> Spent:
    """Run, and measure the CPU of processes meanwhile and in the `rest_s` after, in which access logs arrive."""
    before = {part: cpu_s(pid) for part, pid in parts.items()}
    result = run()
    time.sleep(rest_s)
    requests = int(result["requests"])
    used = {part: (cpu_s(pid) - before[part]) / requests * 1e6 for part, pid in parts.items()}
    return Spent(requests, requests / result["seconds"], used, result["p50_ms"], result["p99_ms"])


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the lowest and the highest value."""
    ordered = sorted(values)
    return ordered[0], ordered[-1]
