"""Agents and chat UIs: their requests, most of them recorded of the real clients, play against the gateway as they are."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engine_fleet import EngineFleet
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).parents[1] / "captures" / "clients"
PAGE = Path(__file__).parents[2] / "deploy" / "docs" / "pages" / "howto" / "clients.md"
RECORDED: dict[str, list[dict[str, Any]]] = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}
EXCHANGES = [(client, number) for client, exchanges in RECORDED.items() for number in range(len(exchanges))]
LONG = 131_072
"""Tokens: agents ask for 32,000 of output."""
ENDS = {"/v1/messages": b"event: message_stop\n", "/v1/responses": b"event: response."}
"""How a stream of these paths ends; of the others with `[DONE]`."""


@pytest.fixture(scope="module")
def engines() -> Iterator[EngineFleet]:
    chats = {name: {"model": name, "auto_tool_choice": True, "max_model_len": LONG, "kv_tokens": 2 * LONG} for name in "gh"}
    with EngineFleet({**chats, "p": {"model": "p", "runner": "pooling"}}) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engines: EngineFleet) -> Iterator[Stack]:
    members = engines.members
    pools = {
        "chats": {"model": "g", "engine": "vllm", "operations": "generate", "nodes": [node("g-1", members["g"].address, max_seq_len=LONG)]},
        "large": {"model": "h", "engine": "vllm", "operations": "generate", "nodes": [node("h-1", members["h"].address, max_seq_len=LONG)]},
        "vectors": {"model": "p", "engine": "vllm", "operations": "pooling", "nodes": [node("p-1", members["p"].address)]},
    }
    config = {
        "aliases": {"coder": {"model": "g"}, "claude-*": {"model": "g"}, "claude-opus-*": {"model": "h"}, "vectors": {"model": "p"}},
        "pools": pools,
        "tenants": [tenant("acme", rpm=1000, tpm=10_000_000)],
        "identity": {
            "gateway": {"networks": ["127.0.0.1/32"], "tenant_header": "x-openwebui-user-id"},
            "tenant_defaults": {"models": ["*"], "limits": {"rpm": 1000}},
        },
    }
    with Stack(config) as running:
        yield running


def play(stack: Stack, exchange: dict[str, Any], key: str | None = None) -> httpx.Response:
    """Send a recorded request, with the key where the client puts it."""
    headers = dict(exchange["headers"])
    if key is not None:
        name, text = ("x-api-key", key) if "anthropic-version" in headers else ("authorization", f"Bearer {key}")
        headers[name] = text
    body = json.dumps(exchange["body"]).encode() if "body" in exchange else None
    with httpx.Client(base_url=stack.url, timeout=30) as client:
        return client.request(exchange["method"], exchange["path"], content=body, headers=headers)


@pytest.mark.parametrize(("client", "number"), EXCHANGES, ids=[f"{client} {number}" for client, number in EXCHANGES])
def test_a_recorded_request_is_answered_as_its_client_expects(stack, client, number):
    exchange = RECORDED[client][number]
    named = {name: text for name, text in exchange["headers"].items() if not name.startswith("x-openwebui")}
    reply = play(stack, {**exchange, "headers": named}, None if exchange.get("open") else key_of("acme"))
    path, asked = exchange["path"].partition("?")[0], exchange.get("body", {})
    if asked.get("model") == "hosted":
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found"), "no hosted pool is here"
        return
    assert reply.status_code == exchange.get("status", 404 if path == "/" else 200), reply.text
    if asked.get("stream"):
        assert reply.headers["content-type"].startswith("text/event-stream")
        *_, last = reply.content.rstrip(b"\n").split(b"\n\n")
        assert (last + b"\n").startswith(ENDS.get(path, b"data: [DONE]\n")), last
        assert stack.cost(reply)[1] > 0
    elif asked and reply.status_code == 200 and "count_tokens" not in path:
        assert sum(stack.cost(reply)) > 0


@pytest.mark.parametrize(
    ("model", "node_id"), [("claude-sonnet-4-5-20250929", "g-1"), ("claude-opus-4-1-20250805", "h-1"), ("claude-opus-4-1[1m]", "h-1")]
)
def test_one_alias_serves_every_dated_name_and_the_longest_one_wins(stack, model, node_id):
    exchange = RECORDED["claude-code"][-1]
    reply = play(stack, {**exchange, "body": {**exchange["body"], "model": model}}, key_of("acme"))
    assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, node_id), reply.text


def test_a_model_list_says_since_when_and_how_long_a_context_is(stack):
    listed = play(stack, RECORDED["guidellm"][1], key_of("acme")).json()["data"]
    assert {entry["id"] for entry in listed} == {"coder", "vectors", "g", "h", "p"}
    for entry in listed:
        assert entry["object"] == "model"
        assert entry["created"] > 0
        assert entry["max_model_len"] == entry["context_length"] > 0


def test_a_chat_ui_s_user_is_the_tenant_where_that_is_configured_and_never_known_to_a_node(stack, engines):
    exchange = RECORDED["open-webui"][1]
    reply = play(stack, exchange)
    assert reply.status_code == 200, reply.text
    assert stack.logged(reply)["tenant"] == exchange["headers"]["x-openwebui-user-id"]
    _, seen = engines.members["g"].seen()
    asked = next(each for each in seen if dict(each["headers"]).get("x-din-trace-id") == reply.headers["x-din-trace-id"])
    assert [name for name, _ in asked["headers"] if "openwebui-user" in name] == []


def test_the_page_has_every_client_and_names_no_other():
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    assert {row.partition("(#")[2].rstrip(")") for row in rows} == set(RECORDED)
