"""Limits through the whole gateway: parallel requests, retries that cost once, and keys that show up nowhere."""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import redis

from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
TPM = 10_000
EACH = 2_000
RETRIES = 2


@pytest.fixture(scope="module")
def sims() -> Iterator[list[EngineSim]]:
    made = [EngineSim(model="m", decode_rate=2000.0, prefill_rate=1e6) for _ in range(3)]
    try:
        yield [sim.start() for sim in made]
    finally:
        for sim in made:
            sim.stop()


@pytest.fixture(scope="module")
def stack(sims) -> Iterator[Stack]:
    config = {
        "pools": {"pool": {"model": "m", "engine": "vllm", "nodes": [node(f"n{number}", sim.address) for number, sim in enumerate(sims)]}},
        "rules": [{"id": "all", "when": "always", "pool": "pool"}],
        "tenants": [
            tenant("acme"),
            tenant("trial", tpm=TPM),
            tenant("other", rpm=10, tpm=TPM),
            tenant("single", rpm=1),
            tenant("lists", tpm=TPM),
            {**tenant("free"), "limits": {}},
        ],
        "envoy": {
            "retry": {"attempts": RETRIES},
            "health_check": False,
            "outlier": {"consecutive_connect_failures": 1000},
        },
        "health": {"breaker": False},
    }
    with Stack(config) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(sims) -> Iterator[None]:
    for sim in sims:
        sim.forget()
    yield
    for sim in sims:
        sim.fail("")


def ask(**fields) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}


def left(reply: httpx.Response, what: str) -> int:
    return int(reply.headers[f"x-ratelimit-remaining-{what}"])


# Tokens


def test_prompts_and_choices_have_a_context_each_and_are_reserved_together(stack):
    with stack.client("acme") as client:
        two = client.post(PATH, json=ask(n=2, max_tokens=5000))
        four = client.post("/v1/completions", json={"model": "m", "prompt": ["word " * 3000] * 4, "max_tokens": 2})
        both = client.post(PATH, json=ask(max_tokens=9000))
    assert (two.status_code, len(two.json()["choices"])) == (200, 2), two.text
    assert (four.status_code, len(four.json()["choices"])) == (200, 4), four.text
    assert (both.status_code, both.json()["code"]) == (400, "context_length_exceeded")
    with stack.client("lists") as client:
        many = client.post("/v1/completions", json={"model": "m", "prompt": ["x"] * 40, "max_tokens": 400, "max_completion_tokens": 1})
    assert (many.status_code, left(many, "tokens")) == (200, 0), "40 times 400 are more than the bucket holds"


def test_parallel_requests_do_not_pass_the_check_together(stack, sims):
    before = stack.all_accounted()["counts"]["outcomes"].get("client_cancelled", 0)
    for sim in sims:
        sim.fail("stall:after=1")  # so that no stream ends, and nothing comes back, before all are decided
    with contextlib.ExitStack() as open_streams, stack.client("trial", limits=httpx.Limits(max_connections=60)) as client:

        def one(_: int) -> httpx.Response:
            return client.send(client.build_request("POST", PATH, json=ask(max_tokens=EACH - 100, stream=True)), stream=True)

        with ThreadPoolExecutor(50) as pool:
            replies = list(pool.map(one, range(50)))
        for reply in replies:
            open_streams.callback(reply.close)
        admitted = [reply for reply in replies if reply.status_code == 200]
        assert len(admitted) == TPM // (EACH - 100)
        for reply in set(replies) - set(admitted):
            assert reply.status_code == 429
            assert json.loads(reply.read())["error"]["code"] == "rate_limit_exceeded"
            assert int(reply.headers["retry-after"]) >= 1
            assert 0 <= left(reply, "tokens") < EACH
    assert stack.all_accounted()["counts"]["outcomes"]["client_cancelled"] - before == len(admitted)
    after = stack.chat(ask(max_tokens=7000), tenant_name="trial")
    assert after.status_code == 200, "what the streams did not use has come back"


# Retries


def test_an_exchange_that_is_tried_on_every_node_costs_one_request_and_is_settled_once(stack, sims):
    first = stack.chat(ask(), tenant_name="other")
    for sim in sims:
        sim.fail("unavailable")
        sim.forget()
    before = stack.all_accounted()["counts"]["outcomes"]
    failed = stack.chat(ask(max_tokens=3000), tenant_name="other")
    assert failed.status_code == 503
    assert sum(sim.seen()[0]["requests"] for sim in sims) == 1 + RETRIES
    outcomes = stack.settled(sum(before.values()) + 1)["counts"]["outcomes"]
    assert outcomes["upstream_error"] == before.get("upstream_error", 0) + 1
    for sim in sims:
        sim.fail("")
    last = stack.chat(ask(), tenant_name="other")
    assert left(first, "requests") - left(last, "requests") == 2
    assert left(last, "tokens") > TPM - 500, "a node's failure costs the tenant nothing"
    assert stack.status()["exchanges"]["unknown"] == 0


