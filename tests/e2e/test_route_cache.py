"""The route cache: kept for its time, and never a way to a node that an operator has just taken out."""

import pytest

from tests.support.operating import Operator, admin_keys
from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("seconds", [0, 60])
def test_requests_of_one_length_are_hits_while_it_lasts_and_a_change_of_nodes_holds_at_once(seconds):
    with together({name: EngineSim(model="m") for name in ("a", "b")}) as engines:
        nodes = [node(name, sim.address) for name, sim in engines.items()]
        config = {"pools": {"p": {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": nodes}}, "tenants": [tenant("acme")]}
        with Stack(config, gateway={"route_cache_s": seconds}, admin_keys=admin_keys()) as stack:
            operator = Operator(stack)

            def answering() -> list[str]:
                return [stack.chat(max_tokens=1).headers["x-din-node-id"] for _ in range(6)]

            assert set(answering()) == {"a", "b"}
            cache = operator.get("/status").json()["route_cache"]
            assert (cache["hits"] > 0) is bool(seconds)
            for _ in range(3):
                for gone, left in (("a", "b"), ("b", "a")):
                    assert operator.post(f"/nodes/{gone}/drain").status_code == 200
                    assert set(answering()) == {left}, "no request goes to a drained node from the order on"
                    assert operator.post(f"/nodes/{gone}/undrain").status_code == 200
