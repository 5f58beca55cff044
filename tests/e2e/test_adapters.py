"""A node without the adapter (LoRA) of a request, through a real Envoy: the request is served by another, and the node keeps its own."""

from collections.abc import Iterator

import pytest

from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    sims = {
        "lacks": EngineSim(model="base", served_model=("base",), decode_rate=5000.0, prefill_rate=1e6),
        "has": EngineSim(model="base", served_model=("base", "sql"), decode_rate=5000.0, prefill_rate=1e6),
    }
    with together(sims) as engines:
        nodes = [node(name, engine.address) for name, engine in engines.items()]
        pool = {"model": "base", "engine": "vllm", "scheduler": "round_robin", "adapters": {"names": ["sql"]}, "nodes": nodes}
        config = {
            "pools": {"chat": pool},
            "tenants": [tenant("acme")],
        }
        with Stack(config, gateway={"scrape_s": 0}) as running:  # what a node lacks is found out by asking it
            running.sims = engines
            yield running


def test_no_client_sees_the_404_of_a_node_that_lacks_the_adapter(stack):
    def asked() -> int:
        return sum(request["body"].count(b'"sql"') for request in stack.sims["lacks"].seen()[1])

    def served() -> int:
        reply = stack.chat(model="sql", max_tokens=2)
        assert (reply.status_code, reply.headers.get("x-din-node-id")) == (200, "has"), reply.text
        return asked()

    stack.eventually(served, "the node that lacks the adapter was asked for it once")
    stack.eventually(lambda: served() == served(), "it is asked no more")


def test_that_node_goes_on_serving_its_model(stack):
    replies = [stack.chat(model="base", max_tokens=2) for _ in range(8)]
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.headers["x-din-node-id"] for reply in replies} == {"has", "lacks"}
    assert not any(stack.status()["breakers"][kind] for kind in ("nodes", "pools")), "a 404 for an adapter opens no breaker"


def test_usage_is_the_adapters(stack):
    reply = stack.chat(model="sql", max_tokens=2)
    assert stack.logged(reply).get("model") == "sql", (reply.text, stack.logged(reply))
