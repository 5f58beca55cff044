"""A sidecar that dies in the middle of a request: before it has decided, and while the answer streams. Closed, and open toward one pool."""

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
import redis

from tests.support.rig import Answer, Rig, Sidecar, rig
from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, events, node, tenant

pytestmark = pytest.mark.chaos

PATH = "/v1/chat/completions"
LEASE_MS = 2000
DONE = "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def sims() -> Iterator[dict[str, EngineSim]]:
    made = {name: EngineSim(model="m", decode_rate=50.0, batch_slowdown=0.0, prefill_rate=1e6) for name in ("safe", "other")}
    with together(made) as running:
        yield running


@pytest.fixture(scope="module", params=["closed", "open"])
def stack(request, sims) -> Iterator[Stack]:
    config = {
        "pools": {name: {"model": "m", "engine": "vllm", "nodes": [node(name, sim.address)]} for name, sim in sims.items()},
        "rules": [{"id": "all", "when": "always", "pool": "other"}],
        "tenants": [tenant("acme")],
        "envoy": {"timeouts": {"message_ms": 5000}},
        "store": {"lease_ms": LEASE_MS, "timeout_ms": 4000},
        "fail_open": {"pool": "safe"} if request.param == "open" else False,
    }
    with Stack(config) as running:
        running.open = request.param == "open"
        yield running


@pytest.fixture(autouse=True)
def fresh(sims) -> None:
    for sim in sims.values():
        sim.forget()


def in_hand(stack: Stack) -> int:
    """Requests that the sidecar has been asked about."""
    return sum(stack.envoy_stats("http.din.ext_proc.streams_started").values())


def bypassed(reply: httpx.Response) -> None:
    """Answered by the safe pool, whole, and marked."""
    assert reply.status_code == 200, reply.text
    assert (reply.headers["x-din-node-id"], reply.headers["x-bxagent-degraded"]) == ("safe", "true")
    assert reply.headers["x-din-degraded-reason"] == "limits_bypassed"
    assert reply.json()["usage"]["completion_tokens"] == 8


def refused(reply: httpx.Response) -> None:
    body = reply.json()
    assert (reply.status_code, body["code"], reply.headers["retry-after"]) == (503, "sidecar_unavailable", "1")
    assert body["trace_id"] == reply.headers["x-din-trace-id"]


def test_requests_that_wait_for_their_decision_when_the_sidecar_dies_are_refused_or_bypassed_and_all_of_them(stack, sims):
    assert stack.chat().headers["x-din-node-id"] == "other"
    stack.settled(1)
    sims["other"].forget()
    with ThreadPoolExecutor(8) as clients:
        with stack.redis.paused():  # so that they wait
            before = in_hand(stack)
            waiting = [clients.submit(stack.chat, {"min_tokens": 8}) for _ in range(8)]
            stack.eventually(lambda: in_hand(stack) == before + 8, "all wait for their decision")
            stack.sidecar.kill()
            stack.sidecar.wait()
            replies = [each.result() for each in waiting]
        for reply in replies:
            bypassed(reply) if stack.open else refused(reply)
    assert sims["other"].seen()[0]["requests"] == 0, "no node but the safe one was asked"
    assert sims["safe"].seen()[0]["requests"] == (8 if stack.open else 0)
    stack.start_sidecar()
    assert stack.chat().headers["x-din-node-id"] == "other", "the very first request after the restart"
    stack.eventually(lambda: not leased(stack), "what Redis still counted for the dead runs out")


def leased(stack: Stack) -> int:
    """Leases that have not run out: what the next request of the tenant would be held against."""
    with redis.Redis(port=stack.redis.port) as connection:
        now = connection.time()[0] * 1000
        return sum(connection.zcount(key, now, "+inf") for key in stack.redis_keys(":lease:"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_that_have_begun_go_on_to_their_end_without_the_sidecar(stack, sims, how):
    stack.eventually(lambda: not stack.status()["exchanges"]["open"], "nothing is open")
    before = stack.status()["counts"]["completion_tokens"]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "min_tokens": 60, "stream": True}
    with stack.client() as client, client.stream("POST", PATH, json=body) as reply:
        parts = reply.iter_text()
        text = next(parts)
        stack.sidecar.send_signal(how)
        text += "".join(parts)
        assert (reply.status_code, reply.headers["x-din-node-id"], "x-bxagent-degraded" in reply.headers) == (200, "other", False)
    assert text.endswith(DONE)
    assert sum(bool(event["choices"][0]["delta"].get("content")) for event in events(text) if event["choices"]) == 60
    if how == signal.SIGSTOP:
        stack.sidecar.send_signal(signal.SIGCONT)
        stack.eventually(lambda: stack.status()["counts"]["completion_tokens"] == before + 60, "what was streamed meanwhile is charged")
    else:  # what ended while nobody listened stays charged by its reservation
        stack.sidecar.wait()
        stack.start_sidecar()
    stack.eventually(lambda: not leased(stack), "its place is free")


# A sidecar that says UNAVAILABLE


class Quitter(Sidecar):
    """Breaks each stream off at one of its messages."""

    at = ""

    async def _process(self, requests, context):
        async def until_then():
            async for request in requests:
                if request.HasField(self.at):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                yield request

        async for reply in super()._process(until_then(), context):
            yield reply


@contextlib.asynccontextmanager
async def quitting(at: str, **topology) -> Rig:
    async with rig(**topology) as running:
        await running.sidecar.stop()
        running.sidecar.__class__ = Quitter
        running.sidecar.at = at
        await running.sidecar.start()
        yield running


@pytest.mark.parametrize("fail_open", [None, "pool"])
@pytest.mark.parametrize("at", ["request_headers", "request_body"])
async def test_a_stream_that_breaks_before_the_decision_is_a_refusal_or_a_bypass(at, fail_open):
    async with quitting(at, fail_open_pool=fail_open) as running:
        running.sidecar.decide = lambda _headers, _body: Answer(418, b"{}")
        reply = await running.chat()
        assert reply.status == (200 if fail_open else 503)
        assert reply["x-bxagent-degraded"] == ("true" if fail_open else None)
        if not fail_open:
            assert json.loads(reply.body)["code"] == "sidecar_unavailable"
        assert sum(len(backend.seen) for backend in running.nodes) == (1 if fail_open else 0)


@pytest.mark.parametrize("fail_open", [None, "pool"])
async def test_a_stream_that_breaks_at_the_answer_lets_it_pass(fail_open):
    async with quitting("response_headers", fail_open_pool=fail_open) as running:
        running.sidecar.decide = lambda _headers, _body: running.toward(running.nodes[1])
        reply = await running.chat()
        assert (reply.status, reply.json(), reply["x-bxagent-degraded"]) == (200, {"node": "node-1"}, None)
