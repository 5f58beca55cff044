"""The whole product as a user runs it: `din-extproc serve` and a real Envoy with the rendered configuration in front of given nodes.

Rule: tests use only the command line and the ports, as a user does.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import redis
import yaml

from din_extproc.admit.keys import ENTROPY_BYTES, make_key
from din_extproc.edge.process.envoy_binary import find_envoy
from din_extproc.roles.configure.render import render_envoy
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.support.servers import RedisServer, end_children, free_port
from tests.support.waiting import eventually

_BOOT_SECONDS = 120.0


def key_of(tenant: str) -> str:
    """Return the API key of a test tenant, always the same."""
    return _made(tenant).text


def _made(tenant: str):
    return make_key(tenant, hashlib.shake_256(tenant.encode()).digest(ENTROPY_BYTES))


def tenant(name: str, *, models: tuple[str, ...] = ("*",), **limits: int) -> dict[str, Any]:
    """Return a tenant with one key, `key_of(name)`; without limits unless given."""
    generous = {"rpm": 1_000_000, "tpm": 100_000_000, "max_streams": 10_000}
    return {
        "id": name,
        "keys": [{"id": name, "hash": _made(name).hash}],
        "models": list(models),
        "limits": {**generous, **limits},
    }


def node(name: str, address: str, **fields: Any) -> dict[str, Any]:
    """Return one node of a pool."""
    return {"id": name, "address": address, "version": "2025.3.1", "dtype": "bf16", "max_seq_len": 8192, "max_concurrency": 64, **fields}


class Stack:
    """Envoy, the sidecar and Redis. A context manager.

    Args:
        config: Sections of `din.yaml`, without `gateway`, `store` and Envoy's addresses: those are free ports and sockets of this stack.
        server: A running Redis to use; None starts one of its own.
        serve: Further options of `din-extproc serve`.
        gateway: Further fields of the `gateway` section.
        admin_keys: Of the admin port.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        server: RedisServer | None = None,
        serve: tuple[str, ...] = (),
        gateway: Mapping[str, Any] | None = None,
        admin_keys: list[dict[str, Any]] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="din-stack-"))
        self.port = free_port()
        self.admin_port, self.envoy_admin_port, self.access_log_port = free_port(), free_port(), free_port()
        self._own_redis = server is None
        self.redis = server or RedisServer()
        self._serve = serve
        self._gateway = dict(gateway or {})
        self._admin_keys = admin_keys or []
        self.config_file = self.folder / "din.yaml"
        self.sidecar: subprocess.Popen[bytes] | None = None
        self.envoy: subprocess.Popen[bytes] | None = None
        self.tls: ssl.SSLContext | None = None
        """TLS context for the admin port."""
        self.write(config)

    def write(self, config: Mapping[str, Any]) -> None:
        """Write the configuration; a running sidecar applies it within two seconds."""
        own = {
            "version": 1,
            "gateway": {
                "ext_proc": {"socket": str(self.folder / "ext_proc.sock")},
                "access_log": {"address": f"127.0.0.1:{self.access_log_port}"},
                "admin": {"address": f"127.0.0.1:{self.admin_port}", "keys": self._admin_keys},
                **self._gateway,
            },
            "envoy": {
                "listener": f"127.0.0.1:{self.port}",
                "admin": f"127.0.0.1:{self.envoy_admin_port}",
                "access_log_flush_ms": 10,
                **config.get("envoy", {}),
            },
            "store": {"url": self.redis.url, "timeout_ms": 1000, **config.get("store", {})},
            "health": {"probe": False, **config.get("health", {})},  # engines that are counted on see nothing but a test's requests
        }
        text = yaml.safe_dump({**config, **own}, sort_keys=False)
        new = self.config_file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.config_file)

    @property
    def admin_url(self) -> str:
        """The URL of the sidecar's admin port."""
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.admin_port}"

    @property
    def url(self) -> str:
        """The URL that clients call."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start everything and wait until it is ready."""
        try:
            if self._own_redis:
                self.redis.start()
            self.start_sidecar()
            self.start_envoy()
        except BaseException:
            self.stop()
            raise
        return self

    def start_sidecar(self, *, ready: bool = True) -> None:
        """Start `din-extproc serve`."""
        command = [sys.executable, "-m", "din_extproc", "serve", "--config", self.config_file, *self._serve]
        self.sidecar = self._child("sidecar", command)
        if ready:
            self._await("sidecar", self.sidecar, lambda: self._answers(f"{self.admin_url}/readyz"))

    def start_envoy(self, configuration: str = "") -> None:
        """Start Envoy with the output of `render envoy` (rendered in this process, which is faster), or with this configuration."""
        rendered = self.folder / "envoy.yaml"
        settings = load(self.config_file, {})
        assert isinstance(settings, Settings), str(settings)
        xds = settings.gateway.xds is not None
        rendered.write_text(configuration or render_envoy(settings, xds=xds, node_id="envoy-of-this-test"))
        binary = find_envoy()
        command = [binary, "--config-path", rendered, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        self.envoy = self._child("envoy", command)
        self._await("envoy", self.envoy, lambda: self._answers(f"http://127.0.0.1:{self.envoy_admin_port}/ready"))

    def log(self, part: str) -> str:
        """Return the log of `sidecar` or `envoy`."""
        return (self.folder / f"{part}.log").read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """Return the sidecar's `/status`."""
        with urllib.request.urlopen(f"{self.admin_url}/status", timeout=30, context=self.tls) as reply:
            return json.loads(reply.read())

    def envoy_stats(self, contains: str) -> dict[str, int]:
        """Return Envoy's counters and gauges whose name contains this."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.envoy_admin_port}/stats?filter={contains}", timeout=30) as reply:
            lines = [line.rpartition(": ") for line in reply.read().decode().splitlines()]
        return {name: int(value) for name, _, value in lines if value.isdigit()}

    def client(self, name: str | None = "acme", **options: Any) -> httpx.Client:
        """Return an HTTP client with the tenant's key; None: without one."""
        headers = {} if name is None else {"authorization": f"Bearer {key_of(name)}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, verify=False, **options)  # no TLS here, no certificates to load

    def chat(
        self, body: Mapping[str, Any] | None = None, *, tenant_name: str = "acme", headers: Mapping[str, str] | None = None, **fields: Any
    ):
        """Send a chat completion with small defaults; `fields` go into the body."""
        content = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **(body or {}), **fields}
        with self.client(tenant_name) as client:
            return client.post("/v1/chat/completions", json=content, headers=dict(headers or {}))

    def redis_keys(self, contains: str) -> list[str]:
        """Return the keys in Redis whose name contains this."""
        with redis.Redis(port=self.redis.port, decode_responses=True) as connection:
            return sorted(connection.scan_iter(f"*{contains}*"))

    def eventually(self, holds: Callable[[], Any], what: Any) -> None:
        """Wait until a condition holds."""
        eventually(holds, what)

    def settled(self, exchanges: int) -> dict[str, Any]:
        """Return the sidecar's status once `exchanges` are settled and none is open."""

        def done() -> bool:
            status = self.status()
            return sum(status["counts"]["outcomes"].values()) >= exchanges and not status["exchanges"]["open"]

        self.eventually(done, lambda: f"{exchanges} settled exchanges; {self.status()}")
        return self.status()

    def cost(self, reply: httpx.Response) -> tuple[int, int]:
        """Return the prompt and completion tokens that an exchange was charged, once it is settled."""
        line = self.logged(reply)
        return line.get("prompt_tokens", 0), line.get("completion_tokens", 0)

    def logged(self, reply: httpx.Response) -> dict[str, Any]:
        """Return what the sidecar logs of an exchange, once it is settled."""
        trace = reply.headers["x-din-trace-id"]

        def lines() -> list[dict[str, Any]]:
            logged = (json.loads(line) for line in self.log("sidecar").splitlines() if trace in line)
            return [line for line in logged if "outcome" in line]

        self.eventually(lines, trace)
        return lines()[0]

    def all_accounted(self) -> dict[str, Any]:
        """Return the sidecar's status once the access log of every decided request has come. Only where no request lists models."""

        def done() -> bool:
            counts = self.status()["counts"]
            return sum(counts["outcomes"].values()) >= counts["sent"] + sum(counts["refused"].values())

        self.eventually(done, lambda: f"every decided request is accounted for; {self.status()}")
        return self.status()

    def stop(self) -> None:
        """End everything that was started and remove its folder."""
        end_children(self.envoy, self.sidecar)
        if self._own_redis:
            self.redis.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _child(self, name: str, command: list[Any]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONWARNINGS": ""})

    def _await(self, name: str, child: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _BOOT_SECONDS
        while not ready():
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{self.log(name)}")
            time.sleep(0.02)

    def _answers(self, url: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2, context=self.tls) as reply:
            return reply.status == 200
        return False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def events(text: str) -> list[Any]:
    """Return the data of a stream's events, without `[DONE]`."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def raw_request(port: int, data: bytes, seconds: float = 60.0) -> bytes:
    """Send bytes to the listener and return everything until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(data)
        parts = []
        with contextlib.suppress(TimeoutError):
            while part := connection.recv(65536):
                parts.append(part)
    return b"".join(parts)
