"""What Envoy Gateway makes of our resources, patches and all, on a real Envoy in front of the real sidecar."""

import json
import ssl
from collections.abc import Iterator

import pytest

from din_extproc.edge.process.envoy_binary import find_envoy
from tests.support import envoy_gateway
from tests.support.certificates import Authority
from tests.support.engine_fleet import EngineFleet
from tests.support.providers import PIECES, Provider
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, events, key_of, node, tenant
from tests.support.tokens import AUDIENCE, ISSUER, bearer_cases, make_signer, write_jwks

pytestmark = pytest.mark.e2e

SIDECAR = "din-sidecar.inference.svc"
NODES = {"gpu-1": ("10.0.0.1", 8000), "gpu-2": ("fd00::10", 8000), "gpu-3": ("10.0.0.3", 11434), "gpu-4": ("10.0.0.4", 8000)}
"""As `golden/mesh/din.yaml` names them."""
HOST = {"host": "llm.example.com"}
PROVIDER = "api.example"
CREDENTIALS = "/var/lib/din/credentials"
SECRET = "sk-gateway-0123456789abcdef"


class GatewayStack(Stack):
    """With the Envoy of an Envoy Gateway."""

    engines: dict[str, EngineSim]
    keys: str
    """Of the issuer, in the place of the rendered ones."""
    provider: Provider
    authority: Authority

    def start_envoy(self, configuration: str = "") -> None:
        ports = {("login.example", 443): free_port(), ("api.other.example", 443): free_port()}  # where nothing is
        ports[PROVIDER, 443] = self.provider.port
        ports |= {place: self.engines[name].port for name, place in NODES.items()}
        ports |= {(SIDECAR, 50051): int(self._gateway["ext_proc"]["address"].rpartition(":")[2]), (SIDECAR, 50052): self.access_log_port}
        resources = envoy_gateway.translated(envoy_gateway.documents())
        file = self.folder / "envoy.json"
        trusted = self.authority.file.read_text()
        made = json.dumps(envoy_gateway.bootstrap(resources, ports, self.port, self.envoy_admin_port, trusted))
        made = made.replace(CREDENTIALS, str(self.folder / "credentials"))
        kept = json.dumps((envoy_gateway.RENDERED.parent / "jwks.json").read_text())
        assert kept in made
        file.write_text(configuration or made.replace(kept, json.dumps(self.keys)))
        command = [find_envoy(), "--config-path", file, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        self.envoy = self._child("envoy", command)
        self._await("envoy", self.envoy, lambda: self._answers(f"http://127.0.0.1:{self.envoy_admin_port}/ready"))


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    chat = {"model": "sim-chat", "decode_rate": 500.0}
    embeddings = {"model": "sim-embeddings", "runner": "pooling", "api": "ollama"}
    with EngineFleet({"gpu-1": chat, "gpu-2": chat, "gpu-3": embeddings, "gpu-4": chat | {"model": "sim-light"}}) as fleet:
        yield dict(fleet.members)


@pytest.fixture(scope="module")
def signer():
    return make_signer()


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def provider(authority) -> Iterator[Provider]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("provider", PROVIDER).values())
    with Provider(context, SECRET) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engines, signer, authority, provider, tmp_path_factory) -> Iterator[GatewayStack]:
    at = {name: node(name, engine.address) for name, engine in engines.items()}
    key_file = authority.folder / "openai.key"
    key_file.write_text(SECRET)

    def account(name: str, url: str = f"https://{PROVIDER}/v1") -> dict:
        return {"id": name, "url": url, "credential": {"file": str(key_file)}, "ca": str(authority.file), "max_seq_len": 8192}

    pools = {
        "chat": {"model": "sim-chat", "engine": "vllm", "nodes": [at["gpu-1"], at["gpu-2"]]},
        "light": {"model": "sim-light", "engine": "vllm", "nodes": [at["gpu-4"]]},
        "embeddings": {"model": "sim-embeddings", "engine": "ollama", "operations": ["/v1/embeddings"], "nodes": [at["gpu-3"]]},
        "cloud": {"model": "far", "served_model": "theirs", "engine": "openai", "nodes": [account("account-1"), account("account-2")]},
        "claude": {"model": "other", "engine": "anthropic", "nodes": [account("account-3", "https://api.other.example")]},
    }
    rules = [
        {"id": "embeddings", "when": {"path": ["/v1/embeddings"]}, "pool": "embeddings"},
        {"id": "light", "when": {"model": "sim-light"}, "pool": "light", "fallback": "cloud"},
        {"id": "cloud", "when": {"model": "far"}, "pool": "cloud"},
        {"id": "chat", "when": "always", "pool": "chat", "fallback": "light"},
    ]
    gateway = {"ext_proc": {"address": f"127.0.0.1:{free_port()}"}, "reached_at": SIDECAR}
    jwks = tmp_path_factory.mktemp("jwks") / "jwks.json"
    write_jwks(jwks, one=signer)
    issuer = {"issuer": ISSUER, "audiences": [AUDIENCE], "jwks": {"file": str(jwks)}, "tenant": "claims.org.team"}
    front = {"networks": ["10.0.7.0/24"], "tenant_header": "x-tenant"}
    config = {"pools": pools, "rules": rules, "tenants": [tenant("acme"), tenant("trial", rpm=1)]}
    running = GatewayStack(config | {"identity": {"jwt": [issuer], "gateway": front}}, gateway=gateway)
    running.engines, running.keys, running.provider, running.authority = engines, jwks.read_text(), provider, authority
    with running:
        yield running


