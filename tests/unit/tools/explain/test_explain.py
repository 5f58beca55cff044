"""What `explain` says: every rule, every node, and why."""

import re
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from din_extproc.cli.app import app
from din_extproc.domain.membership import Heartbeat, Member, NodeState, Registration
from din_extproc.domain.node import Endpoint, Node
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.settings.load import load
from din_extproc.tools.explain.explain import ExplainFailed, explain

NODES = [
    {"id": "a", "address": "10.0.0.1:80", "version": "1.0", "dtype": "bf16", "max_seq_len": 4000},
    {"id": "b", "address": "10.0.0.2:80", "version": "1.1", "dtype": "bf16", "max_seq_len": 8000},
    {"id": "c", "address": "10.0.0.3:80", "version": "1.1", "dtype": "bf16", "max_seq_len": 4000},
]
DOCUMENT = {
    "version": 1,
    "pools": {
        "fast": {"model": "m", "engine": "vllm", "nodes": NODES, "long_tail": {"over_s": 60, "timeout_s": 300}},
        "quick": {
            "model": "m",
            "engine": "vllm",
            "scheduler": {"name": "prefix_affinity", "headroom": 2},
            "nodes": [{"id": "q", "address": "10.0.0.9:80", "version": "1.0", "dtype": "bf16", "max_seq_len": 500}],
        },
    },
    "tenants": [{"id": "t", "keys": [], "models": ["*"]}],
    "rules": [
        {"id": "long", "when": {"estimated_tokens": {"gt": 9000}}, "pool": "quick"},
        {"id": "tier", "when": {"header": {"x-task-tier": "x"}, "not": {"stream": True}}, "pool": "quick", "fallback": "fast"},
        {"id": "rest", "when": "always", "pool": "fast"},
    ],
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("explain") / "din.json"
    path.write_bytes(msgspec.json.encode(DOCUMENT))
    return load(path, {})


def request(headers=None, **body):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    return msgspec.json.encode({"headers": headers or {}, "body": body})


def why(explained):
    return {each.node: each.why for each in explained.candidates}


def test_every_rule_says_why_it_did_or_did_not_take_the_request(settings):
    explanation = explain(settings, "t", request({"x-task-tier": "y"}))
    assert [(trial.rule, trial.matched) for trial in explanation.rules] == [("long", False), ("tier", False), ("rest", True)]
    assert "not at least 9001" in explanation.rules[0].reasons[0]
    assert explanation.rules[1].reasons == ("x-task-tier is 'y'",)
    explanation = explain(settings, "t", request({"x-task-tier": "x"}, stream=True))
    assert explanation.rules[1].reasons == ("its excluded condition holds",)
    assert explanation.intent.stream


def test_nodes_say_what_they_are_ranked_by_or_why_they_were_dropped(settings):
    explanation = explain(settings, "t", request({"x-din-model-version": "<1.1"}))
    assert explanation.nodes == ("a",)
    assert why(explanation) == {
        "a": "4000 tokens left",
        "b": "its version 1.1 does not meet <1.1",
        "c": "its version 1.1 does not meet <1.1",
    }
    explanation = explain(settings, "t", request(max_tokens=5000))
    assert explanation.nodes == ("b",)
    assert "it takes 4000 tokens" in why(explanation)["a"]
    explanation = explain(settings, "t", request(max_tokens=50_000))
    assert (explanation.sent, explanation.refusal, explanation.nodes) == (False, "context_length_exceeded", ())
    assert len(explanation.candidates) == 3


def test_a_fallback_says_for_whom_it_stands_in(settings):
    explanation = explain(settings, "t", request({"x-task-tier": "x"}, max_tokens=600))
    assert (explanation.pool, explanation.fallback, explanation.degraded, explanation.scheduler) == (
        "quick",
        "fast",
        "context_length_exceeded",
        "token_available",
    )
    assert "it takes 500 tokens" in why(explanation)["q"]
    assert explanation.nodes[0] == "b"
    explanation = explain(settings, "t", request({"x-task-tier": "x"}, max_tokens=60))
    assert explanation.scheduler == "prefix_affinity"
    assert "choice 1 of the session or prefix" in why(explanation)["q"]


def test_a_long_request_is_called_one_and_gets_its_own_timeout(settings):
    explanation = explain(settings, "t", request(max_tokens=3000))
    assert (explanation.long, explanation.timeout_ms) == (True, 300_000)
    explanation = explain(settings, "t", request({"x-din-timeout-ms": "70000"}, max_tokens=3000))
    assert explanation.timeout_ms == 70_000
    assert explain(settings, "t", request()).timeout_ms is None


def row(node_id, state=NodeState.READY, pools=("fast",), reason="", **fields):
    node = Node(node_id, Endpoint("10.0.1.1", 80), "m", "1.0", "bf16", "", 1, 4000, 8)
    beat = Heartbeat(state=state, sequence=1, **fields)
    return MemberForm.of(
        Member(registration=Registration(node=node, engine="vllm"), state=state, trust=1.0, reasons=(reason,), beat=beat, beat_at=1.0),
        pools,
        2.0,
    )


def test_a_running_sidecars_nodes_are_explained_with_their_load_and_state(settings):
    rows = [row("x", tokens_in_use=3000, running=2), row("y", tokens_in_use=100, running=1), row("z", NodeState.DRAINING, (), "asked to")]
    explanation = explain(settings, "t", request(), rows)
    assert explanation.nodes == ("y", "x")
    assert why(explanation) == {"y": "3900 tokens left", "x": "1000 tokens left", "z": "draining: asked to"}


def test_what_it_says_fits_a_terminal_and_a_machine(settings):
    explanation = explain(settings, "t", request({"x-din-model-version": "<1.1"}, max_tokens=100))
    text = "\n".join(explanation.lines())
    for part in ("rule      * rest -> fast", "node      1 a: 4000 tokens left", "node      - b: its version", "scheduler token_available"):
        assert part in text
    assert msgspec.json.decode(msgspec.json.encode(explanation))["candidates"][0] == {
        "node": "a", "pool": "fast", "place": 1, "score": -4000.0, "why": "4000 tokens left",
    }  # fmt: skip


def test_a_refusal_is_explained_as_far_as_it_came(settings):
    assert explain(settings, "t", b"{").refusal == "invalid_request"
    explanation = explain(settings, "t", request({"x-din-model-version": ">=9"}))
    assert explanation.refusal == "version_mismatch"
    assert explanation.rules
    assert not any(trial.matched for trial in explanation.rules)
    with pytest.raises(ExplainFailed, match="there are: t"):
        explain(settings, "nobody", request())


def test_a_native_engine_is_explained_with_the_parameters_that_it_does_not_support(tmp_path):
    native = {"model": "m", "engine": "ollama", "api": "native", "nodes": NODES[1:2]}

    def explanation(unmappable):
        file = tmp_path / f"{unmappable}.json"
        pools = {"own": {**native, "unmappable": unmappable}}
        file.write_bytes(msgspec.json.encode({**DOCUMENT, "pools": pools, "rules": []}))
        return explain(load(file, {}), "t", request(min_tokens=3))

    sent, refused = explanation("drop"), explanation("refuse")
    assert (sent.sent, sent.node_path, sent.left_out) == (True, "/api/chat", "min_tokens")
    assert "left out  min_tokens: the engine can't be told" in sent.lines()
    assert (refused.sent, refused.status, refused.refusal) == (False, 400, "invalid_request")


def test_an_alias_that_is_a_pattern_is_named(tmp_path):
    file = tmp_path / "din.json"
    file.write_bytes(msgspec.json.encode({**DOCUMENT, "aliases": {"claude-*": {"model": "m"}}}))
    explanation = explain(load(file, {}), "t", request(model="claude-sonnet-4-5"))
    assert (explanation.alias, explanation.model) == ("claude-*", "m")
    assert "model     m, by the alias claude-*" in explanation.lines()


def test_the_node_that_takes_over_in_flight_is_named_after_the_pools_own(settings, tmp_path):
    asked = request({"x-task-tier": "x"}, messages=[{"role": "user", "content": "hi"}], max_tokens=10)
    explanation = explain(settings, "t", asked)
    assert (explanation.pool, explanation.nodes) == ("quick", ("q", "q")), "as often as it would be asked before"
    assert explanation.moves_to in {"a", "b", "c"}
    assert any(line.endswith(f"then in flight {explanation.moves_to}") for line in explanation.lines())
    assert explain(settings, "t", request()).moves_to is None, "the rule has no fallback"
    file = tmp_path / "staying.json"
    file.write_bytes(msgspec.json.encode({**DOCUMENT, "envoy": {**DOCUMENT.get("envoy", {}), "retry": {"to_fallback": False}}}))
    assert explain(load(file, {}), "t", asked).moves_to is None, "it is switched off"


def test_a_request_is_read_from_a_file_or_standard_input_and_other_input_is_reported(settings, tmp_path):
    def explanation(file, text=None):
        return CliRunner().invoke(app, ["explain", file, "--tenant", "t", "-c", settings.file], input=text)

    file = tmp_path / "request.json"
    file.write_bytes(request())
    assert explanation(str(file)).output == explanation("-", request()).output != ""
    wrong = explanation('{"model": "m"}')
    assert wrong.exit_code == 1
    assert """{"model": "m"} is no file; give a file with the request's JSON, or - for standard input""" in wrong.output
    assert re.search(r"explain \[OPTIONS\] \{?FILE\b", CliRunner().invoke(app, ["explain", "--help"]).output)
