"""The requests of a session stay at one node while it serves and has headroom, without any memory of the session."""

import json

import pytest
import yaml

from din_extproc.admit.local import LocalLedger
from din_extproc.domain.health import BreakerSnapshot, BreakerSnapshots, BreakerState
from din_extproc.domain.request import RequestHead
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from din_extproc.tools.explain.explain import explain
from tests.support.stack import key_of, node, tenant

NODES = {f"10.0.0.{number}:8000": f"n{number}" for number in range(1, 9)}
CONFIG = {
    "version": 1,
    "gateway": {"session_header": "X-Session-Id"},
    "pools": {
        "main": {
            "model": "m",
            "engine": "vllm",
            "scheduler": "prefix_affinity",
            "nodes": [node(name, address) for address, name in NODES.items()],
        }
    },
    "tenants": [tenant("acme")],
}


@pytest.fixture
def settings(tmp_path):
    file = tmp_path / "din.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    return load(file, {})


@pytest.fixture
async def planes(settings):
    background = Background()
    yield [RequestPlane(settings, LocalLedger(lambda: 0), background, DecisionCounters()) for _worker in range(2)]
    await background.close()


async def place(plane, text="hello", headers=None, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
    head = RequestHead("POST", "/v1/chat/completions", {"authorization": f"Bearer {key_of('acme')}", **(headers or {})})
    handler = plane.context.create_handler()
    sent = await handler.decide(head, json.dumps(body).encode())
    handler.ended()
    return NODES[sent.endpoints[0]]


@pytest.mark.parametrize("named", [{"prompt_cache_key": "chat-7"}, {"headers": {"x-session-id": "chat-7"}}])
async def test_a_session_has_one_node_in_every_worker_whatever_the_prompt(planes, named):
    assert len({await place(plane, text, **named) for plane in planes for text in ("hello", "how are you?", "bye")}) == 1


async def test_sessions_with_one_system_prompt_spread_over_the_nodes(planes):
    assert len({await place(planes[0], "hello") for _ in range(8)}) == 1
    assert len({await place(planes[0], "hello", prompt_cache_key=f"chat-{number}") for number in range(32)}) > 4


async def test_a_session_survives_its_node_and_returns_to_it(planes):
    homes = {number: await place(planes[0], prompt_cache_key=f"chat-{number}") for number in range(32)}
    lost = homes[0]
    excluded = BreakerSnapshot(BreakerState.OPEN, 0.0, None, 0.0, "gone")
    planes[0].selector.on_breakers(BreakerSnapshots({lost: excluded}))
    moved = {number: await place(planes[0], prompt_cache_key=f"chat-{number}") for number in range(32)}
    assert all(moved[number] == home if home != lost else moved[number] != lost for number, home in homes.items())
    planes[0].selector.on_breakers(BreakerSnapshots({lost: BreakerSnapshot(BreakerState.CLOSED, 0.0, None, 1.0, "")}))
    assert {number: await place(planes[0], prompt_cache_key=f"chat-{number}") for number in range(32)} == homes


def test_explain_says_what_names_the_session_and_which_choice_a_node_is(settings):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "prompt_cache_key": "chat-7"}
    found = explain(settings, "acme", json.dumps(body).encode())
    assert found.intent.session == "prompt_cache_key"
    assert "choice 1 of the session or prefix" in found.candidates[0].why
