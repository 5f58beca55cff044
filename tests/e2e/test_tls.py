"""Mutual TLS on every port of a sidecar: a real Envoy with xDS, a real agent that registers, and those who come without."""

import contextlib
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from din_extproc._proto.din.v1 import registry_pb2 as pb
from din_extproc.admit.keys import ENTROPY_BYTES, make_node_token
from tests.support.certificates import Authority
from tests.support.frame_peer import HELLO
from tests.support.node_stack import NodeStack
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, tenant

pytestmark = pytest.mark.e2e
TOKENS = {name: make_node_token(name, bytes([number]) * ENTROPY_BYTES) for number, name in enumerate(("gpu-1", "gpu-2"))}
_ALERT = 0x15
"""What TLS answers when it is not spoken to as it wants."""


class Secure(Stack):
    """Everything over TLS, and everybody shows a certificate. A node's must carry its id."""

    def __init__(self, folder: Path, *serve: str) -> None:
        self.authority = Authority(folder)
        self.grpc_port, self.http_port = free_port(), free_port()
        mutual = {**self.authority.issue("port", "127.0.0.1", "localhost"), "client_ca": str(self.authority.file)}
        gateway = {name: {"address": f"127.0.0.1:{free_port()}", "tls": mutual} for name in ("ext_proc", "access_log", "xds")}
        gateway["registry"] = {
            "address": f"127.0.0.1:{self.grpc_port}",
            "http_address": f"127.0.0.1:{self.http_port}",
            "node_tokens_file": "tokens.yaml",
            "tls": mutual,
            "bind_certificates": True,
            "heartbeat_s": 0.3,
            "dead_after_s": 3,
        }
        envoy = {"ca": str(self.authority.file), **self.authority.issue("envoy", "envoy"), "server_name": "localhost"}
        sections = {
            "pools": {"p": {"model": "sim-model", "engine": "vllm", "dtype": "bf16"}},
            "tenants": [tenant("acme")],
            "envoy": {"sidecar_tls": envoy},
        }
        super().__init__(sections, gateway=gateway, serve=serve)
        self._gateway["admin"] = {"address": f"127.0.0.1:{self.admin_port}", "tls": mutual}
        self.write(sections)
        self.tls = self.authority.client(self.authority.issue("watcher", "watcher"))
        (self.folder / "tokens.yaml").write_text("".join(f'{name}: "{token.hash}"\n' for name, token in TOKENS.items()))

    def node(self, engine: EngineSim, common_name: str) -> NodeStack:
        """An agent of `gpu-1` that shows the certificate of this name."""
        token = self.folder / "gpu-1.token"
        token.write_text(TOKENS["gpu-1"].text)
        tls = {"ca": str(self.authority.file), **self.authority.issue(f"node-{common_name}", common_name)}
        return NodeStack(engine.address, f"https://127.0.0.1:{self.http_port}", token_file=str(token), registry_tls=tls)

    def serial(self, port: int) -> str:
        """Of the certificate that the port shows."""
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
            self.tls.wrap_socket(plain, server_hostname="localhost") as one,
        ):
            return one.getpeercert()["serialNumber"]


@pytest.fixture(scope="module")
def engine():
    with EngineSim(decode_rate=500.0) as running:
        yield running


@pytest.fixture(scope="module", params=["wire", "grpcio"])
def secure(request, tmp_path_factory):
    with Secure(tmp_path_factory.mktemp("certificates"), "--transport", request.param) as running:
        yield running


def test_a_node_joins_and_a_request_reaches_it_and_is_settled_all_over_mutual_tls(secure, engine):
    with secure.node(engine, "gpu-1"):
        secure.eventually(lambda: secure.chat(model="sim-model").status_code == 200, "an answer")
        secure.eventually(lambda: secure.status()["counts"]["outcomes"].get("completed"), "it is settled")
        before = {port: secure.serial(port) for port in (secure.http_port, secure.grpc_port)}
        secure.authority.issue("port", "127.0.0.1", "localhost")
        for port, serial in before.items():
            secure.eventually(lambda port=port, serial=serial: secure.serial(port) != serial, "the new certificate is shown")
        assert secure.chat(model="sim-model").status_code == 200


def test_a_node_with_the_certificate_of_another_is_refused_with_the_reason(secure, engine):
    with secure.node(engine, "gpu-2") as agent:
        agent.eventually(lambda: "the certificate is not that of node 'gpu-1'" in agent.log(), "a refusal")
        assert not agent.health()[1]["registered"]


