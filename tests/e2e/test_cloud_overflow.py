"""A local pool with a hosted one that takes what it has no room for: what leaves the site, in which form, and how that is known."""

import json
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from aiohttp import web

from tests.support.certificates import Authority
from tests.support.providers import PIECES, Provider
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, events, key_of, node, tenant

pytestmark = pytest.mark.e2e

SECRET = "sk-overflow-0123456789abcdef"
AUDIT_KEY = b"an audit key of these tests"
MAIL = "mail jane.doe@example.com please"
SLOTS = 2


class Site:
    """A gateway with a local engine of two slots, and one provider behind three pools."""

    def __init__(self, exits: ExitStack, folder: Any) -> None:
        authority = Authority(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue("provider", "localhost").values())
        self.provider = exits.enter_context(Provider(context, SECRET))
        self.local = exits.enter_context(EngineSim(model="m", decode_rate=200.0, prefill_rate=1e6, max_num_seqs=64))
        self.slow = exits.enter_context(EngineSim(model="slow", decode_rate=10.0, prefill_rate=1e6))
        self.doomed = exits.enter_context(EngineSim(model="doomed", max_num_seqs=256))
        (folder / "key").write_text(SECRET)
        stack = Stack({})
        (stack.folder / "audit.key").write_bytes(AUDIT_KEY)

        def cloud(name: str, **fields: Any) -> dict[str, Any]:
            account = {
                "id": name,
                "url": f"https://localhost:{self.provider.port}/v1",
                "credential": {"file": str(folder / "key")},
                "ca": str(authority.file),
                "max_seq_len": 8192,
            }
            return {"model": name, "served_model": "theirs", "engine": "openai", "nodes": [account], **fields}

        near = {"pool": "local", "overflow": True}
        stack.write(
            {
                "pools": {
                    "local": {"model": "m", "engine": "vllm", "nodes": [node("gpu-1", self.local.address, max_concurrency=SLOTS)]},
                    "slow": {"model": "slow", "engine": "vllm", "nodes": [node("gpu-2", self.slow.address)]},
                    "doomed": {"model": "doomed", "engine": "vllm", "nodes": [node("gpu-4", self.doomed.address, max_concurrency=200)]},
                    "dead": {"model": "dead", "engine": "vllm", "nodes": [node("gpu-3", f"127.0.0.1:{free_port()}")]},
                    "masks": cloud("masks", sensitive_data="mask"),
                    "blocks": cloud("blocks", sensitive_data={"policy": "block", "kinds": ["email"]}),
                    "first": cloud("first"),
                },
                "rules": [
                    {"id": "blocking", "when": {"header": {"x-task-tier": "strict"}}, "fallback": "blocks", **near},
                    {"id": "slow", "when": {"model": "slow"}, "pool": "slow", "fallback": "masks", "overflow": True},
                    {"id": "doomed", "when": {"model": "doomed"}, "pool": "doomed", "fallback": "first"},
                    {"id": "dead", "when": {"model": "dead"}, "pool": "dead", "fallback": "blocks"},
                    {"id": "near", "when": {"model": "m"}, "fallback": "masks", **near},
                    {"id": "far", "when": {"model": "first"}, "pool": "first", "fallback": "local"},
                ],
                "tenants": [tenant("acme", max_streams=200), {**tenant("clinic"), "stays_on_site": True}],
                "health": {"breaker": True},
                "envoy": {"health_check": False},
                "audit": {"folder": "audit", "replica": "gw-1", "keys": {"k1": {"file": "audit.key"}}, "flush_ms": 50},
            }
        )
        self.stack = exits.enter_context(stack)

    def say(self, text: str = "hello", **fields: Any) -> httpx.Response:
        return self.stack.chat(messages=[{"role": "user", "content": text}], **fields)

    def sent(self) -> str:
        """The prompt that the provider saw last."""
        return str(self.provider.seen[-1][2]["messages"][-1]["content"])

    def counted(self, name: str) -> float:
        page = httpx.get(f"{self.stack.admin_url}/metrics", timeout=30).text
        return sum(float(each) for each in re.findall(rf"^{name}{{.*}} (\S+)$", page, re.MULTILINE))

    def cli(self, *arguments: Any) -> str:
        command = [sys.executable, "-m", "din_extproc", *arguments, "--config", self.stack.config_file]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as exits:
        yield Site(exits, tmp_path_factory.mktemp("overflow"))


@pytest.fixture
def full(site: Site) -> Iterator[None]:
    """Every slot of the local engine is taken."""
    began = [threading.Event() for _ in range(SLOTS)]
    leave = threading.Event()

    def hold(event: threading.Event) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8000, "stream": True, "ignore_eos": True}
        with site.stack.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
            for _ in reply.iter_lines():
                event.set()
                if leave.is_set():
                    return

    holders = [threading.Thread(target=hold, args=(event,)) for event in began]
    for holder in holders:
        holder.start()
    assert all(event.wait(30) for event in began)
    yield
    leave.set()
    for holder in holders:
        holder.join()
    site.stack.eventually(lambda: not site.stack.status()["exchanges"]["open"], site.stack.status)


def test_what_fits_stays_and_is_as_it_was(site: Site) -> None:
    reply = site.say(MAIL, model="m")
    assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "gpu-1")
    assert b"jane.doe@example.com" in site.local.seen()[1][-1]["body"]
    assert site.provider.seen == []


