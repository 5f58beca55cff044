"""Operations of a configuration's own: in the same form as those that are built in, and known wherever those are."""

import json

import pytest
import yaml
from msgspec.structs import replace

from din_extproc.control.routes import build_route_configuration
from din_extproc.domain.request import BUILT_IN, BodyKind, Metering, Operation
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.settings.load import load
from din_extproc.settings.node import NodeSettings, load_node
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings
from din_extproc.tools.explain.explain import explain
from din_extproc.tools.verify.route_coverage import RouteCoverage
from din_extproc.tools.verify.sample_body import build_body, content_type
from tests.support.stack import node

OWN = {
    "/v1/moderations": {"engines": "vllm", "paths": ["/moderations"], "prompt": "input", "metering": "prompt"},
    "/v1/audio/diarizations": {"engines": ["vllm"], "body": "multipart", "model": "engine", "metering": "seconds", "body_limit_mib": 1},
}
POOLS = {
    "own": {"model": "m", "engine": "vllm", "nodes": [node("a", "10.0.0.1:8000")]},
    "other": {"model": "n", "engine": "sglang", "nodes": [node("b", "10.0.0.2:8000")]},
}
CONFIG = {"version": 1, "operations": OWN, "pools": POOLS, "tenants": [{"id": "t", "models": ["*"]}]}


@pytest.fixture
def written(tmp_path):
    def write(**sections):
        file = tmp_path / "din.yaml"
        file.write_text(yaml.safe_dump({**CONFIG, **sections}))
        return load(file, {})

    return write


def explained(settings, path: str, body: bytes, **headers: str):
    request = {"path": path, "headers": headers, "body": body.decode("latin-1")}
    return explain(settings, "t", json.dumps(request).encode())


def test_an_operation_is_described_like_one_that_is_built_in(written):
    settings = written()
    assert isinstance(settings, Settings), settings
    known = settings.operations
    assert BUILT_IN.items() <= known.items()
    own = known["/moderations"]
    assert own is known["/v1/moderations"]
    assert (own.spec.metering, own.spec.prompt, own.spec.body) == (Metering.PROMPT, ("input",), BodyKind.JSON)
    assert known["/v1/audio/diarizations"].spec.body_limit == 1 << 20


def test_only_a_pool_whose_engine_has_it_gets_it(written):
    served = {pool.name: pool.operations for pool in written().pools}
    assert set(OWN) <= served["own"]
    assert not set(OWN) & served["other"]
    settings = written()
    body = json.dumps({"model": "n", "input": "some words"}).encode()
    refused = explained(settings, "/v1/moderations", body, **{"content-type": "application/json"})
    assert (refused.sent, refused.status, refused.message) == (False, 400, "The model `n` does not serve /v1/moderations.")


def test_explain_says_where_it_goes_and_what_it_is_charged_for(written):
    settings = written()
    body = json.dumps({"model": "m", "input": "some words"}).encode()
    result = explained(settings, "/moderations", body, **{"content-type": "application/json"})
    assert (result.sent, result.pool, result.intent.path) == (True, "own", "/v1/moderations")
    assert "charged   for prompt" in result.lines()
    own = settings.operations["/v1/audio/diarizations"]
    result = explained(settings, own, build_body(own, "m", 3), **{"content-type": content_type(own)})
    assert (result.sent, result.intent.model, result.intent.audio_seconds) == (True, "m", 1)
    assert "charged   for audio seconds, 1 seconds of audio" in result.lines()


def test_a_rule_and_a_pool_can_name_it(written):
    rules = [{"id": "own", "when": {"path": "/v1/moderations"}, "pool": "own"}]
    pools = {**POOLS, "own": {**POOLS["own"], "operations": ["/v1/moderations"]}}
    settings = written(rules=rules, pools=pools)
    assert isinstance(settings, Settings), settings
    assert next(pool.operations for pool in settings.pools if pool.name == "own") == {"/v1/moderations"}
    body = json.dumps({"model": "m", "input": "some words"}).encode()
    assert explained(settings, "/v1/moderations", body).rule == "own"


