"""The Go gateways as contenders: AIBrix's plugin, Envoy AI Gateway with and without the rate limit service, llm-d's endpoint picker.

Rule: each runs as its own documentation configures it, with the same Envoy, node, body and cores as ours. `make bench-peers` builds them.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redis import Redis

from tests.bench.contenders import Contender, Missing
from tests.bench.envoys import (
    CIRCUIT_BREAKERS,
    TYPE,
    Bootstrap,
    PlainEnvoy,
    cluster,
    ext_proc_filter,
    protocol_options,
    socket_address,
)
from tests.bench.harness import pin
from tests.bench.peers.build import BINARIES
from tests.support.servers import RedisServer, free_port

AIBRIX, AIGW, AIGW_LIMITS, LLM_D = "aibrix", "aigw", "aigw_with_limits", "llm_d"
GO_TITLES = {
    AIBRIX: "AIBrix gateway plugin (user RPM and TPM in Redis, usage)",
    AIGW_LIMITS: "Envoy AI Gateway + Go rate limit service (token limit, usage)",
    AIGW: "Envoy AI Gateway (usage; no keys, no limits)",
    LLM_D: "llm-d endpoint picker (load and prefix scores, usage; no limits)",
}
_BOOT_S = 60.0
_METADATA = "io.envoy.ai_gateway"
_BACKEND = "node"
_FULL_MODE = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}
_BUFFERED_MODE = {
    "request_header_mode": "SEND",
    "request_body_mode": "BUFFERED",
    "request_trailer_mode": "SKIP",
    "response_header_mode": "SEND",
    "response_trailer_mode": "SKIP",
}


def _server(exits: ExitStack, name: str, arguments: list[object], port: int, role: str, environment: Mapping[str, object]) -> int:
    """Start a program on the core of its role, wait until it listens, and return its process id."""
    program = BINARIES / name
    if not program.exists():
        raise Missing("not built: make bench-peers")
    given = {key: str(value) for key, value in environment.items()}
    child = subprocess.Popen(
        [program, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"GOMAXPROCS": "1"} | given,
    )

    def stop() -> None:
        child.kill()
        child.wait()

    exits.callback(stop)
    deadline = time.monotonic() + _BOOT_S
    while not _listens(port):
        if child.poll() is not None or time.monotonic() > deadline:
            raise Missing("built, but it does not start")
        time.sleep(0.1)
    pin(child.pid, role)
    return child.pid


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _redis(exits: ExitStack) -> RedisServer:
    server = exits.enter_context(RedisServer())
    pin(server.pid, "redis")
    return server


def _contender(exits: ExitStack, name: str, bootstrap: Bootstrap, headers: dict[str, str], **parts: int) -> Contender:
    envoy = exits.enter_context(PlainEnvoy(bootstrap))
    return Contender(name, envoy.port, {"envoy": envoy.pid, **parts}, headers)


def _server_cluster(port: int) -> dict[str, Any]:
    return cluster("ext_proc", socket_address(port), http2=True)


def _chosen_endpoint(header: str) -> dict[str, Any]:
    """Return the cluster whose endpoint a header of the server names."""
    return {
        "name": "node",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": CIRCUIT_BREAKERS,
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": header},
    }


def aibrix(exits: ExitStack, ports: tuple[int, int], folder: Path) -> Contender:
    redis = _redis(exits)
    with Redis(port=redis.port) as store:
        store.set("aibrix-users/acme", json.dumps({"name": "acme", "rpm": 100_000_000, "tpm": 2_000_000_000}))
    endpoints = folder / "aibrix.yaml"
    endpoints.write_text(json.dumps({"models": [{"name": "m", "endpoints": [f"127.0.0.1:{port}" for port in ports]}]}))
    port = free_port()
    arguments = ["--standalone", "--endpoints-config", endpoints, f"--grpc-bind-address=127.0.0.1:{port}"]
    arguments.append(f"--http-bind-address=127.0.0.1:{free_port()}")
    # Our nodes tell no metrics; asked once a second instead of twenty times they cost it nothing.
    environment = {"REDIS_HOST": "127.0.0.1", "REDIS_PORT": redis.port, "AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS": 1000}
    server = _server(exits, "aibrix-gateway", arguments, port, "server", environment)
    bootstrap = Bootstrap(
        [ext_proc_filter({**_BUFFERED_MODE, "response_body_mode": "STREAMED"})], [_server_cluster(port), _chosen_endpoint("target-pod")]
    )
    headers = {"user": "acme", "routing-strategy": "least-request"}
    return _contender(exits, AIBRIX, bootstrap, headers, server=server, redis=redis.pid)


def ai_gateway(exits: ExitStack, ports: tuple[int, int], folder: Path) -> Contender:
    return _ai_gateway(exits, AIGW, ports, folder)


def ai_gateway_with_limits(exits: ExitStack, ports: tuple[int, int], folder: Path) -> Contender:
    """Start the AI Gateway with a token limit per user: Envoy calls the rate limit service at each request and at its end."""
    redis = _redis(exits)
    root = folder / "ratelimit"
    (root / "bench" / "config").mkdir(parents=True)
    limit = {"unit": "minute", "requests_per_unit": 4_000_000_000}
    (root / "bench" / "config" / "limits.yaml").write_text(
        json.dumps({"domain": "bench", "descriptors": [{"key": "user", "rate_limit": limit}]})
    )
    port = free_port()
    environment = {
        "GRPC_HOST": "127.0.0.1",
        "GRPC_PORT": port,
        "HOST": "127.0.0.1",
        "PORT": free_port(),
        "DEBUG_HOST": "127.0.0.1",
        "DEBUG_PORT": free_port(),
        "REDIS_SOCKET_TYPE": "tcp",
        "REDIS_URL": f"127.0.0.1:{redis.port}",
        "RUNTIME_ROOT": root,
        "RUNTIME_SUBDIRECTORY": "bench",
        "RUNTIME_WATCH_ROOT": "false",
        "USE_STATSD": "false",
        "LOG_LEVEL": "error",
    }
    limiter = _server(exits, "ratelimit", [], port, "server", environment)
    typed = {
        "@type": f"{TYPE}.filters.http.ratelimit.v3.RateLimit",
        "domain": "bench",
        "rate_limit_service": {"grpc_service": {"envoy_grpc": {"cluster_name": "ratelimit"}}, "transport_api_version": "V3"},
    }
    user = {"actions": [{"request_headers": {"header_name": "x-user-id", "descriptor_key": "user"}}]}
    tokens = {"hits_addend": {"format": f"%DYNAMIC_METADATA({_METADATA}:tokens)%"}, "apply_on_stream_done": True}
    limits = [user | {"hits_addend": {"number": 0}}, user | tokens]
    return _ai_gateway(
        exits,
        AIGW_LIMITS,
        ports,
        folder,
        filters=[{"name": "envoy.filters.http.ratelimit", "typed_config": typed}],
        clusters=[cluster("ratelimit", socket_address(port), http2=True)],
        route={"rate_limits": limits},
        limiter=limiter,
        redis=redis.pid,
    )


def _ai_gateway(
    exits: ExitStack,
    name: str,
    ports: tuple[int, int],
    folder: Path,
    *,
    filters: list[dict[str, Any]] | None = None,
    clusters: list[dict[str, Any]] | None = None,
    route: dict[str, Any] | None = None,
    **parts: int,
) -> Contender:
    config = folder / f"{name}.yaml"
    backend = {"name": _BACKEND, "modelNameOverride": "physical", "schema": {"name": "OpenAI", "prefix": "v1"}}
    costs = [{"metadataKey": "tokens", "type": "TotalToken"}]
    config.write_text(
        json.dumps({"version": "dev", "uuid": "1", "globalLLMRequestCosts": costs, "backends": [backend], "models": [{"Name": "m"}]})
    )
    port = free_port()
    arguments = ["-configPath", config, "-extProcAddr", f"127.0.0.1:{port}", "-adminPort", free_port(), "-logLevel", "error"]
    server = _server(exits, "aigw-extproc", arguments, port, "server", {})
    metadata = {"metadata_options": {"receiving_namespaces": {"untyped": [_METADATA]}}, "allow_mode_override": True}
    before = ext_proc_filter({**_BUFFERED_MODE, "response_body_mode": "BUFFERED"}, **metadata)
    bootstrap = Bootstrap(
        [before, *(filters or ())], [_server_cluster(port), _backend_cluster(ports[0], metadata), *(clusters or ())], route or {}
    )
    return _contender(exits, name, bootstrap, {"x-user-id": "acme"}, server=server, **parts)


def _backend_cluster(port: int, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the node's cluster with the AI Gateway's second call, which knows the backend."""
    backend = {"aigateway.envoy.io": {"per_route_rule_backend_name": _BACKEND}}
    endpoint = {"endpoint": {"address": socket_address(port)}, "metadata": {"filter_metadata": backend}}
    mode = {"request_header_mode": "SEND", "request_body_mode": "NONE", "response_header_mode": "SKIP", "response_body_mode": "NONE"}
    named = "xds.upstream_host_metadata.filter_metadata['aigateway.envoy.io']['per_route_rule_backend_name']"
    length = {"key": "content-length", "value": f"%DYNAMIC_METADATA({_METADATA}:content_length)%"}
    mutation = {"append": {"append_action": "ADD_IF_ABSENT", "header": length}}
    filters = [
        ext_proc_filter(mode, request_attributes=[named], **metadata),
        {
            "name": "envoy.filters.http.header_mutation",
            "typed_config": {
                "@type": f"{TYPE}.filters.http.header_mutation.v3.HeaderMutation",
                "mutations": {"request_mutations": [mutation]},
            },
        },
        {"name": "envoy.filters.http.upstream_codec", "typed_config": {"@type": f"{TYPE}.filters.http.upstream_codec.v3.UpstreamCodec"}},
    ]
    assignment = {"cluster_name": "node", "endpoints": [{"lb_endpoints": [endpoint]}]}
    return cluster(
        "node",
        {},
        load_assignment=assignment,
        typed_extension_protocol_options=protocol_options(filters, http_protocol_options={}),
    )


