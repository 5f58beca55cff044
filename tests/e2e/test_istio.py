"""Proxies of Istio with our patches on them: a real Envoy with what istiod makes of them, in front of the real sidecar.

istiod's part is played by `tests/support/istiod.py`; by Istio's own translator, in gateway and in sidecar mode, where DIN_ISTIO_TRANSLATOR
names the program (`make test-manifests` builds it).
"""

import json
import os
import ssl
import urllib.request
from collections.abc import Iterator

import pytest
import yaml

from din_extproc.edge.process.envoy_binary import find_envoy
from din_extproc.roles.configure.render import render_istio
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.support import istio_translation, istiod
from tests.support.certificates import Authority
from tests.support.providers import Provider
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, events, key_of, node, tenant
from tests.support.tokens import AUDIENCE, ISSUER, bearer_cases, make_signer, write_jwks

pytestmark = pytest.mark.e2e

SIDECAR = "din-sidecar.inference.svc"
HOST = "llm.example.com"
TRANSLATOR = os.environ.get("DIN_ISTIO_TRANSLATOR", "")
MODES = ("gateway", "sidecar") if TRANSLATOR else ("gateway",)
SELECTOR = {"gateway": (("istio", "ingressgateway"),), "sidecar": (("llm-client", "true"),)}


class MeshedStack(Stack):
    """With the Envoy of a gateway or of a client's sidecar of Istio."""

    mode = "gateway"
    translator = TRANSLATOR

    def start_envoy(self) -> None:
        settings = load(self.config_file, {})
        assert isinstance(settings, Settings), str(settings)
        rendered = render_istio(settings, mode=self.mode, host=HOST, namespace="inference", selector=SELECTOR[self.mode])
        documents = list(yaml.safe_load_all(rendered))
        ports = {settings.gateway.ext_proc.address.port, settings.gateway.access_log.address.port}
        services = {f"outbound|{port}||{SIDECAR}.cluster.local": port for port in ports}
        if self.translator:
            parts = istio_translation.translated(self.translator, self.mode, documents, SIDECAR, ports)
            configuration = istio_translation.bootstrap(parts, port=80, listen=self.port, admin=self.envoy_admin_port, ports=services)
        else:
            configuration = istiod.gateway(HOST, 80, self.port, self.envoy_admin_port, services)
            for each in documents:
                if each["kind"] == "RequestAuthentication":
                    istiod.authenticate(configuration, each)
            entries, rules = ([each for each in documents if each["kind"] == kind] for kind in ("ServiceEntry", "DestinationRule"))
            for entry in entries:
                istiod.reach(configuration, entry, next(rule for rule in rules if rule["spec"]["host"] == entry["spec"]["hosts"][0]))
            istiod.apply(configuration, next(each for each in documents if each["kind"] == "EnvoyFilter"))
        file = self.folder / "envoy.json"
        file.write_text(json.dumps(configuration))
        command = [find_envoy(), "--config-path", file, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        self.envoy = self._child("envoy", command)
        self._await("envoy", self.envoy, lambda: self._answers(f"http://127.0.0.1:{self.envoy_admin_port}/ready"))


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    made = {name: EngineSim(model=model, decode_rate=5000.0) for name, model in (("a", "m"), ("b", "m"), ("light", "n"))}
    made["local"] = EngineSim(model="o", api="ollama", decode_rate=5000.0)
    try:
        yield {name: engine.start() for name, engine in made.items()}
    finally:
        for engine in made.values():
            engine.stop()


@pytest.fixture(scope="module")
def signer():
    return make_signer()


@pytest.fixture(scope="module", params=MODES)
def stack(request, engines, signer, tmp_path_factory) -> Iterator[Stack]:
    nodes = {name: node(name, engine.address) for name, engine in engines.items()}
    config = {
        "pools": {
            "p": {"model": "m", "engine": "vllm", "nodes": [nodes["a"], nodes["b"]]},
            "q": {"model": "n", "engine": "vllm", "nodes": [nodes["light"]]},
            "r": {"model": "o", "engine": "ollama", "api": "native", "nodes": [nodes["local"]]},
        },
        "rules": [
            {"id": "all", "when": {"model": "m"}, "pool": "p", "fallback": "q"},
            {"id": "light", "when": {"model": "n"}, "pool": "q", "fallback": "r"},
        ],
        "tenants": [tenant("acme"), tenant("trial", rpm=1)],
    }
    if request.param == "gateway":
        jwks = tmp_path_factory.mktemp("jwks") / "jwks.json"
        write_jwks(jwks, one=signer)
        issuer = {"issuer": ISSUER, "audiences": [AUDIENCE], "jwks": {"file": str(jwks)}, "tenant": "claims.org.team"}
        config["identity"] = {"jwt": [issuer]}
    gateway = {"ext_proc": {"address": f"127.0.0.1:{free_port()}"}, "reached_at": SIDECAR}
    meshed = MeshedStack(config, gateway=gateway)
    meshed.mode = request.param
    with meshed as running:
        yield running


def test_every_patch_has_found_its_place(stack):
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.envoy_admin_port}/config_dump", timeout=30) as reply:
        dump = reply.read().decode()
    for part in (
        "p+q",
        "envoy.filters.http.ext_proc",
        "envoy.filters.http.lua",
        "early_header_mutation_extensions",
        "local_reply_config",
        "undecided",
    ):
        assert f'"{part}"' in dump, part
    assert dump.index('"name": "moving"') < dump.index('"name": "pool"') < dump.index('"name": "din-closed"')


