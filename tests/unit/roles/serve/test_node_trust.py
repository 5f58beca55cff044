"""Trust in listed nodes: what lowers it, the updates for workers, and when a node is quarantined."""

import pytest
import yaml

from din_extproc.roles.serve.node_trust import NodeTrust
from din_extproc.settings.load import load
from tests.support.stack import node, tenant


@pytest.fixture
def trust(tmp_path):
    pool = {"model": "m", "engine": "vllm", "nodes": [node(name, f"10.0.0.{at}:8000") for at, name in enumerate("ab", 1)]}
    file = tmp_path / "din.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "pools": {"p": pool}, "tenants": [tenant("acme")]}))
    kept_out = []

    async def quarantine(node_id, reason):
        kept_out.append((node_id, reason))

    made = NodeTrust(None, quarantine)
    made.kept_out = kept_out
    made.reload(load(file, {}).pools)
    return made


async def test_failures_lower_it_and_are_published_to_workers(trust):
    assert trust.take_readings() == {}
    await trust.record_answers("a", answers=2, failures=10)
    await trust.record_answers("gone", answers=0, failures=10)
    assert {node_id: round(reading.trust, 2) for node_id, reading in trust.take_readings().items()} == {"a": 0.5}
    trust.release("a")
    assert {node_id: reading.trust for node_id, reading in trust.take_readings().items()} == {"a": 1.0}
    assert trust.take_readings() == {}


async def test_the_third_difference_keeps_a_node_out_and_agreements_weigh_against_it(trust):
    for _ in range(2):
        await trust.record_comparison("a", disagreements=1, reason="a and b differ at token 3")
    assert trust.score("a") < 0.4
    assert trust.kept_out == []
    await trust.record_comparison("a", disagreements=1, reason="a and b differ at token 3")
    assert trust.kept_out == [("a", "answers differ: a and b differ at token 3")]
    await trust.record_comparison("b", agreements=100)
    for _ in range(3):
        await trust.record_comparison("b", disagreements=1)
    assert len(trust.kept_out) == 1


async def test_another_stated_id_costs_trust_but_keeps_no_listed_node_out(trust):
    await trust.record_misidentified("a", 9, "a says it is b")
    assert trust.score("a") < 0.2
    assert trust.kept_out == []