def test_an_exchange_without_limits_has_nothing_to_settle_and_is_not_unknown(stack):
    before = sum(stack.all_accounted()["counts"]["outcomes"].values())
    assert stack.chat(ask(), tenant_name="free").status_code == 200
    status = stack.settled(before + 1)
    assert (status["exchanges"]["unknown"], status["exchanges"]["unsettled"]) == (0, 0)
    assert stack.redis_keys("free") == []


def test_an_exchange_that_another_node_answers_costs_what_that_node_did(stack, sims):
    before = stack.all_accounted()["counts"]
    for sim in sims[:2]:
        sim.fail("unavailable")
    replies = [stack.chat(ask(), tenant_name="acme") for _ in range(3)]
    assert [(reply.status_code, reply.headers["x-din-node-id"]) for reply in replies] == [(200, "n2")] * 3
    after = stack.settled(sum(before["outcomes"].values()) + 3)["counts"]
    assert after["completion_tokens"] - before["completion_tokens"] == sims[2].seen()[0]["completion_tokens"]
    assert [left(reply, "requests") - left(replies[0], "requests") for reply in replies] == [0, -1, -2]


# Calls


def test_a_request_costs_redis_one_call_before_and_at_most_one_after_while_slots_are_plentiful(stack):
    settled = sum(stack.all_accounted()["counts"]["outcomes"].values())
    with redis.Redis(port=stack.redis.port) as store:
        store.config_resetstat()
        replies = [stack.chat(ask(), tenant_name="acme") for _ in range(20)]
        assert {reply.status_code for reply in replies} == {200}
        stack.settled(settled + len(replies))
        calls = store.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert len(replies) < calls < 3 * len(replies), "a reservation each, settlements of several, and what the gateway does by itself"


# Keys


def everything_in(server) -> str:
    """All names and values in Redis, as text."""
    readers = {"string": "GET", "hash": "HGETALL", "list": "LRANGE {} 0 -1", "set": "SMEMBERS", "zset": "ZRANGE {} 0 -1"}
    stored = []
    with redis.Redis(port=server.port) as connection:
        for key in connection.scan_iter():
            command, *rest = readers[connection.type(key).decode()].replace("{}", "KEY").split()
            arguments = [key if part == "KEY" else part for part in rest] or [key]
            stored += [key, connection.execute_command(command, *arguments)]
    return repr(stored)


def test_neither_keys_nor_their_hashes_show_up_anywhere(stack, sims):
    key = key_of("single")
    digest = tenant("single")["keys"][0]["hash"].rpartition("$")[2]
    forged = "sk-test-SECRET-of-somebody"
    sent_replies = [stack.chat(ask(), tenant_name="single") for _ in range(2)]
    assert [reply.status_code for reply in sent_replies] == [200, 429]
    for sim in sims:
        sim.fail("unavailable")
    sent_replies.append(stack.chat(ask(), headers={"x-api-key": key}))
    assert sent_replies[-1].status_code == 503
    with stack.client(None) as client:
        for header in ({"authorization": f"Bearer {forged}"}, {"x-api-key": forged}, {"api-key": forged}):
            sent_replies.append(client.post(f"{PATH}?api_key={forged}", json=ask(), headers=header))
            assert sent_replies[-1].status_code == 401
    nodes = [sim.seen()[1] for sim in sims]
    assert sum(map(len, nodes)) == 1 + 1 + RETRIES
    places = {
        "answers": "".join(reply.text + repr(reply.headers) for reply in sent_replies),
        "the sidecar's log": stack.log("sidecar"),
        "Envoy's log": stack.log("envoy"),
        "Redis": everything_in(stack.redis),
        "the status page": json.dumps(stack.status()),
        "the nodes": repr(nodes),
    }
    secrets = {
        "a key": key,
        "its secret": key.rpartition("_")[2],
        "its digest": digest,
        "a forged key": forged,
        "another's": key_of("acme"),
    }
    found = [f"{what} in {where}" for where, text in places.items() for what, secret in secrets.items() if secret in text]
    assert found == []