def asked(secure, common_name: str, token: str) -> grpc.RpcError | None:
    """What the registry's gRPC port says to whoever shows this certificate and this node's token. None: it lets it in."""
    files = secure.authority.issue("asker", common_name)
    credentials = grpc.ssl_channel_credentials(
        secure.authority.file.read_bytes(), Path(files["key"]).read_bytes(), Path(files["cert"]).read_bytes()
    )
    with grpc.secure_channel(f"localhost:{secure.grpc_port}", credentials) as channel:
        calls = channel.unary_stream("/din.v1.NodeRegistry/Watch", pb.WatchRequest.SerializeToString, pb.WatchResponse.FromString)(
            pb.WatchRequest(), metadata=[("authorization", f"Bearer {TOKENS[token].text}")], timeout=10
        )
        try:
            next(iter(calls))
        except grpc.RpcError as error:
            return error
    return None


def test_over_grpc_too_a_certificate_speaks_for_its_own_node_only(secure):
    assert asked(secure, "gpu-2", "gpu-2") is None
    refused = asked(secure, "gpu-1", "gpu-2")
    assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "the certificate is not that of node 'gpu-2'; it carries these names: gpu-1" in refused.details()


def spoken(port: int, context: ssl.SSLContext | None, hello: bytes) -> bytes:
    """What the port says in plain words, or inside TLS, to this hello."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
        if context is None:
            plain.sendall(hello)
            return plain.recv(100)
        with context.wrap_socket(plain, server_hostname="localhost") as secured:
            secured.sendall(hello)
            return secured.recv(100)
    return b""


def test_clients_without_a_valid_certificate_or_tls_get_no_answer_at_any_port(secure, tmp_path):
    other_authority = Authority(tmp_path, "other")
    odd = other_authority.issue("odd", "gpu-1")
    believing = ssl.create_default_context(cafile=str(secure.authority.file))
    believing.load_cert_chain(odd["cert"], odd["key"])
    old = secure.authority.client(secure.authority.issue("old", "old"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    right = secure.authority.client(secure.authority.issue("right", "right"))
    for context in (old, right):
        context.set_alpn_protocols(["h2", "http/1.1"])
    ports = {name: int(secure._gateway[name]["address"].rpartition(":")[2]) for name in ("ext_proc", "access_log", "xds", "admin")}
    ports |= {"registry": secure.grpc_port, "registry_http": secure.http_port}
    for name, port in ports.items():
        hello = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" if name in {"admin", "registry_http"} else HELLO
        for context in (None, secure.authority.client(), believing):
            received = spoken(port, context, hello)
            assert received == b"" or received[0] == _ALERT, (name, received)
        assert len(spoken(port, right, hello)) > 1, f"{name} answers to who shows the right one"
        assert len(spoken(port, old, hello)) > 1, f"{name} speaks TLS 1.2 too"


def test_the_table_of_nodes_is_asked_for_over_the_secured_admin_port(secure):
    command = [sys.executable, "-m", "din_extproc", "nodes", "--config", secure.config_file, "--json"]
    asked_nodes = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert asked_nodes.returncode == 0, asked_nodes.stderr
    assert '"nodes"' in asked_nodes.stdout


def test_a_node_s_envoy_reaches_its_agent_over_mutual_tls_and_nobody_else_does(engine, tmp_path):
    authority = Authority(tmp_path)
    mutual = {**authority.issue("agent", "127.0.0.1", "localhost"), "client_ca": str(authority.file)}
    client_tls = {"ca": str(authority.file), **authority.issue("envoy", "envoy"), "server_name": "localhost"}
    ext_proc, health = free_port(), free_port()
    proxy = {"ext_proc": {"address": f"127.0.0.1:{ext_proc}", "tls": mutual}, "sidecar_tls": client_tls}
    no_registry = f"http://127.0.0.1:{free_port()}"
    own = {"address": f"127.0.0.1:{health}", "tls": mutual}
    with NodeStack(engine.address, no_registry, envoy=True, proxy=proxy, health=own) as node:
        body = {"model": "sim-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        with node.client() as client:
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        for port, hello in ((ext_proc, HELLO), (health, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")):
            for context in (None, authority.client()):
                received = spoken(port, context, hello)
                assert received == b"" or received[0] == _ALERT, received
            assert len(spoken(port, authority.client(authority.issue("one", "one")), hello)) > 1