def chat(stack: GatewayStack, **fields):
    return stack.chat(model="sim-chat", headers=fields.pop("headers", HOST), **fields)


def test_streams_are_routed_counted_and_settled_and_the_node_is_named(stack):
    replies = [chat(stack, stream=True, max_tokens=20) for _ in range(4)]
    assert {reply.status_code for reply in replies} == {200}, replies[0].text
    assert {reply.headers["x-din-node-id"] for reply in replies} == {"gpu-1", "gpu-2"}
    assert all(len(events(reply.text)) > 5 and not any(event.get("usage") for event in events(reply.text)) for reply in replies)
    counts = stack.settled(4)["counts"]
    assert (counts["outcomes"], counts["completion_tokens"]) == ({"completed": 4}, 80)


def test_an_embedding_goes_to_its_own_pool(stack):
    with stack.client() as client:
        reply = client.post("/v1/embeddings", json={"model": "sim-embeddings", "input": "x"}, headers=HOST)
    assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "gpu-3"), reply.text


def test_limits_keys_and_forged_headers_are_what_they_are_without_it(stack, engines):
    assert [chat(stack, tenant_name="trial", max_tokens=1).status_code for _ in range(2)] == [200, 429]
    with stack.client(None) as client:
        reply = client.post("/v1/chat/completions", json={"model": "sim-chat"}, headers={**HOST, "x-din-cluster": "chat"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    forged = {**HOST, "x-din-tenant": "admin", "x-din-cluster": "embeddings", "x-envoy-retry-on": "5xx", "x-din-endpoint": "1.2.3.4:5"}
    assert chat(stack, headers=forged, max_tokens=1).status_code == 200
    arrived = {name for engine in engines.values() for request in engine.seen()[1] for name, _ in request["headers"]}
    assert not arrived & {"x-din-tenant", "x-envoy-retry-on", "authorization", "x-din-cluster"}


def test_tokens_are_verified_and_keys_still_work(stack, signer):
    cases = bearer_cases(signer, key_of("acme"), key_of("trial"))
    with stack.client(None) as client:
        body = {"model": "sim-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        answers = {name: client.post("/v1/chat/completions", json=body, headers=HOST | headers) for name, (headers, _) in cases.items()}
    assert {name: each.status_code for name, each in answers.items()} == {name: status for name, (_, status) in cases.items()}
    assert answers["expired"].json()["error"]["code"] == "invalid_api_key"


def test_a_large_body_and_a_browser_get_through(stack):
    reply = chat(stack, max_tokens=1, messages=[{"role": "user", "content": "word " * 4000}], x="y" * 3_000_000)
    assert reply.status_code == 200, reply.text
    with stack.client(None) as client:
        asked = {**HOST, "origin": "https://app.example", "access-control-request-method": "POST"}
        reply = client.options("/v1/chat/completions", headers=asked)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://app.example")


@pytest.mark.parametrize("stream", [False, True])
def test_a_hosted_api_gets_its_credential_its_path_and_its_own_model_name(stack, provider, stream):
    provider.seen.clear()
    reply = stack.chat(model="far", headers=HOST, max_tokens=5, stream=stream)
    assert (reply.status_code, reply.headers["x-din-node-id"][:8]) == (200, "account-"), reply.text
    assert PIECES[0] in reply.text
    [(path, headers, body)] = provider.seen
    assert (path, headers["authorization"], headers["host"], body["model"]) == (
        "/v1/chat/completions",
        f"Bearer {SECRET}",
        PROVIDER,
        "theirs",
    )
    assert SECRET not in reply.text + str(reply.headers)


def test_a_request_moves_to_a_hosted_api_in_flight(stack, engines):
    engines["gpu-4"].fail("unavailable")
    try:
        reply = stack.chat(model="sim-light", headers=HOST, max_tokens=5)
    finally:
        engines["gpu-4"].fail("")
    assert (reply.status_code, reply.headers["x-din-node-id"][:8]) == (200, "account-"), reply.text
    assert (reply.headers["x-bxagent-degraded"], reply.headers["x-din-degraded-reason"]) == ("true", "upstream_failed")


def test_a_request_that_its_pool_can_t_answer_moves_to_the_fallback(stack, engines):
    for name in ("gpu-1", "gpu-2"):
        engines[name].fail("unavailable")
    reply = chat(stack, max_tokens=1)
    assert (reply.status_code, reply.headers["x-din-node-id"], reply.json()["model"]) == (200, "gpu-4", "sim-light"), reply.text
    assert (reply.headers["x-bxagent-degraded"], reply.headers["x-din-degraded-reason"]) == ("true", "upstream_failed")


def test_without_the_sidecar_nothing_passes_and_the_body_is_ours(stack):
    stack.sidecar.kill()
    stack.sidecar.wait()
    reply = chat(stack, max_tokens=1)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "sidecar_unavailable")