def test_verify_asks_for_it(written):
    settings = written()
    view, members = make_view(settings, {}), PoolMembership.from_pools(settings.pools)
    entries = list(RouteCoverage(view, members, settings.tenants[0], 12).entries())
    assert {entry.pool.name for entry in entries if entry.operation in OWN} == {"own"}
    assert {entry.operation.value for entry in entries if entry.pool.name == "own" and not entry.why} >= set(OWN)


def test_a_pool_that_fails_open_serves_it(written):
    settings = replace(written(), fail_open_pool="own")
    assert isinstance(settings, Settings), settings
    (host,) = build_route_configuration(settings.make_topology("")).virtual_hosts
    patterns = "|".join(route.match.safe_regex.regex for route in host.routes if route.match.safe_regex is not None)
    assert {*OWN, "/v1/chat/completions", "/v1/models"} <= set(patterns.replace("\\", "").split("|"))


def broken(path: str, **changes) -> dict:
    return {"operations": {path: {"engines": ["vllm"], **changes}}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (broken("/v1/embeddings"), "/v1/embeddings is built in"),
        (broken("/v1/models/x"), "/v1/models/x is built in"),
        (broken("/status") | {"envoy": {"health_path": "/status"}}, "/status is built in"),
        (broken("/x", paths=["/health"]), "/health belongs to the gateway itself"),
        (broken("/x", paths=["/rerank"]), "/rerank belongs to a built-in operation"),
        (broken("/x", paths=["/v1/usage"]), "/v1/usage belongs to the gateway itself"),
        (broken("/x", paths=["/y", "/y"]), "/y belongs to another operation"),
        ({"operations": {**OWN, "/moderations": {"engines": ["vllm"]}}}, "/moderations belongs to another operation"),
        (broken("x"), "a text of the form"),
        (broken("/x/"), "a text of the form"),
        (broken("/x?y=1"), "a text of the form"),
        (broken("/x", engines=[]), "at least 1 of these is expected"),
        (broken("/x", engines=["cobol"]), "'cobol' is not among vllm"),
        (broken("/x", metering="hours"), "'hours' is not among tokens, prompt, request, seconds, images"),
        (broken("/x", body="xml"), "'xml' is not among json, multipart"),
        (broken("/x", method="GET"), "'GET' is not among POST, PUT"),
        (broken("/x", modle="m"), "did you mean 'model'?"),
        ({"operations": {"/x": {}}}, "engines"),
        ({"rules": [{"id": "r", "when": {"path": "/v1/moderation"}, "pool": "own"}]}, "'/v1/moderation' is not a path that is routed"),
        ({"rules": [{"id": "r", "when": {"not": {"path": "/v1/chats"}}, "pool": "own"}]}, "'/v1/chats' is not a path that is routed"),
        ({"rules": [{"id": "r", "when": {"path": "/v1/moderations"}, "pool": "other"}]}, "does not serve /v1/moderations"),
        ({"pools": {"own": {**POOLS["own"], "operations": "/v1/moderation"}}}, "'/v1/moderation' is not a path that is routed"),
        ({"pools": {"other": {**POOLS["other"], "operations": "/v1/moderations"}}}, "sglang does not have /v1/moderations"),
    ],
)
def test_what_can_not_be_is_reported_with_its_place_and_reason(written, sections, message):
    rejected = written(**sections)
    assert isinstance(rejected, ConfigRejected), rejected
    assert message in str(rejected)
    assert "din.yaml:" in str(rejected)


def test_a_node_s_own_envoy_takes_what_its_file_names(tmp_path):
    file = tmp_path / "node.yaml"
    about = {"id": "a", "address": "10.0.0.1:8080", "model": "m", "version": "1.0", "dtype": "bf16", "max_seq_len": 4096}
    content = {
        "version": 1,
        "node": about,
        "engine": {"kind": "vllm", "address": "127.0.0.1:8000"},
        "registry": {"addresses": ["http://127.0.0.1:50061"]},
        "operations": OWN,
    }
    file.write_text(yaml.safe_dump(content))
    settings = load_node(file, {})
    assert isinstance(settings, NodeSettings), settings
    assert isinstance(settings.operations["/v1/moderations"], Operation)
