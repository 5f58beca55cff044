"""Admission as a client sees it: waiting for a slot or for tokens, leaving, shadow mode, limits of all tenants, changed while it runs."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import redis

from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
QUEUE = {"max_wait_ms": 3000, "size": 3}
CONFIG = {
    "rules": [{"id": "all", "when": "always", "pool": "pool"}],
    "keys_file": "keys.yaml",
    "tenants": [
        tenant("acme"),
        tenant("single", max_streams=1) | {"queue": QUEUE},
        tenant("tokens", tpm=60_000) | {"queue": QUEUE},
        tenant("shadow", rpm=1, tpm=50, max_streams=1, enforce=False),
        tenant("payer", rpm=3),
        tenant("unlucky", rpm=2),
        tenant("seen", max_streams=1) | {"queue": QUEUE},
        tenant("batch", per_priority={"batch": {"rpm": 1}}),
    ],
    "limits": {"per_model": {"small": {"max_streams": 2, "reserved_for_critical": 0.5}}},
}


@pytest.fixture(scope="module")
def sim() -> Iterator[EngineSim]:
    with EngineSim(model="m", served_model=("m", "small"), decode_rate=50.0, batch_slowdown=0.0, prefill_rate=1e6) as server:
        yield server


@pytest.fixture(scope="module")
def config(sim) -> dict:
    pools = {
        "pool": {"model": "m", "engine": "vllm", "nodes": [node("n", sim.address)]},
        "small": {"model": "small", "engine": "vllm", "nodes": [node("s", sim.address)]},
        "gone": {"model": "gone", "engine": "vllm", "nodes": [node("g", f"127.0.0.1:{free_port()}")]},
    }
    return {**CONFIG, "pools": pools}


@pytest.fixture(scope="module")
def stack(config) -> Iterator[Stack]:
    with Stack(config) as running:
        yield running


def ask(tokens: int = 2, **fields) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "min_tokens": tokens, **fields}


def queue(stack: Stack) -> dict[str, int]:
    return stack.status()["queue"]


class Busy:
    """A stream that holds a slot inside the block: `tokens` of them come at 50 a second."""

    def __init__(self, stack: Stack, name: str, tokens: int, **fields) -> None:
        self.client = stack.client(name)
        self.reply = self.client.send(self.client.build_request("POST", PATH, json=ask(tokens, stream=True, **fields)), stream=True)

    def __enter__(self) -> httpx.Response:
        return self.reply

    def __exit__(self, *_: object) -> None:
        self.reply.close()
        self.client.close()


def test_a_request_waits_for_the_slot_that_another_one_gives_back(stack):
    before = queue(stack)
    with Busy(stack, "single", 40) as first:
        reply = stack.chat(ask(), tenant_name="single")
        assert (first.status_code, reply.status_code) == (200, 200)
    after = queue(stack)
    assert (after["granted"] - before["granted"], after["waiting"]) == (1, 0)
    assert stack.redis_keys("waiting"), "Redis knows that a request waits"


def test_a_request_waits_for_tokens_that_refill(stack):
    used = stack.chat(ask(), tenant_name="tokens")
    left = int(used.headers["x-ratelimit-remaining-tokens"])
    with Busy(stack, "tokens", 10, max_tokens=left - 100):
        reply = stack.chat(ask(max_tokens=800), tenant_name="tokens")
        assert reply.status_code == 200


def test_the_end_of_patience_is_a_429_with_the_time_to_wait_and_the_client_s_own_patience_counts(stack):
    with Busy(stack, "single", 3000):
        before = queue(stack)
        began = time.monotonic()
        reply = stack.chat(ask(), tenant_name="single", headers={"x-din-timeout-ms": "300"})
        assert time.monotonic() - began >= 0.25
        assert queue(stack)["expired"] == before["expired"] + 1
        assert (reply.status_code, reply.json()["code"]) == (429, "concurrency_limit_exceeded")
        assert int(reply.headers["retry-after"]) >= 1


def test_a_full_queue_refuses_at_once_and_a_client_that_leaves_makes_room(stack):
    with Busy(stack, "single", 3000), ThreadPoolExecutor(4) as pool:
        before = queue(stack)
        leaving = stack.client("single")
        waiting = [pool.submit(stack.chat, ask(), tenant_name="single") for _ in range(2)]
        leaver = pool.submit(impatient, leaving)
        stack.eventually(lambda: queue(stack)["waiting"] == 3, "three wait")
        reply = stack.chat(ask(), tenant_name="single")
        assert (reply.status_code, reply.json()["code"]) == (429, "queue_full")
        assert 1 <= int(reply.headers["retry-after"]) <= 4
        assert int(reply.headers["retry-after-ms"]) <= QUEUE["max_wait_ms"]
        leaver.result()
        stack.eventually(lambda: queue(stack)["left"] == before["left"] + 1, "its place in the queue is free")
        assert {each.result().status_code for each in waiting} == {429}
        assert queue(stack)["full"] == before["full"] + 1
    stack.settled(0)
    assert stack.chat(ask(), tenant_name="single").status_code == 200


def impatient(client: httpx.Client) -> None:
    """Ask, and hang up after a second."""
    with client, contextlib.suppress(httpx.ReadTimeout):
        client.post(PATH, json=ask(), timeout=1.0)


def test_limits_in_shadow_mode_are_counted_and_reported_and_refuse_nothing(stack):
    replies = [stack.chat(ask(), tenant_name="shadow") for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200] * 4
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["0"] * 4
    stack.eventually(lambda: stack.status()["counts"]["would_refuse"].get("rpm", 0) >= 2, "it is reported")


def test_a_class_has_a_limit_of_its_own(stack):
    batch = {"x-din-priority": "batch"}
    assert [stack.chat(ask(), tenant_name="batch", headers=batch).status_code for _ in range(2)] == [200, 429]
    assert stack.chat(ask(), tenant_name="batch").status_code == 200


def test_what_all_tenants_may_use_of_a_model_is_theirs_together(stack):
    with Busy(stack, "acme", 3000, model="small") as held:
        assert held.status_code == 200
        refused = stack.chat(ask(model="small"), tenant_name="batch")
        assert refused.status_code == 429
        assert "the network's limit for model small below critical allows 1" in refused.json()["detail"].lower()
        assert stack.chat(ask(), tenant_name="batch").status_code == 200, "other models are not concerned"
    stack.eventually(lambda: stack.chat(ask(model="small"), tenant_name="batch").status_code == 200, "its slot came back")


def test_limits_change_while_it_runs(stack, config):
    with Busy(stack, "single", 3000):
        raised = [tenant("single", max_streams=2) | {"queue": QUEUE} if each["id"] == "single" else each for each in config["tenants"]]
        stack.write({**config, "tenants": raised})
        replies = []
        stack.eventually(lambda: replies.append(stack.chat(ask(), tenant_name="single")) or replies[-1].status_code == 200, "it is raised")
        assert stack.status()["configuration"]["rejected_successor"] == ""


def command(stack: Stack, *words: str) -> str:
    """`din-extproc ...` as an operator calls it, and what it prints."""
    whole = [sys.executable, "-m", "din_extproc", *words, "-c", stack.config_file]
    return subprocess.run(whole, check=True, capture_output=True, text=True).stdout


# What tenants use


def test_tenants_are_shown_as_they_stand_and_what_they_used_is_exported_by_day_and_model(stack):
    for _ in range(3):
        assert stack.chat(ask(), tenant_name="payer").status_code == 200
    assert stack.chat(ask(), tenant_name="payer").status_code == 429

    def in_redis() -> int:
        with redis.Redis(port=stack.redis.port) as connection:
            days = [key for key in connection.scan_iter("din:{usage}:*") if b"portions" not in key]
            return sum(
                int(amount)
                for day in days
                for field, amount in connection.hgetall(day).items()
                if field.startswith(b"payer\t") and field.rpartition(b"\t")[2] in (b"requests", b"refused")
            )

    stack.eventually(lambda: in_redis() >= 4, "it is in Redis")
    chat = next(row for row in json.loads(command(stack, "usage", "--tenant", "payer", "--format", "json")) if row["model"] == "m")
    assert (chat["requests"], chat["completion_tokens"], chat["failed"]) == (3, 6, 0)
    assert chat["prompt_tokens"] > 0
    assert command(stack, "usage", "--tenant", "payer").startswith("day,tenant,model,requests,failed,refused")
    (by_key,) = json.loads(command(stack, "usage", "--tenant", "payer", "--by", "key", "--format", "json"))
    assert (by_key["key"], by_key["requests"], by_key["refused"]) == ("payer", 3, 1)
    rows = json.loads(command(stack, "tenants", "--tenant", "payer", "--json"))["tenants"]
    assert [(row["tenant"], row["requests"], row["rpm"], row["streams"], row["today"]["requests"]) for row in rows] == [
        ("payer", 3, 3, 0, 3)
    ]
    assert 0 <= rows[0]["tokens"] <= 500
    assert "payer" in command(stack, "tenants")


def test_who_waits_and_who_runs_is_seen_while_it_does(stack):
    def row() -> dict:
        with urllib.request.urlopen(f"http://127.0.0.1:{stack.admin_port}/tenants?tenant=seen", timeout=5) as reply:
            return json.loads(reply.read())["tenants"][0]

    with Busy(stack, "seen", 3000), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stack.chat, ask(), tenant_name="seen")
        stack.eventually(lambda: queue(stack)["waiting"] == 1, "one waits")
        seen = row()
        assert (seen["streams"], seen["max_streams"], seen["waiting"]) == (1, 1, 1)
        waiting.result()


# Keys


def keys(stack: Stack, *words: str) -> dict:
    """`din-extproc keys ...`, and what it says."""
    output = command(stack, "keys", *words)
    return json.loads(output) if "--json" in words else {"said": output}


def status_with(stack: Stack, key: str) -> int:
    with stack.client(None) as client:
        return client.post(PATH, json=ask(), headers={"authorization": f"Bearer {key}"}).status_code


def test_a_key_is_made_rotated_with_an_overlap_and_revoked_while_it_runs(stack):
    made = keys(stack, "new", "--tenant", "acme", "--json")
    stack.eventually(lambda: status_with(stack, made["key"]) == 200, "the new key is known")
    successor = keys(stack, "rotate", made["id"], "--overlap-hours", "1", "--json")
    stack.eventually(lambda: status_with(stack, successor["key"]) == 200, "its successor, too")
    assert status_with(stack, made["key"]) == 200, "both are valid for a while"
    text = (stack.folder / "keys.yaml").read_text()
    assert made["key"] not in text
    assert successor["key"].rpartition("_")[2] not in text
    assert (stack.folder / "keys.yaml").stat().st_mode & 0o077 == 0
    keys(stack, "revoke", made["id"])
    stack.eventually(lambda: status_with(stack, made["key"]) == 401, "it is refused")
    assert status_with(stack, successor["key"]) == 200
    gone = keys(stack, "rotate", successor["id"], "--overlap-hours", "0", "--json")
    stack.eventually(lambda: status_with(stack, successor["key"]) == 401, "without an overlap it has expired")
    assert status_with(stack, gone["key"]) == 200


def test_a_revoked_key_of_the_configuration_is_refused_though_the_file_still_has_it(stack):
    assert status_with(stack, key_of("batch")) == 200
    output = keys(stack, "revoke", "batch")["said"]
    assert "remove it from din.yaml" in output
    stack.eventually(lambda: status_with(stack, key_of("batch")) == 401, "it is refused")


def test_requests_that_reach_no_node_give_back_their_places_and_those_that_a_node_refused_do_not(stack):
    with stack.client("unlucky") as client:
        assert [client.post(PATH, json=ask(model="gone")).status_code for _ in range(2)] == [503, 503]
        stack.eventually(lambda: client.post(PATH, json=ask()).status_code == 200, "a place came back")
        assert client.post(PATH, json=ask(temperature="hot")).status_code == 400
        refused = client.post(PATH, json=ask())
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
