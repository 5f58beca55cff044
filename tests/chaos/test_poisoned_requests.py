"""One tenant sends requests that nodes fail at, or one node refuses every request: what the other tenant sees of it.

The load lasts `DIN_CHAOS_SECONDS`: 5 unless set, 60 in `make test-chaos`.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.chaos

SECONDS = float(os.environ.get("DIN_CHAOS_SECONDS", "5"))
PER_SECOND = {"poisoner": 2, "other": 10}
TOO_LONG = "This model's maximum context length is 8192 tokens"
PROMPTS = {"poisoner": "poison", "other": "hello"}


@pytest.fixture(scope="module")
def sims() -> Iterator[dict[str, EngineSim]]:
    with together({name: EngineSim(model="m", decode_rate=5000.0, prefill_rate=1e6) for name in "abc"}) as running:
        yield running


@pytest.fixture
def probes() -> bool:
    """Whether the gateway probes its nodes."""
    return True


@pytest.fixture
def stack(sims, probes) -> Iterator[Stack]:
    pool = {"model": "m", "engine": "vllm", "nodes": [node(name, sim.address) for name, sim in sims.items()]}
    for sim in sims.values():
        sim.fail("")
        sim.forget()
    config = {"pools": {"chat": pool}, "tenants": [tenant(name) for name in PER_SECOND], "envoy": {"health_check": False}}
    config["health"] = {"probe": {"every_s": 10} if probes else False}
    with Stack(config, gateway={"workers": 2}) as running:
        yield running


def load(stack: Stack) -> dict[str, list[int]]:
    """Send each tenant's requests at its rate; every other one repeats the tenant's first. Return the statuses that each has got."""

    def send(name: str) -> list[int]:
        statuses, began = [], time.monotonic()
        with stack.client(name) as client:
            for number in range(int(SECONDS * PER_SECOND[name])):
                time.sleep(max(0.0, began + number / PER_SECOND[name] - time.monotonic()))
                prompt = f"{PROMPTS[name]} {number % 2 and number}"
                body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 2, "stream": name == "poisoner"}
                statuses.append(client.post("/v1/chat/completions", json=body).status_code)
        return statuses

    with ThreadPoolExecutor(len(PER_SECOND)) as tenants:
        return dict(zip(PER_SECOND, tenants.map(send, PER_SECOND), strict=True))


@pytest.mark.parametrize(
    ("fault", "seen", "ejected"),
    [
        ("reply:status=500", {502}, 1),
        ("reset", {502, 422}, 1),
        (f"error_event:message={TOO_LONG}", {200}, 0),
        (f"reply:status=500,body={TOO_LONG}", {400}, 0),
    ],
    ids=["answers 500", "breaks the connection", "reports a context error in its stream", "says by a 500 that the request is too long"],
)
def test_a_tenant_whose_requests_every_node_fails_at_fails_no_request_of_another(stack, sims, fault, seen, ejected):
    for sim in sims.values():
        sim.fail(f"{fault},containing=poison" if ":" in fault else f"{fault}:containing=poison")
    statuses = load(stack)
    assert set(statuses["other"]) == {200}
    assert set(statuses["poisoner"]) == seen, "each gets the error of its own failure"
    breakers = stack.status()["breakers"]
    assert len(breakers["nodes"]) <= ejected, "one tenant ejects at most half of the nodes, and none by what is its own fault"
    assert breakers["pools"] == {}
    if fault == "reset":
        repeated = [each for sim in sims.values() for each in sim.seen(1000)[1] if b"poison 0" in each["body"]]
        assert len(repeated) == 2, "a request that broke two nodes is sent to no other, however often it comes"


@pytest.mark.parametrize("probes", [True, False], ids=["with probes", "without probes"])
@pytest.mark.parametrize("status", [401, 404])
def test_a_node_that_refuses_at_once_is_seen_by_few_requests_and_by_no_client(stack, sims, status):
    sims["b"].fail(f"reply:status={status}")
    statuses = load(stack)
    assert {*statuses["other"], *statuses["poisoner"]} == {200}
    seen = [each for each in sims["b"].seen(1000)[1] if b"hello" in each["body"]]
    assert len(seen) <= 3, "requests of the other tenant that the node got before it was ejected"
    assert list(stack.status()["breakers"]["nodes"]) == ["b"]
