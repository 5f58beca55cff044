"""A pool dies under a hundred streams: what each client sees of it, what stays behind, and what is paid, to the token."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.support.audit_logs import check
from tests.support.columns import audited, in_redis, made, metrics
from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.chaos

EACH = 50
KEY = b"an audit key of these tests"
SHARED = {"batch_slowdown": 0.0, "prefill_rate": 1e6, "max_num_seqs": 256, "kv_tokens": 10_000_000}
LONG, SHORT = 4000, 40
"""Tokens of a stream that is under way when its pool dies, and of one that has not begun."""


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    rates = {"big-1": 30.0, "big-2": 30.0, "small-1": 1000.0, "small-2": 1000.0}
    sims = {name: EngineSim(model=name[:-2], served_model=(f"{name[:-2]}-served",), decode_rate=rates[name], **SHARED) for name in rates}
    with together(sims) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    stack = Stack({})
    (stack.folder / "audit.key").write_bytes(KEY)

    def pool(model: str) -> dict:
        nodes = [node(name, engines[name].address, max_concurrency=200) for name in engines if name.startswith(model)]
        return {"model": model, "served_model": f"{model}-served", "engine": "vllm", "nodes": nodes}

    stack.write(
        {
            "pools": {name: pool(name) for name in ("big", "small")},
            "rules": [{"id": "big", "when": {"model": "big"}, "pool": "big", "fallback": "small"}],
            "tenants": [tenant("acme", max_streams=2 * EACH)],
            "health": {"open_s": 1, "ramp": {"from": 0.5, "over_s": 1}},
            "envoy": {"health_check": False, "timeouts": {"connect_ms": 500, "node_idle_ms": 60_000}},
            "audit": {"folder": "audit", "replica": "gw-1", "keys": {"k1": {"file": "audit.key"}}, "flush_ms": 50},
        }
    )
    with stack as running:
        yield running


class Stream(threading.Thread):
    """A client with one stream, and everything that it was sent."""

    def __init__(self, stack: Stack, trace: str, tokens: int, *, asks: bool) -> None:
        super().__init__()
        self.trace = trace
        self.headers: dict[str, str] = {}
        self.events: list[dict] = []
        self.whole, self.broken, self.status = 0, "", 0
        self._stack = stack
        self._body = {"model": "big", "messages": [{"role": "user", "content": "hello there"}], "stream": True, "max_tokens": tokens}
        self._body |= {"ignore_eos": True} | ({"stream_options": {"include_usage": True}} if asks else {})

    def run(self) -> None:
        headers = {"x-din-trace-id": self.trace}
        with self._stack.client() as client, client.stream("POST", "/v1/chat/completions", json=self._body, headers=headers) as reply:
            self.status, self.headers = reply.status_code, dict(reply.headers)
            try:
                for line in reply.iter_lines():
                    if line == "data: [DONE]":
                        self.whole += 1
                    elif line.startswith("data: "):
                        self.events.append(json.loads(line[6:]))
            except httpx.HTTPError as error:
                self.broken = type(error).__name__

    @property
    def models(self) -> set[str]:
        return {event["model"] for event in self.events if "model" in event}

    @property
    def tokens(self) -> int:
        """Those that arrived."""
        return sum(bool(choice["delta"].get("content")) for event in self.events for choice in event.get("choices", ()))

    @property
    def error(self) -> str:
        """The code of an in-band error, "" when there was none."""
        return next((event["error"]["code"] for event in self.events if "error" in event), "")

    @property
    def usage(self) -> dict[str, int] | None:
        return next((event["usage"] for event in self.events if event.get("usage")), None)


def started(stack: Stack, kind: str, tokens: int) -> list[Stream]:
    streams = [Stream(stack, f"{kind}-{number:04d}", tokens, asks=number % 2 == 0) for number in range(EACH)]
    for each in streams:
        each.start()
    return streams


@pytest.fixture(scope="module")
def died(stack, engines) -> tuple[list[Stream], list[Stream]]:
    """Streams that were under way, and streams that had been sent and not begun, when both nodes of their pool were killed."""
    early = started(stack, "under-way", LONG)
    stack.eventually(lambda: all(each.tokens for each in early), "fifty streams are under way")
    for name in ("big-1", "big-2"):
        engines[name].fail("stall")
    late = started(stack, "not-begun", SHORT)
    stack.eventually(lambda: stack.status()["exchanges"]["open"] >= 2 * EACH, "a hundred streams")
    os.kill(stack.envoy.pid, signal.SIGSTOP)  # it sees both die at once: what broke at one and was sent to the other before would end there
    for name in ("big-1", "big-2"):
        engines[name].end()
    os.kill(stack.envoy.pid, signal.SIGCONT)
    for each in (*early, *late):
        each.join(60)
    assert not any(each.is_alive() for each in (*early, *late))
    return early, late


def test_streams_that_had_not_begun_are_whole_answers_of_the_fallback_spread_over_its_nodes(died):
    _, late = died
    assert {(each.status, each.whole, each.broken, each.error) for each in late} == {(200, 1, "", "")}
    assert {each.headers["x-din-degraded-reason"] for each in late} == {"upstream_failed"}
    assert {each.headers["x-bxagent-degraded"] for each in late} == {"true"}
    assert {frozenset(each.models) for each in late} == {frozenset({"small-served"})}, "never two answers mixed"
    assert {each.tokens for each in late} == {SHORT}
    share = Counter(each.headers["x-din-node-id"] for each in late)
    assert min(share["small-1"], share["small-2"]) >= EACH / 4, share


def test_streams_under_way_end_with_an_error_or_a_reset_and_with_nothing_of_another_answer(died):
    early, _ = died
    assert {each.status for each in early} == {200}
    assert {each.headers["x-din-node-id"] for each in early} <= {"big-1", "big-2"}
    assert not any("x-bxagent-degraded" in each.headers or each.whole for each in early)
    assert {frozenset(each.models) for each in early} == {frozenset({"big-served"})}
    assert all(each.error == "upstream_truncated" or each.broken for each in early)


def test_no_slot_stays_taken_and_every_exchange_is_settled_once(died, stack):
    status = stack.settled(2 * EACH)
    assert status["exchanges"] | {"unsettled": 0, "given_up": 0, "unknown": 0, "open": 0} == status["exchanges"]
    stack.eventually(lambda: stack.redis_keys(":lease:") == [], "no slot is taken")


def test_tokens_are_settled_exactly(died, stack, engines):
    early, late = died
    stack.eventually(lambda: {each.trace for each in (*early, *late)} <= audited(stack).keys(), "every stream is in the audit log")
    stack.eventually(lambda: in_redis(stack) == metrics(stack), f"Redis has {in_redis(stack)}, metrics {metrics(stack)}")
    records, engine = audited(stack), made(engines[name] for name in ("small-1", "small-2"))

    def charged(streams: list[Stream]) -> tuple[int, int]:
        found = [records[each.trace] for each in streams]
        return sum(each["prompt_tokens"] for each in found), sum(each["completion_tokens"] for each in found)

    reported = [each for each in late if each.usage is not None]
    assert len(reported) == EACH / 2
    assert all((each.usage["prompt_tokens"], each.usage["completion_tokens"]) == engine[each.trace][1:] for each in reported)
    [prompt] = {each.usage["prompt_tokens"] for each in reported}
    rows = {
        "moved": ((EACH * prompt, sum(each.tokens for each in late)), charged(late), in_redis(stack, "small")),
        "cut": ((charged(early)[0], sum(each.tokens for each in early)), charged(early), in_redis(stack, "big")),
    }
    print(f"\n{'prompt, completion':>20} {'client':>16} {'audit':>16} {'redis':>16}")
    for name, columns in rows.items():
        print(f"{name:>20} " + " ".join(f"{column!s:>16}" for column in columns))
        assert len(set(columns)) == 1, (name, columns)
    assert rows["moved"][0] == tuple(sum(engine[each.trace][at] for each in late) for at in (1, 2))
    assert metrics(stack) == tuple(map(sum, zip(*(columns[1] for columns in rows.values()), strict=True)))
    for each in early:
        record = records[each.trace]
        assert (record["completion_tokens"], record["estimated"], record["pool"]) == (each.tokens, True, "big")
        assert 0 < record["prompt_tokens"] == record["prompt_estimate"]
    assert {(records[each.trace]["pool"], records[each.trace].get("estimated", False)) for each in late} == {("small", False)}
    assert check(stack.folder / "audit", keys={"k1": KEY}).findings == []


def test_the_pool_is_used_again_once_its_nodes_are_back(died, stack, engines):
    for name in ("big-1", "big-2"):
        engines[name].start()

    def back() -> bool:
        reply = stack.chat(model="big")
        assert reply.status_code == 200
        return reply.headers["x-din-node-id"].startswith("big-") and "x-bxagent-degraded" not in reply.headers

    stack.eventually(back, "the pool answers")
