"""A node that refuses the gateway's own credentials or model name: clients are served by the others, and it is ejected."""

from collections.abc import Iterator

import pytest

from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(params=[401, 404])
def stack(request) -> Iterator[Stack]:
    made = {
        "good": EngineSim(model="m", decode_rate=5000.0, prefill_rate=1e6),
        "bad": EngineSim(model="m", decode_rate=5000.0, prefill_rate=1e6, faults=f"reply:status={request.param}"),
    }
    with together(made) as sims:
        nodes = [node(name, sim.address) for name, sim in sims.items()]
        pools = {"chat": {"model": "m", "engine": "vllm", "nodes": nodes}}
        rules = [{"id": "all", "when": "always", "pool": "chat"}]
        health = {"probe": False}
        with Stack({"pools": pools, "rules": rules, "tenants": [tenant("acme")], "health": health}) as running:
            running.sims = sims
            yield running


def test_no_client_sees_the_refusal_and_the_node_is_ejected(stack):
    replies = [stack.chat(model="m", max_tokens=2) for _ in range(40)]
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.headers["x-din-node-id"] for reply in replies} == {"good"}
    stack.settled(40)
    asked = len(stack.sims["bad"].seen()[1])
    assert 1 <= asked < 20, "ejected after its first failures"
