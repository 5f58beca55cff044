"""The dashboard of a running sidecar: what happened to requests stands there, for holders of a key, while it happens."""

import json
import time

import httpx
import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, _made, key_of, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine():
    sim = EngineSim(model="m", max_model_len=32768, decode_rate=300.0, prefill_rate=1e6)
    try:
        yield sim.start()
    finally:
        sim.stop()


@pytest.fixture(scope="module")
def stack(engine):
    config = {
        "pools": {
            "p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]},
            "large": {"model": "large", "engine": "vllm", "nodes": [node("b", engine.address)]},
        },
        "rules": [{"id": "all", "when": "always", "pool": "p"}],
        "aliases": {"auto": {"models": ["m", "large"]}},
        "tenants": [tenant("acme", rpm=50), tenant("trial", rpm=1)],
        "prices": {"currency": "EUR", "models": {"m": {"request": 1.5}, "large": {"request": 4}}},
    }
    with Stack(config, gateway={"scrape_s": 0.2, "dashboard": {"keys": [{"id": "other", "hash": _made("other").hash}]}}) as running:
        yield running


@pytest.fixture(scope="module")
def viewer(stack):
    headers = {"authorization": f"Bearer {key_of('other')}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{stack.admin_port}", headers=headers, timeout=20, verify=False) as client:
        yield client


def board(viewer) -> dict:
    time.sleep(1.1)  # it is put together at most once a second
    return viewer.get("/dashboard/data").json()


def test_what_happened_stands_there(stack, viewer):
    assert stack.chat(model="auto", stream=True).status_code == 200
    assert stack.chat(tenant_name="trial").status_code == 200
    refused = stack.chat(tenant_name="trial")
    assert refused.status_code == 429
    stack.settled(3)
    board_data = board(viewer)
    assert board_data["rules"]["all"]["requests"] == 2
    assert board_data["problems"] == []
    row, _ = board_data["nodes"]
    assert (row["id"], row["state"], row["pools"]) == ("a", "ready", ["p"])
    assert row["running"] == 0
    tenants = {each["id"]: each for each in board_data["tenants"]}
    assert (tenants["acme"]["here"]["requests"], tenants["acme"]["requests"], tenants["acme"]["rpm"]) == (1, 1, 50)
    assert tenants["trial"]["here"]["refused"] == 1
    costs = {"acme": "1.50 EUR (2.50 saved)", "trial": "1.50 EUR"}
    stack.eventually(lambda: {each["id"]: each["cost"] for each in board(viewer)["tenants"]} == costs, "the cost of today")
    event = board_data["events"][0]
    assert (event["what"], event["code"], event["trace_id"]) == ("refused", "rate_limit_exceeded", refused.headers["x-din-trace-id"])
    assert event["tenant"] == "trial"


def test_tenants_keys_open_nothing_here_and_secrets_are_nowhere(stack, viewer):
    without_key = viewer.get("/dashboard/data", headers={"authorization": f"Bearer {key_of('acme')}"})
    assert without_key.status_code == 401
    page = viewer.get("/dashboard/data").text
    assert "sha256$" not in page
    assert "din_" not in page


def test_a_stream_in_flight_is_seen_live_and_the_page_s_stream_ends_with_the_sidecar(stack, viewer):
    seen = []
    with viewer.stream("GET", "/dashboard/events") as reply:
        lines = reply.iter_lines()
        while not seen or seen[-1]["board"]["open"] == 0:
            line = next(lines)
            if line.startswith("event: change"):
                seen.append(json.loads(next(lines)[6:]))
            elif line.startswith("event: board"):
                stack_stream = stack.client()
                open_stream = stack_stream.stream("POST", "/v1/chat/completions", json=LONG)
                assert open_stream.__enter__().status_code == 200
            assert len(seen) < 10
        open_stream.__exit__(None, None, None)
        stack_stream.close()
    tenants = {each["id"]: each["streams"] for each in seen[-1]["board"]["tenants"]}
    assert tenants == {"acme": 1, "trial": 0}
    with viewer.stream("GET", "/dashboard/events") as reply:
        stack.sidecar.terminate()
        for _ in reply.iter_lines():
            pass
        assert stack.sidecar.wait(60) == 0, "a viewer does not hold it up"


LONG = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}], "max_tokens": 7000, "ignore_eos": True}
