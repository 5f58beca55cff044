"""Plain Envoys for comparison: alone, with an ext_proc server, with the usage filter.

Rule: what two of them have in common is the same text, so that the difference is what is measured.
"""

import json
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from din_extproc.edge.process.envoy_binary import find_envoy
from din_extproc.roles.configure.render import usage_lua
from tests.bench.harness import pin
from tests.support.servers import free_port

_BOOT_SECONDS = 30.0
_TYPE = "type.googleapis.com/envoy.extensions"
_BUFFER = 32 << 20


def _cluster(name: str, address: dict[str, Any], *, http2: bool = False) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": address}}
    cluster: dict[str, Any] = {
        "name": name,
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": _BUFFER,
        "circuit_breakers": {"thresholds": [{"max_connections": 65536, "max_pending_requests": 65536, "max_requests": 65536}]},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    if http2:
        options = {"@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": {"http2_protocol_options": {}}}
        cluster["typed_extension_protocol_options"] = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options}
    return cluster


def _ext_proc() -> dict[str, Any]:
    return {
        "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "ext_proc"}},
        "message_timeout": "10s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SEND",
        },
    }


def config(port: int, admin_port: int, node_port: int, *, ext_proc: str | None, lua: bool) -> str:
    """A bootstrap: one listener, one node; with an ext_proc server on a Unix socket, with the usage filter.

    Args:
        ext_proc: the socket's path; None: no such filter.
        lua: whether the usage filter is there.
    """
    filters: list[dict[str, Any]] = []
    if lua:
        source = {"@type": f"{_TYPE}.filters.http.lua.v3.Lua", "default_source_code": {"inline_string": usage_lua()}}
        filters.append({"name": "envoy.filters.http.lua", "typed_config": source})
    if ext_proc is not None:
        filters.append({"name": "envoy.filters.http.ext_proc", "typed_config": _ext_proc()})
    filters.append({"name": "envoy.filters.http.router", "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"}})
    route = {"match": {"prefix": "/"}, "route": {"cluster": "node", "timeout": "0s"}}
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "http_filters": filters,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    listener = {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "per_connection_buffer_limit_bytes": _BUFFER,
        "filter_chains": [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}],
    }
    clusters = [_cluster("node", {"socket_address": {"address": "127.0.0.1", "port_value": node_port}})]
    if ext_proc is not None:
        clusters.append(_cluster("ext_proc", {"pipe": {"path": ext_proc}}, http2=True))
    admin = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin_port}}}
    return json.dumps({"admin": admin, "static_resources": {"listeners": [listener], "clusters": clusters}})


class PlainEnvoy:
    """One of them, as a process on its core. A context manager; the arguments are those of `config`."""

    def __init__(self, node_port: int, *, ext_proc: str | None = None, lua: bool = False) -> None:
        self.port, self._admin_port = free_port(), free_port()
        self._config = config(self.port, self._admin_port, node_port, ext_proc=ext_proc, lua=lua)
        self._folder = tempfile.TemporaryDirectory(prefix="din-bench-envoy-")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    def start(self) -> Self:
        file = Path(self._folder.name) / "envoy.json"
        file.write_text(self._config)
        log = Path(self._folder.name) / "log"
        command = [find_envoy(), "--config-path", file, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + _BOOT_SECONDS
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text(errors="replace")
                self.stop()
                raise RuntimeError(f"Envoy did not start:\n{text}")
            time.sleep(0.02)
        pin(self.pid, "envoy")
        return self

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/ready", timeout=2) as reply:
                return reply.status == 200
        except OSError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
