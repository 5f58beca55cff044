"""A node as its operator runs it: `din-extproc node` beside an engine and, optionally, the rendered Envoy in front.

Rule: tests use only the command line and the ports, as an operator does.
"""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from din_extproc.edge.process.envoy_binary import find_envoy
from din_extproc.roles.configure.render import render_node
from din_extproc.settings.node import NodeSettings, load_node
from tests.support.fakes import FakeRegistry
from tests.support.servers import end_children, free_port

_BOOT_SECONDS = 60.0


class RegistryThread:
    """A `FakeRegistry` in a thread of its own. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeRegistry:
        self._thread.start()
        self._registry = self._run(self._make())
        return self._registry

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._run(self._registry.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    @staticmethod
    async def _make() -> FakeRegistry:
        registry = FakeRegistry()
        await registry.start()
        return registry

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


class NodeStack:
    """A node's agent, and the Envoy in front of its engine. A context manager.

    Args:
        engine: The engine's `address:port`.
        registry: Base URL of the registry.
        model: The name of model and served model.
        envoy: Whether there is an Envoy in front.
        node: Further fields of the section `node`.
        token_file: The file with the node's token.
        registry_tls: The `tls` section for the registry.
        sections: Further sections of node.yaml.
    """

    def __init__(
        self,
        engine: str,
        registry: str,
        *,
        model: str = "sim-model",
        envoy: bool = False,
        node: Mapping[str, Any] | None = None,
        token_file: str | None = None,
        registry_tls: Mapping[str, str] | None = None,
        **sections: Any,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="din-agent-"))
        self.health_port, self.port, self.envoy_admin_port = free_port(), free_port(), free_port()
        self.agent: subprocess.Popen[bytes] | None = None
        self.envoy: subprocess.Popen[bytes] | None = None
        self._with_envoy = envoy
        if envoy:
            own = {"socket": str(self.folder / "node.sock")}
            proxy = {"listener": f"127.0.0.1:{self.port}", "admin": f"127.0.0.1:{self.envoy_admin_port}", "ext_proc": own}
            sections["proxy"] = {**proxy, **sections.get("proxy", {})}
        self.address = f"127.0.0.1:{self.port}" if envoy else engine
        self.config = {
            "version": 1,
            "node": {
                "id": "gpu-1",
                "address": self.address,
                "model": model,
                "version": "2025.3.1",
                "dtype": "bf16",
                "max_seq_len": 8192,
                **(node or {}),
            },
            "engine": {"kind": "vllm", "address": engine},
            "registry": {"heartbeat_s": 0.2, "token_file": token_file, "addresses": [registry], "tls": registry_tls},
            "health": {"address": f"127.0.0.1:{self.health_port}"},
            **sections,
        }
        self.file = self.folder / "node.yaml"

    def start(self, *, ready: bool = True) -> Self:
        """Start and, if `ready`, wait until the node accepts requests."""
        try:
            self.file.write_text(yaml.safe_dump(self.config, sort_keys=False))
            self.start_agent()
            if self._with_envoy:
                self._start_envoy()
            if ready:
                self.eventually(lambda: self.health(self.port if self._with_envoy else None)[0] == 200, "a node that is ready")
        except BaseException:
            self.stop()
            raise
        return self

    def start_agent(self) -> None:
        """Start the agent alone, again after it has ended."""
        self.agent = self._child("agent", [sys.executable, "-m", "din_extproc", "node", "--config", self.file])

    def _start_envoy(self) -> None:
        settings = load_node(self.file, {})
        assert isinstance(settings, NodeSettings), str(settings)
        rendered = self.folder / "envoy.yaml"
        rendered.write_text(render_node(settings))
        command = [find_envoy(), "--config-path", rendered, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        command += ["--file-flush-interval-msec", "100"]
        self.envoy = self._child("envoy", command)

    def health(self, port: int | None = None) -> tuple[int, dict[str, Any]]:
        """Return status and body of `/health` from the agent or through Envoy; status 0: no answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port or self.health_port}/health", timeout=5) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except OSError:
            return 0, {}

    def client(self) -> httpx.Client:
        """Return a client of the Envoy in front, as a gateway has."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30, headers={"x-din-trace-id": "trace-of-a-test"})

    def log(self, part: str = "agent") -> str:
        """Return the log of `agent` or `envoy`."""
        return (self.folder / f"{part}.log").read_text(errors="replace")

    def eventually(self, holds: Callable[[], Any], what: str) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + _BOOT_SECONDS
        while not holds():
            ended = [child for child in (self.agent, self.envoy) if child is not None and child.poll() is not None]
            assert not ended, f"{ended[0].args} ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"never happened: {what}\n{self.log()}"
            time.sleep(0.02)

    def wait(self) -> int:
        """Wait until the agent has ended by itself and return its exit code."""
        assert self.agent is not None
        return self.agent.wait(_BOOT_SECONDS)

    def stop(self) -> None:
        """End the processes and remove the folder."""
        end_children(self.envoy, self.agent)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _child(self, name: str, command: list[Any]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | {"XDG_CACHE_HOME": str(self.folder)}
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.stop()
