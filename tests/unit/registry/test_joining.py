"""Which nodes a pool takes by their compute capability."""

import pytest

from din_extproc.domain.membership import Registration
from din_extproc.domain.node import Endpoint, Node, Pool, meets_capability
from din_extproc.registry.joining import find_mismatch


@pytest.mark.parametrize(
    ("has", "wanted", "meets"),
    [
        ("9.0", "", True),
        ("", "", True),
        ("9.0", "9.0", True),
        ("7.5", "9.0", False),
        ("10.0", ">=9.0", True),
        ("9.0", ">=9.0", True),
        ("8.9", ">=9.0", False),
        ("", ">=8.0", False),
    ],
)
def test_a_capability_is_met_exactly_or_as_a_minimum_by_number(has, wanted, meets):
    assert meets_capability(has, wanted) is meets


def test_a_node_below_the_pools_minimum_is_refused_with_the_reason():
    pool = Pool(name="p", model="m", served_model="m", engine="vllm", scheduler="round_robin", nodes=(), compute_capability=">=8.0")
    old = Node("n", Endpoint("10.0.0.1", 8000), "m", "1", "bf16", "7.5", 1, 8192, 8)
    assert find_mismatch(Registration(node=old, engine="vllm"), pool) == "compute_capability is 7.5, the pool's is >=8.0"
