"""Records of finished requests, through a real Envoy and several workers: metrics and the audit log."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from din_extproc.observe import instruments as of
from din_extproc.roles.configure.monitoring import monitoring_files
from din_extproc.settings.load import load
from din_extproc.tools.replay.replay import replay
from tests.support.collector import Collector
from tests.support.node_stack import NodeStack, RegistryThread
from tests.support.promql import metrics_of, queries_in
from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=500.0, max_num_seqs=256, kv_tokens=1_000_000, reasoning="reasoning_content") as running:
        yield running


@pytest.fixture(scope="module")
def second() -> Iterator[EngineSim]:
    with EngineSim(model="m2", decode_rate=500.0) as running:
        yield running


@pytest.fixture(scope="module")
def third() -> Iterator[EngineSim]:
    with EngineSim(model="m2", decode_rate=500.0) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine) -> Iterator[Stack]:
    config = {
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}},
        "tenants": [tenant("acme"), tenant("trial", rpm=1)],
    }
    with Stack(config, gateway={"workers": 2, "scrape_s": 0.2}) as running:
        yield running


def scrape(stack: Stack) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """The metrics page by sample name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.admin_port}/metrics", timeout=10) as reply:
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = reply.read().decode()
    read: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            read.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return read


def total(read, name: str, **labels: str) -> float:
    """The sum of all samples of the name with these labels."""
    return sum(value for pairs, value in read.get(name, {}).items() if set(labels.items()) <= pairs)


def test_one_scrape_shows_what_all_workers_did(stack):
    replies = [stack.chat() for _ in range(8)]
    assert {reply.status_code for reply in replies} == {200}
    assert [stack.chat(tenant_name="trial").status_code for _ in range(3)] == [200, 429, 429]
    assert stack.chat(model="nobody").status_code == 404
    stack.settled(12)
    stack.eventually(lambda: total(scrape(stack), "din_decisions_total") == 12, "both workers report")
    read = scrape(stack)
    used = sum(reply.json()["usage"]["total_tokens"] for reply in replies)
    assert total(read, "din_tokens_total", din_tenant_id="acme") == used
    assert total(read, "din_requests_total", din_outcome="completed") == 9
    assert total(read, "din_requests_total", din_tenant_id="trial", din_outcome="refused") == 2
    assert total(read, "din_refusals_total", din_refusal_code="rate_limit_exceeded") == 2
    assert total(read, "din_refusals_total", din_refusal_code="model_not_found") == 1
    assert total(read, "din_decision_duration_seconds_count") == 12
    assert total(read, "gen_ai_server_request_duration_seconds_count", gen_ai_operation_name="chat") == 9
    assert total(read, "din_ready") == total(read, "din_redis_up") == total(read, "din_limits_shared") == 1
    assert total(read, "din_workers") == 2
    assert total(read, "din_nodes", din_state="ready") == 1
    assert total(read, "din_request_queue_duration_seconds_count") == 9


def test_names_that_clients_make_up_are_no_labels(stack):
    before = sum(len(samples) for samples in scrape(stack).values())
    with stack.client() as client:
        for at in range(40):
            body = {"model": f"made-up-{at}", "messages": [], "user": f"u{at}"}
            client.post("/v1/chat/completions", json=body, headers={"x-din-trace-id": f"trace-{at:08d}", "x-task-tier": f"t{at}"})
    read = scrape(stack)
    assert sum(len(samples) for samples in read.values()) < before + 20
    assert "made-up" not in str(read)
    assert {name for name in read if name.startswith("din_") and not name.endswith(("_bucket", "_count", "_sum"))} <= {
        each.prometheus for each in of.ALL
    }


def test_what_a_worker_counted_outlives_it(stack):
    time.sleep(1.2)  # both workers have reported
    before = total(scrape(stack), "din_decisions_total")
    (victim, *_) = [child for child in psutil.Process(stack.sidecar.pid).children() if "--worker" in child.cmdline()]
    victim.kill()
    stack.eventually(lambda: total(scrape(stack), "din_worker_restarts_total") == 1, "a new worker")
    assert total(scrape(stack), "din_decisions_total") == before


KEY_TEXT = "an audit key of these tests"
STREAM = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def node_stack(engine) -> Iterator[NodeStack]:
    with RegistryThread() as registry, NodeStack(engine.address, registry.url, model="m", envoy=True) as running:
        yield running


