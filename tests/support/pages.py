"""The commands of README and documentation pages, and a console that runs them on this machine.

Addresses become free ports on loopback; stand-ins replace programs that reach outside and check the same thing here.
Invariant: a command runs as written apart from those addresses, and the console ends what it starts.
"""

import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from din_extproc.edge.process.envoy_binary import find_envoy
from din_extproc.tools.demo.binaries import find_redis

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "deploy" / "docs" / "pages"
TEXTS = {"README": (ROOT / "README.md").read_text()} | {
    str(page.relative_to(PAGES).with_suffix("")): page.read_text() for page in sorted(PAGES.rglob("*.md"))
}
"""The text of each page by its path."""
EXECUTED = {"sh", "python", "console"}
"""Languages of blocks that `tests/e2e` runs: `test_documented_commands.py` asserts that none is left out."""
_STANDINS = {
    "din-extproc": f'exec {sys.executable} -m din_extproc "$@"',
    "pip": f'test "$1" = install && exec {sys.executable} -m pip install --dry-run --no-deps --quiet "{ROOT}${{2#.}}"',
    "python3": 'test "$*" = "-m venv .venv" && mkdir -p .venv/bin && touch .venv/bin/activate',
    "make": f'exec {shutil.which("make")} --dry-run -C {ROOT} "$1"',
    "docker": f'exec {sys.executable} -m tests.deploy.standins docker "$@"',
    "helm": f'exec {sys.executable} -m tests.deploy.standins helm "$@"',
    "kubectl": f'exec {sys.executable} -m tests.deploy.standins kubectl "$@"',
    "sudo": f'exec {sys.executable} -m tests.deploy.standins sudo "$@"',
}
"""`make demo` and `make demo-check` have tests of their own; here their targets need to be there."""


class Block(NamedTuple):
    """A fenced code block."""

    page: str
    language: str
    text: str


def all_blocks() -> list[Block]:
    """Return every fenced code block of every page, indented ones too."""
    found = [
        Block(page, language, textwrap.dedent(inner))
        for page, text in TEXTS.items()
        for _, language, inner in re.findall(r"^([ ]*)```([^\n`]*)\n(.*?)^\1```[ ]*$", text, re.MULTILINE | re.DOTALL)
    ]
    fences = sum(len(re.findall(r"^[ ]*(?:```|~~~)", text, re.MULTILINE)) for text in TEXTS.values())
    assert fences == 2 * len(found), "a code block without an end, or with another fence than ```"
    return found


def code_blocks(page: str, language: str) -> list[str]:
    """Return a page's fenced code blocks of one language."""
    return [block.text for block in all_blocks() if (block.page, block.language) == (page, language)]


def shell_blocks() -> dict[str, list[list[str]]]:
    """Return the shell blocks by page, each as its commands."""
    found = {page: [_commands(text) for text in code_blocks(page, "sh")] for page in TEXTS}
    return {page: blocks for page, blocks in found.items() if blocks}


def _commands(block: str) -> list[str]:
    """Whole commands: a line whose quotes are open, or that ends with a backslash, goes on in the next one."""
    commands, text = [], ""
    for line in block.splitlines():
        text = f"{text}\n{line}" if text else line
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            continue
        if not line.endswith("\\"):
            commands += [text] if words else []
            text = ""
    assert not text, f"a command without an end: {text}"
    return commands


class Console:
    """A folder with a shell. A context manager.

    Args:
        instead: What stands for what in a command: addresses, keys, tokens.
        environment: Variables on top of ours.
    """

    def __init__(self, instead: Mapping[str, str], **environment: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="din-readme-"))
        self._instead = instead
        programs = self.folder / ".bin"
        programs.mkdir()
        for name, script in _STANDINS.items():
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(stat.S_IRWXU)
        (programs / "envoy").symlink_to(find_envoy())
        (programs / "redis-server").symlink_to(find_redis())
        path = f"{programs}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "", **environment}
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, command: str) -> str:
        """Run it; returns what it says. One that ends with `&`, and an Envoy, go on until the end; a variable that it exports stays."""
        for text, other in self._instead.items():
            command = command.replace(text, other)
        words = shlex.split(command, comments=True)
        if words[-1] == "&" or words[0] == "envoy":
            self._start([word for word in words if word != "&"])
            return ""
        exported = words[1].partition("=")[0] if words[0] == "export" else ""
        if exported:
            command = f'{command}\nprintf %s "${exported}"'
        done = subprocess.run(
            ["bash", "-ec", command], cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if exported:
            self._environment[exported] = done.stdout
        return done.stdout

    def end(self, *words: str) -> None:
        """End what runs with these words."""
        program = next(each for each in self._running if set(words) <= set(each.args))
        program.terminate()
        program.wait(15)

    def _start(self, words: list[str]) -> None:
        if words[0] == "envoy":
            words += ["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning"]
        with (self.folder / f"{words[0]}.log").open("ab") as log:
            program = subprocess.Popen(words, cwd=self.folder, env=self._environment, stdout=log, stderr=log, start_new_session=True)
        self._running.append(program)

    def eventually(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            logs = "".join(log.read_text(errors="replace") for log in self.folder.glob("*.log"))
            assert time.monotonic() < deadline, logs
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for program in reversed(self._running):
            if program.poll() is None:
                program.terminate()
                try:
                    program.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(program.pid, signal.SIGKILL)
                    program.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
