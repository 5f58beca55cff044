"""An adapter (LoRA) of a pool's model is a model of its own to clients, and chooses among the pool's nodes."""

import json

import pytest
import yaml

from din_extproc.admit.local import LocalLedger
from din_extproc.domain.membership import Heartbeat, HeartbeatReading, NodeState
from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.tools.explain.explain import explain
from tests.support.stack import key_of, node, tenant

BIG = {"model": "big", "engine": "vllm", "nodes": [node("c", "10.0.0.3:8000")]}


def config(**changes):
    main = {
        "model": "base",
        "engine": "vllm",
        "adapters": {"names": ["sql", "law"], "slots": 2},
        "nodes": [node("a", "10.0.0.1:8000"), node("b", "10.0.0.2:8000")],
    }
    return {
        "version": 1,
        "pools": {"main": main, "big": BIG},
        "aliases": {"lawyer": {"model": "law"}},
        "rules": [{"id": "sql-first", "when": {"model": "sql"}, "pool": "main", "fallback": "big"}],
        "tenants": [tenant("acme"), tenant("other", models=["base"])],
        **changes,
    }


def write(folder, **changes):
    file = folder / "din.yaml"
    file.write_text(yaml.safe_dump(config(**changes)))
    return file


@pytest.fixture
async def plane(tmp_path):
    background = Background()
    yield RequestPlane(load(write(tmp_path), {}), LocalLedger(lambda: 0), background, DecisionCounters())
    await background.close()


async def ask(plane, model, who="acme"):
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    head = RequestHead("POST", "/v1/chat/completions", {"authorization": f"Bearer {key_of(who)}"})
    return await plane.context.create_handler().decide(head, json.dumps(body).encode())


def report(plane, node_id, *adapters):
    beat = Heartbeat(state=NodeState.READY, sequence=1, adapters=adapters)
    plane.selector.load.on_reading(node_id, HeartbeatReading(beat, 0.0))


@pytest.mark.parametrize(("name", "adapter"), [("sql", "sql"), ("law", "law"), ("lawyer", "law")])
async def test_the_node_is_asked_for_the_adapter_and_the_tenant_is_charged_for_it(plane, name, adapter):
    report(plane, "a")
    report(plane, "b", "sql", "law")
    sent = await ask(plane, name)
    assert isinstance(sent, Send), sent
    assert (sent.cluster, sent.endpoints) == ("main", ("10.0.0.2:8000",))
    assert ("x-din-adapter", adapter) in sent.request_headers
    assert sent.body is None if name == adapter else json.loads(sent.body)["model"] == adapter
    labels = json.loads(sent.metadata["labels"])
    assert (labels["model"], labels.get("alias"), labels["pool"]) == (adapter, name, "main")


async def test_the_base_model_goes_to_any_node(plane):
    report(plane, "a")
    sent = await ask(plane, "base")
    assert set(sent.endpoints) == {"10.0.0.1:8000", "10.0.0.2:8000"}
    assert "x-din-adapter" not in dict(sent.request_headers)


async def test_where_no_node_has_the_adapter_the_fallback_of_its_rule_takes_over(plane):
    for node_id in ("a", "b"):
        report(plane, node_id, "law")
    sent = await ask(plane, "sql")
    assert (sent.cluster, dict(sent.response_headers)["x-din-degraded-reason"]) == ("big", "no_healthy_node")
    assert json.loads(sent.body)["model"] == "big"


async def test_an_adapter_that_no_node_has_is_refused_by_name(plane):
    for node_id in ("a", "b"):
        report(plane, node_id, "sql")
    refused = await ask(plane, "law")
    assert isinstance(refused, ImmediateResponse)
    assert refused.status == 503
    assert "law" in json.loads(refused.body)["detail"]


async def test_a_node_that_lacks_the_adapter_is_asked_for_others_still(plane):
    plane.on_missing_adapters({"a": "sql"})
    assert (await ask(plane, "sql")).endpoints == ("10.0.0.2:8000",)
    assert set((await ask(plane, "law")).endpoints) == {"10.0.0.1:8000", "10.0.0.2:8000"}


async def test_a_tenant_uses_the_adapters_it_is_granted(plane):
    assert (await ask(plane, "base", "other")).cluster == "main"
    assert (await ask(plane, "sql", "other")).status == 403


def test_limits_budgets_and_grants_take_an_adapters_name(tmp_path):
    limited = tenant("acme", models=["sql"])
    limited["limits"] = {**limited.get("limits", {}), "per_model": {"sql": {"rpm": 5}}}
    settings = load(write(tmp_path, tenants=[limited]), {})
    assert settings.find_tenant("acme").per_model["sql"].rpm == 5


@pytest.mark.parametrize(
    ("adapters", "engine", "message"),
    [
        ({"names": ["big"]}, "vllm", "'big' is also a model that a pool serves"),
        ({"names": ["sql"]}, "tgi", "tgi chooses no adapter by the model's name"),
        ({"names": []}, "vllm", "names"),
    ],
)
def test_adapters_that_no_request_could_name_are_refused(tmp_path, adapters, engine, message):
    pools = {"main": {**config()["pools"]["main"], "adapters": adapters, "engine": engine}, "big": BIG}
    rejected = load(write(tmp_path, pools=pools, rules=[], aliases={}), {})
    assert isinstance(rejected, ConfigRejected)
    assert message in str(rejected)


def test_explain_says_what_the_nodes_have_of_the_adapter(tmp_path):
    body = json.dumps({"model": "sql", "messages": [{"role": "user", "content": "hello"}]}).encode()
    found = explain(load(write(tmp_path), {}), "acme", body)
    assert (found.model, found.pool, found.rule) == ("sql", "main", "sql-first")
    assert [rule.matched for rule in found.rules] == [True]
    assert all("has room for the adapter" in each.why for each in found.candidates)
