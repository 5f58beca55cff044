"""What scheduling adds to a verdict: timeouts, the long tail's refusal, and lessons about nodes."""

import json

import pytest
import yaml

from din_extproc.admit.local import LocalLedger
from din_extproc.domain.request import RequestHead
from din_extproc.domain.usage import NodePace
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from tests.support.stack import key_of, node, tenant
from tests.support.waiting import turns

TIMEOUT = "x-envoy-upstream-rq-timeout-ms"
CONFIG = {
    "version": 1,
    "pools": {
        "main": {
            "model": "m",
            "engine": "vllm",
            "scheduler": "predicted_time",
            "long_tail": {"over_s": 20, "share": 0.25, "timeout_s": 300},
            "nodes": [node("a", "10.0.0.1:8000", max_concurrency=4), node("b", "10.0.0.2:8000", max_concurrency=4)],
        },
    },
    "tenants": [tenant("acme", max_streams=9, rpm=100, tpm=100_000)],
}


@pytest.fixture
async def plane(tmp_path):
    file = tmp_path / "din.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    background = Background()
    yield RequestPlane(load(file, {}), LocalLedger(lambda: 0), background, DecisionCounters())
    await background.close()


async def decide(plane, max_tokens=8, **headers):
    flow = plane.context.create_handler()
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens}
    head = RequestHead("POST", "/v1/chat/completions", {"authorization": f"Bearer {key_of('acme')}", **headers})
    return flow, await flow.decide(head, json.dumps(body).encode())


def timeout(verdict):
    assert isinstance(verdict, Send), verdict
    return dict(verdict.request_headers).get(TIMEOUT)


async def test_the_clients_timeout_is_envoys(plane):
    assert timeout((await decide(plane))[1]) is None
    assert 0 < int(timeout((await decide(plane, **{"x-din-timeout-ms": "60000"}))[1])) <= 60_000


async def test_a_long_request_has_its_own_timeout_unless_the_client_is_less_patient(plane):
    assert timeout((await decide(plane, 2000))[1]) == "300000"
    assert 0 < int(timeout((await decide(plane, 2000, **{"x-din-timeout-ms": "60000"}))[1])) <= 60_000


async def test_without_a_slot_for_long_requests_one_is_refused_and_pays_nothing_while_short_ones_pass(plane):
    flows = [(await decide(plane, 2000))[0] for _ in range(2)]  # a quarter of four slots, at two nodes
    _, refused = await decide(plane, 2000)
    assert isinstance(refused, ImmediateResponse)
    assert json.loads(refused.body)["code"] == "insufficient_gpu_capacity"
    assert int(dict(refused.headers)["retry-after"]) >= 1
    await turns()
    _, short = await decide(plane)
    assert isinstance(short, Send)
    left = int(dict(short.response_headers)["x-ratelimit-remaining-tokens"])
    assert left > 100_000 - 2 * 2100 - 100  # the refused one's two thousand came back
    flows[0].ended()
    assert timeout((await decide(plane, 2000))[1]) == "300000"


async def test_what_exchanges_taught_decides_the_next_pick(plane):
    def pace(node_id, rate):
        return NodePace(node_id=node_id, at=0.0, p99_ms=1.0, seconds=1.0, prefill_rate=1000.0, stream_rate=rate)

    for quick, endpoint in (("a", "10.0.0.1:8000"), ("b", "10.0.0.2:8000")):
        plane.selector.load.on_paces(tuple(pace(name, 90.0 if name == quick else 30.0) for name in "ab"))
        flow, verdict = await decide(plane, 300)
        assert verdict.endpoints[0] == endpoint
        flow.ended()
