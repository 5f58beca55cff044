"""Plain Envoys for comparison: alone, with an ext_proc server, with the usage filter, with what another gateway needs.

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

from msgspec import Struct

from din_extproc.edge.process.envoy_binary import find_envoy
from din_extproc.roles.configure.render import usage_lua
from tests.bench.harness import pin
from tests.support.servers import free_port

_BOOT_SECONDS = 30.0
TYPE = "type.googleapis.com/envoy.extensions"
_BUFFER = 32 << 20
CIRCUIT_BREAKERS = {"thresholds": [{"max_connections": 65536, "max_pending_requests": 65536, "max_requests": 65536}]}


def cluster(name: str, address: dict[str, Any], *, http2: bool = False, **more: Any) -> dict[str, Any]:
    """Return a cluster of one endpoint. `more`: further fields of it."""
    endpoint = {"endpoint": {"address": address}}
    made: dict[str, Any] = {
        "name": name,
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": _BUFFER,
        "circuit_breakers": CIRCUIT_BREAKERS,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    if http2:
        made["typed_extension_protocol_options"] = protocol_options(http2_protocol_options={})
    return made | more


def protocol_options(http_filters: list[dict[str, Any]] | None = None, **protocol: Any) -> dict[str, Any]:
    """Return the HTTP options of a cluster: its protocol, and the filters that run once its endpoint is chosen."""
    options: dict[str, Any] = {"@type": f"{TYPE}.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": protocol}
    if http_filters is not None:
        options["http_filters"] = http_filters
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options}


def socket_address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def ext_proc_filter(processing_mode: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return the ext_proc filter with the server in the cluster `ext_proc`. `more`: further fields of it."""
    typed = {
        "@type": f"{TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "ext_proc"}, "timeout": "600s"},
        "message_timeout": "10s",
        "processing_mode": processing_mode,
    }
    return {"name": "envoy.filters.http.ext_proc", "typed_config": typed | more}


_OUR_MODE = {
    "request_header_mode": "SEND",
    "request_body_mode": "BUFFERED",
    "request_trailer_mode": "SKIP",
    "response_header_mode": "SEND",
    "response_body_mode": "NONE",
    "response_trailer_mode": "SEND",
}


_LATE_MODE = _OUR_MODE | {"response_header_mode": "SKIP", "response_trailer_mode": "SKIP"}
"""What the server's reply to the request's headers switches on."""


def plain(node_port: int, *, ext_proc: str | None = None, lua: bool = False, late: bool = False) -> "Bootstrap":
    """Return the configuration with one node; with an ext_proc server on a Unix socket, with the usage filter.

    Args:
        node_port: the node's port on loopback.
        ext_proc: the socket's path; None: no such filter.
        lua: whether the usage filter is there.
        late: whether the answer's messages are off until the server's reply switches them on.
    """
    filters: list[dict[str, Any]] = []
    clusters = [cluster("node", socket_address(node_port))]
    if lua:
        source = {"@type": f"{TYPE}.filters.http.lua.v3.Lua", "default_source_code": {"inline_string": usage_lua()}}
        filters.append({"name": "envoy.filters.http.lua", "typed_config": source})
    if ext_proc is not None:
        filters.append(ext_proc_filter(_LATE_MODE, allow_mode_override=True) if late else ext_proc_filter(_OUR_MODE))
        clusters.append(cluster("ext_proc", {"pipe": {"path": ext_proc}}, http2=True))
    return Bootstrap(filters, clusters)


class Bootstrap(Struct, frozen=True):
    """A configuration with one listener: what differs between the Envoys that are compared."""

    filters: list[dict[str, Any]]
    """Before the router."""
    clusters: list[dict[str, Any]]
    route: dict[str, Any] = {}
    """Fields of the route action besides its cluster, which is `node`, and its timeout, which is off."""

    def text(self, port: int, admin_port: int) -> str:
        """Return the whole configuration as JSON."""
        router = {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"}}
        route = {"match": {"prefix": "/"}, "route": {"cluster": "node", "timeout": "0s", **self.route}}
        manager = {
            "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "bench",
            "http_filters": [*self.filters, router],
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        }
        listener = {
            "address": socket_address(port),
            "per_connection_buffer_limit_bytes": _BUFFER,
            "filter_chains": [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}],
        }
        return json.dumps(
            {
                "admin": {"address": socket_address(admin_port)},
                "static_resources": {"listeners": [listener], "clusters": self.clusters},
            }
        )


class PlainEnvoy:
    """An Envoy of its own as a process on its core. A context manager."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.port, self._admin_port = free_port(), free_port()
        self._config = bootstrap.text(self.port, self._admin_port)
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
