"""Nodes of one pool that differ in dtype or tensor-parallel size, through a real Envoy: each kind is a pool of its own."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.servers import EngineSim, free_port, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e
KINDS = {
    "whole": {},
    "whole-2": {},
    "gone": {},
    "small": {"dtype": "fp8"},
    "split": {"tp_world_size": 2},
    "split-gone": {"tp_world_size": 2},
}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    with together({name: EngineSim(model="m") for name in KINDS if "gone" not in name}) as running:
        yield running


def config(engines, *names: str) -> dict:
    dead = f"127.0.0.1:{free_port()}"
    nodes = [node(name, engines[name].address if name in engines else dead, **KINDS[name]) for name in names]
    pool = {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": nodes}
    return {"pools": {"p": pool}, "tenants": [tenant("acme")], "health": {"breaker": False}}


def test_a_failed_request_is_tried_again_at_a_node_of_its_kind_and_at_no_other(engines):
    with Stack(config(engines, "whole", "whole-2", "gone", "small")) as stack:
        replies = [stack.chat() for _ in range(12)]
        assert [reply.status_code for reply in replies] == [200] * 12
        assert {reply.headers["x-din-node-id"] for reply in replies} == {"whole", "whole-2", "small"}
        assert len(engines["small"].seen()[1]) == 3, "nothing that failed elsewhere has come here"
        stack.settled(12)


def test_the_only_node_of_its_kind_has_no_substitute(engines):
    with Stack(config(engines, "whole", "small", "split-gone")) as stack:
        statuses = [stack.chat().status_code for _ in range(12)]
        assert statuses.count(503) == 4, "a third of the requests go to the kind without a living node"
        assert statuses.count(200) == 8
        assert stack.envoy_stats("cluster.p.upstream_rq_retry$").get("cluster.p.upstream_rq_retry") == 0


def test_check_says_that_kinds_are_kept_apart(engines):
    with Stack(config(engines, "whole", "small", "split")) as stack:
        result = subprocess.run(
            [sys.executable, "-m", "din_extproc", "check", str(stack.config_file)], capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stdout
        assert "the nodes differ in dtype (bf16: whole, split; fp8: small): a request stays with nodes of one kind" in result.stdout
        assert "the nodes differ in tp_world_size" in result.stdout
