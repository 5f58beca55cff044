"""Hosted APIs as pools: TLS servers that behave as a provider documents, behind a real Envoy, as the overflow of a local pool."""

import json
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from aiohttp import web

from tests.support.certificates import Authority
from tests.support.columns import audited
from tests.support.providers import PIECES, SOUND, Provider
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, events, node, tenant

pytestmark = pytest.mark.e2e
SECRET, NEW_SECRET = "sk-cloud-0123456789abcdef", "sk-cloud-fedcba9876543210"
TEXT = "".join(PIECES)


class Site:
    """A gateway with a local pool and two accounts of a provider, one of which has deployment paths."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.authority.issue("provider", "localhost").values())
        self.openai = Provider(context, SECRET)
        self.azure = Provider(context, "azure-key-0123456789", ("api-key", ""))
        self.local = EngineSim(model="m", decode_rate=1000.0)
        self.key_file = folder / "openai.key"
        self.key_file.write_text(f"{SECRET}\n")
        (folder / "azure.key").write_text("azure-key-0123456789")
        (folder / "audit.key").write_text("an audit key of these tests")
        self.folder = folder

    def config(self) -> dict:
        common = {"ca": str(self.authority.file), "max_seq_len": 8192}
        openai = {
            "id": "account-1",
            "url": f"https://localhost:{self.openai.port}/v1",
            "credential": {"file": str(self.key_file)},
            "headers": {"OpenAI-Project": "100%"},
            **common,
        }
        azure = {
            "id": "azure-1",
            "url": f"https://localhost:{self.azure.port}/openai/deployments/ours",
            "credential": {"file": str(self.folder / "azure.key")},
            "api_version": "2024-10-21",
            **common,
        }
        return {
            "pools": {
                "local": {"model": "m", "engine": "vllm", "nodes": [node("gpu-1", self.local.address)]},
                "cloud": {"model": "far", "served_model": "gpt-x", "engine": "openai", "nodes": [openai]},
                "azure": {"model": "azure-m", "served_model": "ours", "engine": "azure_openai", "nodes": [azure]},
            },
            "rules": [
                {"id": "near", "when": {"model": "m"}, "pool": "local", "fallback": "cloud"},
            ],
            "tenants": [tenant("acme"), {**tenant("clinic"), "stays_on_site": True}],
            "prices": {"currency": "EUR", "models": {"far": {"output": 1, "generated_image": 0.04}}},
            "envoy": {"health_check": False, "retry": {"attempts": 0}},
            "audit": {"folder": "audit", "replica": "gw-1", "keys": {"k1": {"file": str(self.folder / "audit.key")}}, "flush_ms": 50},
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[tuple[Site, Stack]]:
    made = Site(tmp_path_factory.mktemp("site"))
    with made.openai, made.azure, made.local, Stack(made.config()) as stack:
        yield made, stack


def test_a_request_reaches_the_provider_with_its_credential_path_host_and_model(site):
    made, stack = site
    reply = stack.chat(model="far", headers={"x-task-tier": "gold"})
    assert reply.status_code == 200, (reply.text, stack.log("envoy"), stack.log("sidecar"))
    assert reply.json()["choices"][0]["message"]["content"] == TEXT
    assert reply.headers["x-din-node-id"] == "account-1"
    path, headers, body = made.openai.seen[-1]
    assert (path, body["model"]) == ("/v1/chat/completions", "gpt-x")
    assert headers["authorization"] == f"Bearer {SECRET}"
    assert headers["host"] == f"localhost:{made.openai.port}"
    assert headers["openai-project"] == "100%"
    inside = [name for name in headers if name.startswith(("x-din", "x-bxagent", "x-envoy", "x-forwarded", "traceparent", "x-request-id"))]
    assert inside == []


def test_the_limits_and_names_of_the_account_do_not_reach_clients(site):
    _, stack = site
    reply = stack.chat(model="far")
    assert "openai-organization" not in reply.headers
    assert reply.headers["x-request-id"] != "theirs"
    assert reply.headers["x-ratelimit-remaining-requests"] != "7"


def test_a_stream_is_charged_by_the_providers_usage(site):
    made, stack = site
    reply = stack.chat(model="far", stream=True)
    pieces = [choice["delta"].get("content") or "" for event in events(reply.text) for choice in event["choices"]]
    assert (reply.status_code, "".join(pieces)) == (200, TEXT)
    stack.all_accounted()

    def charged() -> float:
        page = httpx.get(f"{stack.admin_url}/metrics", timeout=30).text
        lines = [line for line in page.splitlines() if line.startswith("din_tokens_total{") and 'gen_ai_request_model="far"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines if 'din_usage_estimated="false"' in line and "cached" not in line)

    stack.eventually(lambda: charged() == 12 * len(made.openai.seen), charged)


def test_azure_has_a_deployments_path_a_version_and_its_own_header(site):
    made, stack = site
    reply = stack.chat(model="azure-m")
    assert reply.status_code == 200, reply.text
    path, headers, _ = made.azure.seen[-1]
    assert path == "/openai/deployments/ours/chat/completions?api-version=2024-10-21"
    assert headers["api-key"] == "azure-key-0123456789"
    assert "authorization" not in headers


def test_a_provider_that_asks_for_time_is_left_alone_for_it(site):
    made, stack = site
    error = {"error": {"message": "Rate limit reached for org-secret", "type": "requests", "code": "rate_limit_exceeded"}}
    made.openai.fail = lambda: web.json_response(error, status=429, headers={"retry-after": "2"})
    try:
        reply = stack.chat(model="far")
    finally:
        made.openai.fail = lambda: None
    assert reply.status_code in {429, 503}
    assert "org-secret" not in reply.text
    stack.eventually(lambda: stack.status()["breakers"]["nodes"].get("account-1", {}).get("state") == "cooling", stack.status)
    stack.eventually(lambda: stack.chat(model="far").status_code == 200, "the account serves again")


def test_an_account_without_credit_is_no_error_of_the_client(site):
    made, stack = site
    error = {"error": {"message": "org-secret has no credit", "type": "insufficient_quota", "code": "insufficient_quota"}}
    made.azure.fail = lambda: web.json_response(error, status=429)
    try:
        reply = stack.chat(model="azure-m")
    finally:
        made.azure.fail = lambda: None
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_error"), reply.text
    assert "org-secret" not in reply.text
    stack.eventually(lambda: "azure-1" in stack.status()["breakers"]["nodes"], stack.status)
    health = stack.status()["breakers"]["nodes"]["azure-1"]
    assert (health["state"], health["reason"]) == ("open", "its account has no credit")
    assert health["again_in_s"] > 100, "one failure is enough, for the longest pause"
    assert 'din_node_no_credit{din_node_id="azure-1"} 1' in httpx.get(f"{stack.admin_url}/metrics", timeout=30).text
    assert "breaker of node azure-1: open: its account has no credit" in stack.log("sidecar")


@pytest.mark.parametrize("status", [429, 529])
def test_the_pause_is_what_the_providers_own_headers_say(site, status):
    made, stack = site
    theirs = {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1.5s", "x-ratelimit-remaining-requests": "9"}
    made.openai.fail = lambda: web.json_response({"error": {"message": "wait"}}, status=status, headers=theirs)
    try:
        reply = stack.chat(model="far")
    finally:
        made.openai.fail = lambda: None
    assert int(reply.headers["retry-after"]) >= 2 or status == 529
    stack.eventually(lambda: stack.status()["breakers"]["nodes"].get("account-1", {}).get("state") == "cooling", stack.status)
    assert 1.0 < stack.status()["breakers"]["nodes"]["account-1"]["again_in_s"] <= 2.0
    stack.eventually(lambda: stack.chat(model="far").status_code == 200, "the account serves again")


def test_what_overflows_from_a_dead_local_pool_is_marked(site):
    made, stack = site
    assert stack.chat(model="m").headers["x-din-node-id"] == "gpu-1"
    made.local.stop()
    stack.eventually(lambda: stack.chat(model="m").headers.get("x-din-node-id") == "account-1", lambda: stack.status()["health"])
    reply = stack.chat(model="m")
    assert (reply.status_code, reply.headers["x-bxagent-degraded"]) == (200, "true")
    sent = len(made.openai.seen)
    assert stack.chat(model="m", tenant_name="clinic").status_code == 503
    assert stack.chat(model="far", tenant_name="clinic").json()["error"]["code"] == "model_not_allowed"
    assert len(made.openai.seen) == sent


def test_a_new_credential_is_in_use_without_a_restart(site):
    made, stack = site
    made.openai.credentials.add(NEW_SECRET)
    made.key_file.write_text(NEW_SECRET)

    def rotated() -> bool:
        assert stack.chat(model="far").status_code == 200
        return made.openai.seen[-1][1]["authorization"] == f"Bearer {NEW_SECRET}"

    stack.eventually(rotated, lambda: stack.log("sidecar"))


def test_an_envoy_with_xds_reaches_the_provider_too(site):
    made, _ = site
    xds = {"address": f"127.0.0.1:{free_port()}"}
    with EngineSim(model="m") as local:
        config = made.config()
        config["pools"]["local"]["nodes"] = [node("gpu-1", local.address)]
        with Stack(config, gateway={"xds": xds}) as stack:
            assert stack.chat(model="far").headers["x-din-node-id"] == "account-1"
            streamed = stack.chat(model="far", stream=True)
            assert (streamed.status_code, streamed.text.endswith("data: [DONE]\n\n")) == (200, True)
            assert stack.chat(model="m").headers["x-din-node-id"] == "gpu-1"
            local.stop()
            stack.eventually(lambda: stack.chat(model="m").headers.get("x-din-node-id") == "account-1", stack.status)
            del config["pools"]["azure"]
            stack.write(config)
            stack.eventually(lambda: stack.chat(model="azure-m").status_code == 404, "the other pool is gone")
            assert stack.chat(model="far").status_code == 200


def test_sound_and_pictures_pass_and_are_metered(site):
    made, stack = site
    with stack.client() as client:
        speech = client.post("/v1/audio/speech", json={"model": "far", "input": "Read this aloud.", "voice": "alloy"})
        picture = client.post("/v1/images/generations", json={"model": "far", "prompt": "A small house"})
        count = client.post("/v1/responses/input_tokens", json={"model": "far", "input": "hello"})
        refused = client.post("/v1/score", json={"model": "far", "text_1": "a", "text_2": "b"})
    assert [reply.status_code for reply in (speech, picture, count)] == [200, 200, 200], (speech.text, picture.text, count.text)
    assert (speech.content, speech.headers["content-type"]) == (SOUND, "audio/mpeg")
    assert picture.json()["usage"]["output_tokens"] == 4160
    assert count.json()["input_tokens"] == 11
    assert refused.status_code in {400, 404}, refused.text
    assert [(path, body["model"]) for path, _, body in made.openai.seen[-3:]] == [
        ("/v1/audio/speech", "gpt-x"), ("/v1/images/generations", "gpt-x"), ("/v1/responses/input_tokens", "gpt-x")
    ]  # fmt: skip
    cost = {path: stack.cost(reply) for path, reply in (("speech", speech), ("picture", picture), ("count", count))}
    assert cost["picture"] == (10, 4160)
    trace = picture.headers["x-din-trace-id"]
    stack.eventually(lambda: trace in audited(stack), "the picture is in the audit log")
    assert (audited(stack)[trace]["images"], audited(stack)[trace]["cost"]) == (1, 4160 * 1000 + 40_000_000)
    assert cost["count"] == (0, 0)
    prompt, output = cost["speech"]
    assert 4 <= prompt <= 16
    assert output == 0


def test_no_credential_is_in_any_log_dump_audit_record_metric_page_or_store(site):
    made, stack = site
    valid, made.openai.credentials = made.openai.credentials, set()
    stack.chat(model="far")  # the provider's refusal repeats the credential
    made.openai.credentials = valid
    stack.all_accounted()
    envoy = f"http://127.0.0.1:{stack.envoy_admin_port}"
    pages = [f"{envoy}/{page}" for page in ("config_dump?include_eds", "stats", "clusters", "certs", "listeners", "server_info", "runtime")]
    pages += [f"{stack.admin_url}/{page}" for page in ("metrics", "status", "nodes", "exchanges", "availability", "tenants", "", "readyz")]
    body = stack.folder / "body.json"
    body.write_text(json.dumps({"model": "far", "messages": [{"role": "user", "content": "hi"}]}))
    commands = (("explain", body, "--tenant", "acme"), ("check",), ("render", "envoy"), ("nodes",), ("doctor",))
    places = {
        **{page: httpx.get(page, timeout=30).text for page in pages},
        **{f"din-extproc {command[0]}": command_output(stack, *command) for command in commands},
        **{str(file): file.read_text(errors="replace") for file in stack.folder.rglob("*") if file.is_file() and file.suffix != ".sock"},
        "Redis": redis_content(stack),
    }
    credentials = {str(stack.folder / "credentials" / f"{name}.yaml") for name in ("account-1", "azure-1")}
    assert "din_egress_account-1" in places[pages[0]]
    assert any(name.endswith(".jsonl") and len(text) > 1000 for name, text in places.items()), "there are audit records"
    secrets = (SECRET, NEW_SECRET, "azure-key-0123456789")
    assert {name for name, text in places.items() for secret in secrets if secret in text} == credentials
    assert {stat.S_IMODE((stack.folder / "credentials" / name).stat().st_mode) for name in credentials} == {0o600}


def command_output(stack: Stack, *command: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "din_extproc", *map(str, command), "--config", stack.config_file],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def redis_content(stack: Stack) -> str:
    with redis.Redis(port=stack.redis.port) as connection:
        return repr([(key, connection.dump(key)) for key in connection.scan_iter()])