def test_a_stream_is_routed_counted_and_settled(stack):
    reply = stack.chat(stream=True, max_tokens=20)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-din-node-id"] in {"a", "b"}
    assert len(events(reply.text)) > 5
    assert stack.settled(1)["counts"]["outcomes"] == {"completed": 1}


def test_a_chat_is_answered_and_settled_for_what_it_used(stack):
    before = sum(stack.status()["counts"]["outcomes"].values())
    reply = stack.chat(max_tokens=3)
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 3), reply.text
    assert stack.settled(before + 1)["counts"]["outcomes"] == {"completed": before + 1}


def test_a_node_that_is_overloaded_is_passed_over(stack, engines):
    engines["b"].fail("unavailable")
    try:
        assert {stack.chat(max_tokens=1).headers["x-din-node-id"] for _ in range(4)} == {"a"}
    finally:
        engines["b"].fail("")


def test_limits_keys_and_forged_headers_are_what_they_are_without_a_mesh(stack, engines):
    assert [stack.chat(tenant_name="trial", max_tokens=1).status_code for _ in range(2)] == [200, 429]
    with stack.client(None) as client:
        reply = client.post("/v1/chat/completions", json={"model": "m"}, headers={"x-din-cluster": "p"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    forged = stack.chat(headers={"x-din-tenant": "admin", "x-din-cluster": "nowhere", "x-envoy-retry-on": "5xx"}, max_tokens=1)
    assert forged.status_code == 200
    arrived = [name for engine in engines.values() for request in engine.seen()[1] for name, _ in request["headers"]]
    assert not [name for name in arrived if name in {"x-din-tenant", "x-envoy-retry-on", "authorization", "x-din-endpoint"}]


def test_tokens_are_verified_at_the_gateway_and_keys_still_work(stack, signer):
    if stack.mode == "gateway":
        cases = bearer_cases(signer, key_of("acme"), key_of("trial"))
        with stack.client(None) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            answers = {name: client.post("/v1/chat/completions", json=body, headers=headers) for name, (headers, _) in cases.items()}
        assert {name: each.status_code for name, each in answers.items()} == {name: status for name, (_, status) in cases.items()}
        assert answers["expired"].json()["error"]["code"] == "invalid_api_key"


def test_a_node_that_is_dead_is_passed_over(stack, engines):
    engines["a"].end()
    try:
        assert {stack.chat(max_tokens=1).headers["x-din-node-id"] for _ in range(4)} == {"b"}
    finally:
        engines["a"].start()


def test_a_request_moves_to_the_other_pool_in_flight(stack, engines):
    for name in "ab":
        engines[name].fail("unavailable")
    try:
        reply = stack.chat(max_tokens=1)
    finally:
        for name in "ab":
            engines[name].fail("")
    assert (reply.status_code, reply.headers["x-din-node-id"], reply.json()["model"]) == (200, "light", "n")
    assert (reply.headers["x-bxagent-degraded"], reply.headers["x-din-degraded-reason"]) == ("true", "upstream_failed")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_moves_in_flight_to_a_pool_of_another_engine(stack, engines, stream):
    engines["light"].fail("unavailable")
    try:
        reply = stack.chat(model="n", max_tokens=2, stream=stream)
    finally:
        engines["light"].fail("")
    assert (reply.status_code, reply.headers["x-din-node-id"], reply.headers["x-bxagent-degraded"]) == (200, "local", "true"), reply.text


def test_without_the_sidecar_nothing_passes_and_the_body_is_ours(stack):
    stack.sidecar.kill()
    stack.sidecar.wait()
    reply = stack.chat(max_tokens=1)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "sidecar_unavailable")
    assert reply.headers["retry-after"] == "1"


class HostedStack(MeshedStack):
    """With a hosted API behind what istiod makes of a ServiceEntry and a DestinationRule."""

    translator = ""


def test_a_hosted_api_is_reached_with_its_credential(tmp_path):
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("provider", "localhost").values())
    (tmp_path / "key").write_text("sk-mesh-0123456789")
    with Provider(context, "sk-mesh-0123456789") as provider, EngineSim(model="m") as local:
        account = {
            "id": "account-1",
            "url": f"https://localhost:{provider.port}/v1",
            "credential": {"file": str(tmp_path / "key")},
            "ca": str(authority.file),
            "max_seq_len": 8192,
        }
        config = {
            "pools": {
                "p": {"model": "m", "engine": "vllm", "nodes": [node("a", local.address)]},
                "cloud": {"model": "far", "served_model": "theirs", "engine": "openai", "nodes": [account]},
            },
            "rules": [{"id": "near", "when": {"model": "m"}, "pool": "p", "fallback": "cloud"}],
            "tenants": [tenant("acme")],
        }
        gateway = {"ext_proc": {"address": f"127.0.0.1:{free_port()}"}, "reached_at": SIDECAR}
        with HostedStack(config, gateway=gateway) as stack:
            for stream in (False, True):
                reply = stack.chat(model="far", stream=stream)
                assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "account-1"), reply.text
            assert stack.chat(model="m").headers["x-din-node-id"] == "a"
            local.fail("unavailable")
            moved = stack.chat(model="m")
            assert (moved.status_code, moved.headers["x-din-node-id"], moved.headers["x-bxagent-degraded"]) == (200, "account-1", "true")
        path, headers, body = provider.seen[-1]
        assert (path, body["model"], headers["authorization"]) == ("/v1/chat/completions", "theirs", "Bearer sk-mesh-0123456789")
        assert headers["host"] == f"localhost:{provider.port}"
        assert [name for name in headers if name.startswith(("x-din", "x-envoy", "x-forwarded"))] == []