@pytest.fixture(scope="module")
def pools(node_stack, second, third) -> dict:
    twins = [node("second", second.address), node("third", third.address)]
    return {
        "p": {"model": "m", "engine": "vllm", "nodes": [node("gpu-1", node_stack.address)]},
        "twins": {"model": "m2", "engine": "vllm", "scheduler": "round_robin", "nodes": twins},
    }


@pytest.fixture(scope="module")
def audited(pools, collector) -> Iterator[Stack]:
    stack = Stack({}, gateway={"workers": 2})
    (stack.folder / "audit.key").write_text(KEY_TEXT + "\n")
    stack.write(audited_config(pools, collector))
    with stack as running:
        yield running


def audited_config(pools, collector, *tenants) -> dict:
    return {
        "pools": pools,
        "tenants": [tenant("acme"), tenant("trial", rpm=1), *tenants],
        "audit": {"folder": "audit", "replica": "gw-1", "keys": {"k1": {"file": "audit.key"}}, "flush_ms": 20},
        "telemetry": {"endpoint": collector.endpoint, "sample": 1, "flush_s": 0.1, "metrics_every_s": 0.5},
    }


def records(stack: Stack) -> list[dict]:
    """What the audit log says, as its files have it."""
    lines = [line for path in sorted((stack.folder / "audit").glob("gw-1-*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def of_kind(stack: Stack, kind: str) -> list[dict]:
    return [record for record in records(stack) if record["kind"] == kind]


def audit_verify(stack: Stack, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "din_extproc", "audit", "verify", "--config", str(stack.config_file), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_request_leaves_its_admission_and_its_end_in_the_audit_log(audited):
    secret = "my prompt is nobody's business"
    reply = audited.chat(messages=[{"role": "user", "content": secret}], headers={"x-din-trace-id": "audit-trace-01"})
    assert audited.chat(tenant_name="trial").status_code == 200
    assert audited.chat(tenant_name="trial", headers={"x-din-trace-id": "audit-trace-02"}).status_code == 429
    with audited.client(None) as client:
        assert client.post("/v1/chat/completions", json={}, headers={"x-din-trace-id": "audit-trace-03"}).status_code == 401
    kinds = "admitted", "settled", "refused"
    audited.eventually(lambda: all(len(of_kind(audited, kind)) == 2 for kind in kinds), "all is recorded")
    (settled,) = [record for record in of_kind(audited, "settled") if record["trace_id"] == "audit-trace-01"]
    (admitted,) = [record for record in of_kind(audited, "admitted") if record["trace_id"] == "audit-trace-01"]
    usage = reply.json()["usage"]
    assert (settled["tenant"], settled["key_id"], settled["model"], settled["version"]) == ("acme", "acme", "m", "2025.3.1")
    assert (settled["prompt_tokens"], settled["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (settled["node_id"], settled["outcome"], settled["status"]) == ("gpu-1", "completed", 200)
    assert admitted["request_id"] == settled["request_id"]
    assert admitted["reserved_tokens"] == settled["reserved_tokens"] > 0
    refused = {record["trace_id"]: record for record in of_kind(audited, "refused")}
    assert (refused["audit-trace-02"]["tenant"], refused["audit-trace-02"]["code"]) == ("trial", "rate_limit_exceeded")
    assert (refused["audit-trace-03"].get("tenant"), refused["audit-trace-03"]["code"]) == (None, "invalid_api_key")
    everything = "".join(path.read_text() for path in (audited.folder / "audit").iterdir())
    assert secret not in everything
    assert key_of("acme") not in everything
    assert KEY_TEXT not in everything


def test_a_change_of_configuration_and_keys_is_recorded(audited, pools, collector):
    before = len(of_kind(audited, "configured"))
    audited.write(audited_config(pools, collector, tenant("newcomer")))
    audited.eventually(lambda: len(of_kind(audited, "configured")) == before + 1, "the change is recorded")
    first, change = of_kind(audited, "configured")[0], of_kind(audited, "configured")[-1]
    assert first["keys_added"] == ["acme/acme", "trial/trial"]
    assert change["keys_added"] == ["newcomer/newcomer"]
    assert change["before"] == first["fingerprint"]
    assert set(change["sections"]) == {"tenants", "keys"}
    assert "hash" not in json.dumps(change)


def test_audit_verify_proves_a_log_that_is_being_written_and_names_what_was_changed(audited):
    proved = audit_verify(audited)
    assert proved.returncode == 0, proved.stdout + proved.stderr
    assert "whole" in proved.stdout
    assert audited.status()["audit"]["failing"] == ""
    copy = audited.folder / "copy"
    shutil.copytree(audited.folder / "audit", copy)
    (path,) = copy.glob("gw-1-*.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if '"kind":"settled"' in line)
    record = json.loads(lines[at])
    lines[at] = lines[at].replace('"tenant":"acme"', '"tenant":"evil"')
    path.write_text("".join(lines))
    named = audit_verify(audited, str(copy), "--json")
    assert named.returncode == 1
    (finding,) = json.loads(named.stdout)["findings"]
    assert (finding["file"], finding["line"], finding["seq"]) == (path.name, at + 1, record["seq"])
    assert finding["trace_id"] == record["trace_id"]
    nothing = audit_verify(audited, str(audited.folder / "nowhere"))
    assert nothing.returncode in {1, 2}
    assert len(nothing.stderr.splitlines()) == 1


def test_one_trace_id_finds_gateway_log_node_log_audit_record_and_spans(audited, node_stack, collector, engine):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    name = "the-trace-of-this-test"
    headers = {"x-din-trace-id": name, "traceparent": f"00-{trace}-{parent}-01", "tracestate": "vendor=1"}
    with audited.client() as client, client.stream("POST", "/v1/chat/completions", json=STREAM, headers=headers) as reply:
        assert reply.headers["x-din-trace-id"] == name
        reply.read()
    audited.eventually(lambda: "chat m" in collector.of_trace(name), "its spans")
    spans = collector.of_trace(name)
    assert set(spans) == {"chat m", "din.admission", "din.node", "din.stream"}
    assert {span["trace_id"] for span in spans.values()} == {trace}
    root, way = spans["chat m"], spans["din.node"]
    assert root["parent_id"] == parent
    assert root["start_ns"] <= spans["din.admission"]["start_ns"] <= way["start_ns"] <= spans["din.stream"]["start_ns"] <= root["end_ns"]
    (seen,) = [request for request in engine.seen()[1] if name in str(request["headers"])]
    sent = {header.lower(): value for header, value in dict(seen["headers"]).items()}
    assert sent["traceparent"] == f"00-{trace}-{way['span_id']}-01"
    assert sent["tracestate"] == "vendor=1"
    audited.eventually(lambda: name in audited.log("sidecar"), "its line in the gateway's log")
    (line,) = [json.loads(text) for text in audited.log("sidecar").splitlines() if name in text]
    assert (line["logger"], line["outcome"], line["node_id"]) == ("din_extproc.exchange", "completed", "gpu-1")
    audited.eventually(lambda: name in node_stack.log("envoy"), "its line in the node's log")
    assert json.loads(next(text for text in node_stack.log("envoy").splitlines() if name in text))["trace_id"] == name
    audited.eventually(lambda: any(record["trace_id"] == name for record in of_kind(audited, "settled")), "its record")
    (record,) = [record for record in of_kind(audited, "settled") if record["trace_id"] == name]
    assert record["request_id"] == line["request_id"] == root["attributes"]["din.request_id"]
    assert record["completion_tokens"] == line["completion_tokens"] == root["attributes"]["gen_ai.usage.output_tokens"] == 40


def test_a_request_without_a_trace_begins_one_with_its_own_id(audited, collector):
    made = audited.chat().headers["x-din-trace-id"]
    refused = audited.chat(model="nobody").headers["x-din-trace-id"]
    audited.eventually(lambda: collector.of_trace(made) and collector.of_trace(refused), "both spans")
    assert collector.of_trace(made)["chat m"]["trace_id"] == made
    assert collector.of_trace(refused)["refused"]["error"] == "model_not_found"
    audited.eventually(lambda: "din.tokens" in collector.metrics, "metrics are pushed")


def test_a_record_replayed_under_its_own_configuration_shows_no_difference_and_under_another_the_expected_one(audited, tmp_path):
    assert audited.chat(max_tokens=3).status_code == 200
    audited.eventually(lambda: any(record.get("output_asked") == 3 for record in of_kind(audited, "settled")), "the request is recorded")
    folder = (audited.folder / "audit",)
    settings = load(audited.config_file, {})
    assert replay(folder, settings, None).changes == ()
    narrow = yaml.safe_load(audited.config_file.read_text())
    narrow["tenants"][0]["models"] = ["another"]
    (tmp_path / "narrow.yaml").write_text(yaml.safe_dump(narrow, sort_keys=False).replace("folder: audit", f"folder: {tmp_path}"))
    for key in audited.folder.glob("*.key"):
        shutil.copy(key, tmp_path)
    after = load(tmp_path / "narrow.yaml", {})
    [change] = replay(folder, after, settings).changes
    assert (change.tenant, change.after) == ("acme", "refused: model_not_allowed")
    assert change.requests == sum(record["tenant"] == "acme" for record in of_kind(audited, "settled"))


def test_every_metric_that_dashboards_and_alerts_ask_for_is_on_the_page_of_a_running_sidecar(audited):
    with urllib.request.urlopen(f"http://127.0.0.1:{audited.admin_port}/metrics", timeout=10) as reply:
        kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", reply.read().decode(), re.MULTILINE))
    there = {name + suffix for name, kind in kinds.items() for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))}
    for name, text in monitoring_files().items():
        for where, query in queries_in(name, text).items():
            assert metrics_of(query) <= there, where


PARAMETERS = {f"parameter_{number}": {"type": "string"} for number in range(30)}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": PARAMETERS}}}
STARTS = {
    "role-only": {"chat_template_kwargs": {"enable_thinking": False}},
    "reasoning": {},
    "tool-call": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
}
CHANNEL = {"role-only": "content", "reasoning": "reasoning_content", "tool-call": "tool_calls"}


def measured(client: httpx.Client, trace: str, **fields) -> tuple[float, float, str]:
    """Time to the first token and of each one after it, in milliseconds, as the client has them; and the channel of the first."""
    body = {**STREAM, "max_tokens": 400, "stream_options": {"include_usage": True}, **fields}
    came: list[tuple[float, bytes]] = []
    began = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-din-trace-id": trace}) as reply:
        came = [(time.perf_counter(), chunk) for chunk in reply.iter_raw()]
    tokens, moments, channels, held = 0, [], [], b""
    for at, chunk in came:
        *whole, held = (held + chunk).split(b"\n\n")
        for event in (json.loads(each[6:]) for each in whole if each.startswith(b"data: {")):
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            new_channels = [channel for choice in event["choices"] for channel in CHANNEL.values() if choice["delta"].get(channel)]
            moments += [at] * bool(new_channels)
            channels += new_channels
    return (moments[0] - began) * 1000, (moments[-1] - moments[0]) * 1000 / (tokens - 1), channels[0]


@pytest.mark.parametrize("start", STARTS)
def test_times_to_first_and_per_token_are_the_client_s_own(audited, engine, start):
    """The nearest of five: what a busy machine does between Envoy and the client is neither's."""
    off: list[tuple[float, float]] = []
    engine.fail("latency:ms=300")
    try:
        with audited.client() as client:
            client.get("/v1/models")  # the connection is there
            for turn in range(5):
                trace = f"times-{start}-{turn}"
                first, each, channel = measured(client, trace, **STARTS[start])
                assert channel == CHANNEL[start]
                audited.eventually(lambda name=trace: f'"{name}"' in audited.log("sidecar"), "its line")
                line = next(json.loads(text) for text in audited.log("sidecar").splitlines() if f'"{trace}"' in text)
                assert line["completion_tokens"] > 200
                ours = (line["last_token_ms"] - line["first_token_ms"]) / (line["completion_tokens"] - 1)
                print(f"{start}: first {line['first_token_ms']:.1f} ms, client {first:.1f}; each {ours:.3f} ms, client {each:.3f}")
                off.append((abs(line["first_token_ms"] - first), abs(ours / each - 1)))
                if off[-1][0] <= 5 and off[-1][1] <= 0.05:
                    break
    finally:
        engine.fail("")
    assert min(first for first, _ in off) <= 5
    assert min(each for _, each in off) <= 0.05


def test_each_attempt_that_fails_has_a_span_in_the_trace_of_its_request(audited, collector, second):
    second.fail("unavailable:count=1")
    for turn in range(4):
        trace = f"tried-twice-{turn}"
        assert audited.chat(model="m2", headers={"x-din-trace-id": trace}).status_code == 200
    audited.eventually(lambda: any(span["name"] == "din.attempt" for span in collector.spans), "the span of the attempt")
    (attempt,) = (span for span in collector.spans if span["name"] == "din.attempt")
    assert (attempt["attributes"]["din.node.id"], attempt["error"]) == ("second", "503")

    def whole() -> dict:
        return {span["name"]: span for span in collector.spans if span["trace_id"] == attempt["trace_id"]}

    audited.eventually(lambda: "din.node" in whole(), "the spans of its exchange")
    spans = whole()
    assert attempt["parent_id"] == spans["chat m2"]["span_id"] == spans["din.node"]["parent_id"]
    assert (spans["din.node"]["attributes"]["din.attempts"], spans["din.node"]["attributes"]["din.node.id"]) == (2, "third")
    assert attempt["start_ns"] <= attempt["end_ns"] <= spans["din.node"]["end_ns"]