@pytest.mark.usefixtures("full")
def test_a_full_pool_overflows_and_only_masked_text_leaves(site: Site) -> None:
    reply = site.say(MAIL, model="m")
    assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "masks"), reply.text
    assert (reply.headers["x-bxagent-degraded"], reply.headers["x-din-degraded-reason"]) == ("true", "pool_full")
    assert reply.json()["choices"][0]["message"]["content"] == "".join(PIECES)
    assert site.sent() == "mail [EMAIL] please"
    streamed = site.say(MAIL, model="m", stream=True)
    assert (streamed.headers["x-din-node-id"], site.sent()) == ("masks", "mail [EMAIL] please")
    assert site.say(model="m", tenant_name="clinic").headers["x-din-node-id"] == "gpu-1", "it waits at the engine instead"


def test_a_pool_that_blocks_gets_nothing_sensitive(site: Site) -> None:
    site.stack.eventually(lambda: site.say(model="dead").headers.get("x-din-node-id") == "blocks", site.stack.status)
    before = len(site.provider.seen)
    refused = site.say(MAIL, model="dead")
    assert (refused.status_code, refused.json()["error"]["code"]) in {(400, "sensitive_data_blocked"), (502, "upstream_error")}
    assert len(site.provider.seen) == before


def test_what_moves_in_flight_is_masked_for_the_pool_that_takes_over(site: Site) -> None:
    for stream in (False, True):
        site.local.fail("unavailable:count=2")
        reply = site.say(MAIL, model="m", stream=stream)
        assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "masks"), reply.text
        assert (reply.headers["x-bxagent-degraded"], reply.headers["x-din-degraded-reason"]) == ("true", "upstream_failed")
        assert site.sent() == "mail [EMAIL] please"
        site.local.fail("")
        site.stack.eventually(lambda: site.say(model="m").headers.get("x-din-node-id") == "gpu-1", site.stack.status)


def test_nothing_is_lost_when_the_local_pool_dies_under_a_hundred_streams(site: Site) -> None:
    stack, count = site.stack, 100
    before = stack.all_accounted()["counts"]
    sent, left = len(site.provider.seen), site.counted("din_left_site_requests_total")
    site.doomed.fail("stall")
    replies: list[httpx.Response] = []
    streams = [threading.Thread(target=lambda: replies.append(site.say(model="doomed", stream=True))) for _ in range(count)]
    for each in streams:
        each.start()
    stack.eventually(lambda: stack.status()["exchanges"]["open"] >= count, stack.status)
    site.doomed.end()
    for each in streams:
        each.join()
    assert {(reply.status_code, reply.headers["x-din-degraded-reason"]) for reply in replies} == {(200, "upstream_failed")}
    texts = [[choice["delta"].get("content") or "" for event in events(reply.text) for choice in event["choices"]] for reply in replies]
    assert ["".join(pieces) for pieces in texts] == ["".join(PIECES)] * count
    after = stack.settled(sum(before["outcomes"].values()) + count)["counts"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == 9 * count
    assert after["completion_tokens"] - before["completion_tokens"] == 3 * count
    assert len(site.provider.seen) - sent == count, "each left the site once"
    stack.eventually(lambda: site.counted("din_left_site_requests_total") - left == count, "what left is counted")


@pytest.mark.usefixtures("full")
def test_what_the_other_pool_would_refuse_waits_for_a_slot(site: Site) -> None:
    strict = {"x-task-tier": "strict"}
    assert site.say(model="m", headers=strict).headers["x-din-node-id"] == "blocks"
    assert site.say(MAIL, model="m", headers=strict).headers["x-din-node-id"] == "gpu-1", "it holds what must not leave"
    assert site.say(model="m", headers=strict, top_k=3).headers["x-din-node-id"] == "gpu-1", "the provider has no such parameter"


def test_what_is_too_slow_for_the_deadline_overflows(site: Site) -> None:
    asked: dict[str, Any] = {"model": "slow", "max_tokens": 20}
    deadline = {"x-din-timeout-ms": "1500"}
    assert site.say(**asked).headers["x-din-node-id"] == "gpu-2", "two seconds are no trouble without a deadline"
    site.stack.eventually(lambda: site.say(**asked, headers=deadline).headers.get("x-din-degraded-reason") == "deadline", site.stack.status)
    assert site.say(**asked, headers=deadline).headers["x-din-node-id"] == "masks"
    assert site.say(**asked).headers["x-din-node-id"] == "gpu-2"


def test_the_site_answers_when_the_provider_fails(site: Site) -> None:
    assert site.say(model="first").headers["x-din-node-id"] == "first"
    site.provider.fail = lambda: web.json_response({"error": {"message": "down"}}, status=503)
    try:
        site.stack.eventually(lambda: site.say(model="first").headers.get("x-din-node-id") == "gpu-1", site.stack.status)
        assert site.say(model="first").headers["x-bxagent-degraded"] == "true"
    finally:
        site.provider.fail = lambda: None


def test_what_left_is_known_by_metrics_audit_explain_and_verify(site: Site) -> None:
    stack = site.stack
    stack.all_accounted()
    counted = site.counted
    assert 0 < counted("din_left_site_requests_total") <= len(site.provider.seen)
    assert counted("din_left_site_tokens_total") > 0

    def audited() -> int:
        return sum(file.read_text().count('"left_site":true') for file in (stack.folder / "audit").rglob("*.jsonl"))

    stack.eventually(lambda: audited() == counted("din_left_site_requests_total"), audited)
    body = stack.folder / "body.json"
    body.write_text(json.dumps({"model": "first", "messages": [{"role": "user", "content": "hi"}]}))
    assert "leaves the site: first at localhost" in site.cli("explain", body, "--tenant", "acme")
    output = site.cli("verify", "--url", stack.url, "--key", key_of("acme"))
    assert "-> first (leaves the site)" in output, output
