"""Route coverage: every entry has a request that reaches it, or the reason why none does."""

from pathlib import Path

import pytest
import yaml

from din_extproc.domain.request import Operation
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.southbound.engines import openai_operations
from din_extproc.tools.verify.route_coverage import RouteCoverage, RouteEntry
from tests.support.stack import node, tenant

CONFIG = {
    "version": 1,
    "gateway": {"ext_proc": {"socket": "/tmp/x.sock"}, "access_log": {"address": "127.0.0.1:1"}},
    "store": {"url": "redis://127.0.0.1:1"},
    "aliases": {"m": {"model": "small"}, "auto": {"models": ["small", "large"]}},
    "pools": {
        "fast": {
            "model": "small",
            "engine": "vllm",
            "nodes": [node("a", "10.0.0.1:8000"), node("b", "10.0.0.2:8000", max_seq_len=1000, version="2025.4.0")],
        },
        "deep": {"model": "large", "engine": "vllm", "nodes": [node("c", "10.0.0.3:8000", max_seq_len=32768)]},
        "vectors": {"model": "embedder", "engine": "vllm", "operations": ["/v1/embeddings"], "nodes": [node("d", "10.0.0.4:8000")]},
    },
    "rules": [
        {"id": "long", "when": {"estimated_tokens": {"gt": 4000}}, "pool": "deep"},
        {"id": "never", "when": {"all": [{"stream": True}, {"stream": False}]}, "pool": "fast"},
        {"id": "hidden", "when": {"estimated_tokens": {"gt": 6000}}, "pool": "deep"},
        {"id": "urgent", "when": {"priority": ["batch"], "header": {"x-task-tier": "light"}}, "pool": "fast"},
        {"id": "theirs", "when": {"tenant": ["other"]}, "pool": "fast"},
    ],
    "tenants": [tenant("acme"), tenant("other", models=("large",))],
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    file: Path = tmp_path_factory.mktemp("walk") / "din.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    loaded = load(file, {})
    assert isinstance(loaded, Settings), str(loaded)
    return loaded


@pytest.fixture(scope="module")
def entries(settings: Settings) -> dict[str, list[RouteEntry]]:
    """All entries, by the tenant that asks."""
    view, members = make_view(settings, {}), PoolMembership.from_pools(settings.pools)
    return {each.id: list(RouteCoverage(view, members, each, 12).entries()) for each in settings.tenants}


def test_every_rule_of_every_name_is_there(entries: dict[str, list[RouteEntry]]) -> None:
    found = {(entry.name, entry.rule, entry.pool.name) for entry in entries["acme"]}
    rules = {"fast": {"never", "urgent", "theirs", ""}, "deep": {"long", "hidden", ""}, "vectors": {""}}
    pools = {"m": {"fast"}, "small": {"fast"}, "auto": {"fast", "deep"}, "large": {"deep"}, "embedder": {"vectors"}}
    assert found == {(name, rule, pool) for name, own in pools.items() for pool in own for rule in rules[pool]}


def test_a_request_that_is_made_gets_there(settings: Settings, entries: dict[str, list[RouteEntry]]) -> None:
    view = make_view(settings, {})
    acme = settings.tenants[0]
    members = PoolMembership.from_pools(settings.pools)
    made = [entry for entry in entries["acme"] if not entry.why]
    assert len(made) > 10
    for entry in made:
        reading = parse_request(entry.head, entry.body, TokenCalibrators(view.table.preferred_model).for_name, view.body_limit)
        assert isinstance(reading, ParsedRequest)
        routed = view.table.route(reading.intent, acme, entry.head, 12, members.get_versions)
        assert not isinstance(routed, Refusal)
        assert (routed.rule, routed.pool.name) == (entry.rule, entry.pool.name)
        assert all(node.max_seq_len >= entry.tokens for node in entry.nodes)


def test_segments_are_cut_where_a_rule_turns_or_a_node_is_too_short(entries: dict[str, list[RouteEntry]]) -> None:
    own = [entry for entry in entries["acme"] if (entry.name, entry.rule, entry.pool.name) == ("small", "", "fast")]
    reached = [(entry.tokens, {node.id for node in entry.nodes}) for entry in own if not entry.why]
    assert all(nodes == {"a", "b"} for tokens, nodes in reached if tokens < 1000)
    assert all(nodes == {"a"} for tokens, nodes in reached if tokens > 1000)
    served = openai_operations("vllm")
    assert {entry.operation for entry in own} == served
    assert [entry.first for entry in own if entry.tokens < 1000] == [True, *[False] * (len(served) - 1)]


def test_an_entry_that_nobody_reaches_says_why(entries: dict[str, list[RouteEntry]]) -> None:
    why = {(entry.name, entry.rule): entry.why for entry in entries["acme"] if not entry.nodes}
    assert why["large", "hidden"] == "rule long takes its requests"
    assert why["small", "never"] == "no request meets its condition"
    assert why["small", "theirs"] == "pool fast takes its requests"


def test_what_could_not_be_asked_is_distinguished_from_what_no_request_reaches(entries: dict[str, list[RouteEntry]]) -> None:
    idle = {(entry.name, entry.rule): entry.idle for entry in entries["acme"] if entry.why}
    assert idle["large", "hidden"]
    assert idle["small", "never"]
    assert idle["small", "theirs"]


def test_headers_and_priority_of_the_condition_are_sent(entries: dict[str, list[RouteEntry]]) -> None:
    urgent = next(entry for entry in entries["acme"] if entry.rule == "urgent" and not entry.why)
    assert urgent.head.headers == {"content-type": "application/json", "x-task-tier": "light", "x-din-priority": "batch"}


def test_the_operation_is_one_that_the_pool_serves(entries: dict[str, list[RouteEntry]]) -> None:
    assert {entry.operation for entry in entries["acme"] if entry.pool.name == "vectors"} == {Operation.EMBEDDINGS}


def test_another_tenant_walks_what_it_may_use(entries: dict[str, list[RouteEntry]]) -> None:
    assert {entry.name for entry in entries["other"]} == {"auto", "large"}
