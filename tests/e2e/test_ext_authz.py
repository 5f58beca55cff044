"""Keys and limits for an Envoy that routes by itself: it asks the sidecar by ext_authz, and its access log settles."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from din_extproc.edge.process.envoy_binary import find_envoy
from din_extproc.roles.configure.render_ext_authz import render_ext_authz
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.support.servers import EngineSim
from tests.support.stack import Stack, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
LEASE_MS = 1500


class AskingStack(Stack):
    """A sidecar that is only asked, and an Envoy with the rendered example."""

    node = ""

    def start_envoy(self) -> None:
        settings = load(self.config_file, {})
        assert isinstance(settings, Settings), str(settings)
        rendered = self.folder / "envoy.yaml"
        rendered.write_text(render_ext_authz(settings, self.node))
        command = [find_envoy(), "--config-path", rendered, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        self.envoy = self._child("envoy", command)
        self._await("envoy", self.envoy, lambda: self._answers(f"http://127.0.0.1:{self.envoy_admin_port}/ready"))


@pytest.fixture(scope="module")
def sim() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=50.0, batch_slowdown=0.0, prefill_rate=1e6) as server:
        yield server


@pytest.fixture(scope="module", params=["wire", "grpcio"])
def stack(request, sim) -> Iterator[AskingStack]:
    config = {
        "tenants": [
            tenant("acme"),
            tenant("other", models=("m",), rpm=2, tpm=5000),
            tenant("single", max_streams=1) | {"queue": {"max_wait_ms": 2000}},
            tenant("careful") | {"sensitive_data": "mask"},
            tenant("watched") | {"sensitive_data": "flag"},
        ],
        "store": {"lease_ms": LEASE_MS},
    }
    running = AskingStack(config, serve=("--transport", request.param), gateway={"ext_authz": {"longest_s": 600}})
    running.node = sim.address
    with running:
        yield running


def ask(tokens: int = 4, **fields) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "min_tokens": tokens, **fields}


def test_a_request_passes_without_its_key_and_with_the_headers_of_its_limits(stack, sim):
    sim.forget()
    reply = stack.chat(ask(), tenant_name="other")
    assert reply.status_code == 200
    assert reply.headers["x-ratelimit-remaining-requests"] == "1"
    assert reply.headers["x-din-trace-id"]
    (seen,) = sim.seen()[1]
    assert not {"authorization", "x-api-key"} & {name.lower() for name, _ in seen["headers"]}
    stack.eventually(lambda: stack.status()["counts"]["outcomes"].get("completed") == 1, "it is settled")
    second = stack.chat(ask(), tenant_name="other")
    reserved = 5000 - int(reply.headers["x-ratelimit-remaining-tokens"])
    counted = reply.json()["usage"]["total_tokens"]
    assert int(second.headers["x-ratelimit-remaining-tokens"]) >= 5000 - counted - reserved, (
        "the first was settled by what the engine counted"
    )
    third = stack.chat(ask(), tenant_name="other")
    assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(third.headers["retry-after"]) >= 1


def test_wrong_keys_foreign_models_and_broken_bodies_are_refused_in_the_one_error_body(stack):
    with stack.client(None) as client:
        without_key = client.post(PATH, json=ask())
    foreign = stack.chat(ask(model="x"), tenant_name="other")
    broken = stack.chat({"model": 5}, tenant_name="acme")
    assert [reply.status_code for reply in (without_key, foreign, broken)] == [401, 403, 400]
    assert [reply.json()["code"] for reply in (without_key, foreign, broken)] == ["invalid_api_key", "model_not_allowed", "invalid_request"]


def test_a_silent_stream_keeps_its_slot_beyond_its_lease_and_gives_it_back_with_its_end(stack):
    with stack.client("single") as client, ThreadPoolExecutor(1) as pool:
        held = client.send(client.build_request("POST", PATH, json=ask(6000, stream=True)), stream=True)
        assert held.status_code == 200
        time.sleep(2 * LEASE_MS / 1000)
        assert stack.redis_keys("single}:lease:"), "it was renewed"
        waiting = pool.submit(stack.chat, ask(), tenant_name="single")
        stack.eventually(lambda: stack.status()["queue"]["waiting"] == 1, "the next one waits")
        held.close()
        assert waiting.result().status_code == 200, "it took the slot of the client that left"
    stack.eventually(lambda: stack.redis_keys("single}:lease:") == [], "nothing stays taken")


def test_sensitive_data_is_flagged_or_kept_from_the_node_and_what_would_be_masked_is_refused(stack, sim):
    sim.forget()
    prompt = {"messages": [{"role": "user", "content": "write to alice@example.com"}]}
    refused = stack.chat(ask(**prompt), tenant_name="careful")
    assert (refused.status_code, refused.json()["code"]) == (400, "sensitive_data_blocked")
    assert "email" in refused.json()["detail"]
    assert sim.seen()[1] == []
    assert stack.chat(ask(), tenant_name="careful").status_code == 200
    assert stack.chat(ask(**prompt), tenant_name="watched").status_code == 200
    counted = {"block": {"email": 1}, "flag": {"email": 1}}
    stack.eventually(lambda: stack.status()["counts"]["sensitive"] == counted, "both findings are counted")
    assert "alice" not in stack.log("sidecar")