def llm_d(exits: ExitStack, ports: tuple[int, int], folder: Path) -> Contender:
    endpoints = folder / "llm-d-endpoints.yaml"
    endpoints.write_text(
        json.dumps({"endpoints": [{"name": f"node-{at}", "address": "127.0.0.1", "port": str(port)} for at, port in enumerate(ports)]})
    )
    scorers = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")
    plugins: list[dict[str, Any]] = [{"type": each} for each in (*scorers, "max-score-picker", "single-profile-handler")]
    config = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"name": "files", "type": "file-discovery", "parameters": {"path": str(endpoints)}}, *plugins],
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": each} for each in (*scorers, "max-score-picker")]}],
        "dataLayer": {"discovery": {"pluginRef": "files"}},
    }
    file = folder / "llm-d.yaml"
    file.write_text(json.dumps(config))
    port = free_port()
    arguments = ["--pool-name", "bench", "--pool-namespace", "bench", "--config-file", file, "--grpc-port", port]
    arguments += ["--grpc-health-port", free_port(), "--metrics-port", free_port(), "--secure-serving=false", "--tracing=false"]
    server = _server(exits, "llm-d-epp", arguments, port, "server", {})
    bootstrap = Bootstrap([ext_proc_filter(_FULL_MODE)], [_server_cluster(port), _chosen_endpoint("x-gateway-destination-endpoint")])
    return _contender(exits, LLM_D, bootstrap, {}, server=server)


GO_PEERS = {AIBRIX: aibrix, AIGW_LIMITS: ai_gateway_with_limits, AIGW: ai_gateway, LLM_D: llm_d}
