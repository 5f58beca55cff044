"""A node that dies, freezes, swallows connections, drips, resets or has no memory left: what clients see of it, and what stays behind."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Self

import httpx
import pytest

from tests.support.servers import EngineSim, free_port, together
from tests.support.stack import Stack, events, node, tenant

pytestmark = pytest.mark.chaos

PATH = "/v1/chat/completions"
DONE = "data: [DONE]\n\n"
FIRST_BYTE_MS = 1500
IDLE_MS = 1200
RETRIES = 1
TPM = 1_000_000
ROOM = 400
"""Output tokens that every stream asks for: a charge for one that was cut stays far below."""


class BlackHole:
    """A port whose connections are never accepted and never refused, as behind a firewall that drops: its queue is full."""

    def __init__(self) -> None:
        self._door = socket.socket()
        self._door.bind(("127.0.0.1", 0))
        self._door.listen(0)
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._waiting: list[socket.socket] = []

    def __enter__(self) -> Self:
        for _ in range(4):
            caller = socket.socket()
            caller.setblocking(False)
            caller.connect_ex(self._door.getsockname())
            self._waiting.append(caller)
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._waiting, self._door):
            each.close()


class Gateway(Stack):
    """A stack that knows how many streams were asked of it."""

    def __init__(self, *given, **named) -> None:
        super().__init__(*given, **named)
        self.asked: list[str] = []


@pytest.fixture(scope="module")
def sims() -> Iterator[dict[str, EngineSim]]:
    # Their tokens are 10 ms apart: a reset throws away what Envoy has not read, and with it the first byte that forbids a retry.
    made = {name: EngineSim(model="m", decode_rate=100.0, batch_slowdown=0.0, prefill_rate=1e6) for name in ("first", "second", "lonely")}
    made["lonely"].options["model"] = "lonely"
    with together(made) as running:
        yield running


@pytest.fixture(scope="module")
def stack(sims) -> Iterator[Gateway]:
    """The node `first` has more room, so that it is always the one that is chosen; `hole` is the same for the model `hole`."""
    refusing, first = f"127.0.0.1:{free_port()}", {"max_seq_len": 16384}
    with BlackHole() as hole:
        nodes = {
            "m": [node("first", sims["first"].address, **first), node("second", sims["second"].address)],
            "lonely": [node("lonely", sims["lonely"].address)],
            "hole": [node("hole", hole.address, **first), node("beside-hole", sims["second"].address)],
            "closed": [node("closed", refusing, **first), node("beside-closed", sims["second"].address)],
            "nobody": [node("nobody", refusing)],
        }
        served = {"hole": "m", "closed": "m"}
        timeouts = {"first_byte_s": FIRST_BYTE_MS / 1000}
        config = {
            "pools": {
                name: {"model": name, "served_model": served.get(name, name), "engine": "vllm", "timeouts": timeouts, "nodes": listed}
                for name, listed in nodes.items()
            },
            "tenants": [tenant("acme", tpm=TPM)],
            "envoy": {
                "retry": {"attempts": RETRIES},
                "timeouts": {"node_idle_ms": IDLE_MS, "connect_ms": 300},
                "health_check": False,
                "outlier": {"consecutive_connect_failures": 1000},
            },
            "health": {"breaker": False},
        }
        with Gateway(config) as running:
            yield running


@pytest.fixture(autouse=True)
def fresh(sims) -> Iterator[None]:
    for sim in sims.values():
        sim.forget()
    yield
    for sim in sims.values():
        sim.fail("")


class Seen(SimpleNamespace):
    """What a client saw of a stream: `status`, `text`, `node`, and whether it was `cut`."""


def stream(stack: Gateway, model: str = "m", tokens: int = 5, **headers: str) -> Seen:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "min_tokens": tokens, "stream": True}
    seen = Seen(text="", cut=False)
    stack.asked.append(model)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    with stack.client() as client, client.stream("POST", PATH, json=body, headers=names) as reply:
        seen.status, seen.node = reply.status_code, reply.headers.get("x-din-node-id")
        seen.headers = reply.headers
        try:
            for part in reply.iter_text():
                seen.text += part
        except (httpx.RemoteProtocolError, httpx.ReadError):
            seen.cut = True
    return seen


def whole(seen: Seen, by: str) -> None:
    """One complete answer of this node."""
    assert (seen.status, seen.node, seen.cut) == (200, by, False), seen
    assert seen.text.endswith(DONE)
    assert len({event["id"] for event in events(seen.text)}) == 1, "two answers are mixed"


def refused(seen: Seen, status: int, code: str) -> None:
    assert (seen.status, seen.cut) == (status, False), seen
    assert f'"code":"{code}"' in seen.text
    assert seen.headers["x-din-trace-id"] in seen.text


@contextlib.contextmanager
def accounted(stack: Gateway) -> Iterator[SimpleNamespace]:
    """What the exchanges inside the block came to: `outcomes` and `tokens` charged. Afterwards nothing is held for any of them."""
    before = stack.settled(len(stack.asked))["counts"]
    accounts = SimpleNamespace()
    yield accounts
    after = stack.settled(len(stack.asked))["counts"]
    changed = {name: count - before["outcomes"].get(name, 0) for name, count in after["outcomes"].items()}
    accounts.outcomes = {name: count for name, count in changed.items() if count}
    accounts.tokens = sum(after[f"{kind}_tokens"] - before[f"{kind}_tokens"] for kind in ("prompt", "completion"))
    stack.eventually(lambda: stack.redis_keys(":lease:") == [], "every slot is free")
    assert all(each["tokens_in_use"] == 0 for each in stack.status()["nodes"].values())
    assert stack.status()["counts"]["faults"] == 0


def produced(*sims: EngineSim) -> int:
    """Prompt and output tokens of what these engines completed."""
    return sum(sim.seen()[0][f"{kind}_tokens"] for sim in sims for kind in ("prompt", "completion"))


# Before the first byte: another node answers, and the client sees nothing


@contextlib.contextmanager
def killed(sim: EngineSim) -> Iterator[None]:
    sim.end()
    try:
        yield
    finally:
        sim.start()


@contextlib.contextmanager
def frozen(sim: EngineSim) -> Iterator[None]:
    sim.pause()
    try:
        yield
    finally:
        sim.resume()


def failing(faults: str) -> Callable[[EngineSim], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def block(sim: EngineSim) -> Iterator[None]:
        sim.fail(faults)
        try:
            yield
        finally:
            sim.fail("")

    return block


@pytest.mark.parametrize(
    "trouble",
    [killed, frozen, failing("reset"), failing("unavailable"), failing("stall")],
    ids=["killed", "frozen", "reset before the first byte", "answers 503", "accepts and says nothing"],
)
def test_while_one_node_is_in_trouble_another_answers_whole_and_it_is_used_again_as_soon_as_it_is_well(stack, sims, trouble):
    whole(stream(stack), "first")
    sims["second"].forget()
    with accounted(stack) as accounts, ThreadPoolExecutor(5) as clients, trouble(sims["first"]):
        for seen in clients.map(lambda _: stream(stack), range(5)):
            whole(seen, "second")
    assert accounts.outcomes == {"completed": 5}
    assert accounts.tokens == produced(sims["second"]), "what the other node did, and nothing for the one that failed"
    stack.eventually(lambda: stream(stack).node == "first", "it is used again")


@pytest.mark.parametrize(("model", "by"), [("closed", "beside-closed"), ("hole", "beside-hole")])
def test_a_closed_port_and_a_black_hole_cost_no_client_an_answer(stack, sims, model, by):
    with accounted(stack) as accounts:
        for _ in range(3):
            whole(stream(stack, model), by)
    assert accounts.outcomes == {"completed": 3}
    failures = stack.envoy_stats(f"cluster.{model}.upstream_cx_connect_fail")
    assert sum(failures.values()) >= 3, "each of them was tried and counted as a failure"
    timeouts = stack.envoy_stats(f"cluster.{model}.upstream_cx_connect_timeout")
    assert (sum(timeouts.values()) > 0) == (model == "hole"), "only the hole needs the time limit"


def test_a_model_whose_only_node_refuses_connections_is_a_503_with_its_time(stack):
    with accounted(stack) as accounts:
        seen = stream(stack, "nobody")
        refused(seen, 503, "no_healthy_node")
        assert int(seen.headers["retry-after"]) >= 1
    assert (accounts.outcomes.keys() <= {"not_dispatched", "upstream_error"}, accounts.tokens) == (True, 0)


def test_a_storm_of_503_from_every_node_is_over_with_the_storm(stack, sims):
    for name in ("first", "second"):
        sims[name].fail("unavailable")
    with accounted(stack) as accounts, ThreadPoolExecutor(10) as clients:
        for seen in clients.map(lambda _: stream(stack), range(20)):
            assert (seen.status, seen.cut) == (503, False)
    assert (accounts.outcomes, accounts.tokens) == ({"upstream_error": 20}, 0)
    tries = sum(sims[name].seen()[0]["requests"] for name in ("first", "second"))
    assert tries == 20 * (1 + RETRIES), "each is tried once more, not in a loop"
    for name in ("first", "second"):
        sims[name].fail("")
    whole(stream(stack), "first")


# No other node: the limits


def test_a_node_that_never_begins_is_given_up_when_its_time_is_over(stack, sims):
    sims["lonely"].fail("stall")
    with accounted(stack) as accounts:
        refused(stream(stack, "lonely"), 504, "upstream_timeout")
    assert accounts.outcomes == {"upstream_timeout": 1}
    stack.eventually(lambda: sims["lonely"].gauge("num_requests_running") == 0, "the node has stopped")
    sims["lonely"].fail("")
    whole(stream(stack, "lonely"), "lonely")


def test_a_clients_patience_ends_a_stream_that_has_begun_and_the_node_stops(stack, sims):
    lonely = sims["lonely"]
    with accounted(stack) as accounts:
        seen = stream(stack, "lonely", ROOM, x_din_timeout_ms="900")
        assert (seen.status, seen.cut) == (200, True)
    assert accounts.outcomes == {"upstream_timeout": 1}
    got = seen.text.count('"content":"')
    assert 0 < got < ROOM / 2
    assert got - 2 <= accounts.tokens <= ROOM / 2, "about what came is charged, not what was asked for"
    stack.eventually(lambda: lonely.seen()[0]["aborted"] == 1, "the node hears of it")
    assert lonely.gauge("num_requests_running") == 0


def test_a_stream_that_falls_silent_is_cut_after_the_silence_that_is_allowed_and_charged_for_what_came(stack, sims):
    sims["lonely"].fail("stall:after=7")
    with accounted(stack) as accounts:
        seen = stream(stack, "lonely", ROOM)
        assert (seen.status, seen.cut, seen.text.count('"content":"') - 1) == (200, True, 7), "all that came before, and no end"
    assert accounts.outcomes == {"upstream_timeout": 1}
    assert 0 < accounts.tokens < ROOM / 2
    sims["lonely"].fail("")
    whole(stream(stack, "lonely"), "lonely")


def test_a_slow_drip_longer_than_every_silence_arrives_whole_to_the_byte(stack, sims):
    whole(stream(stack, "lonely", 3), "lonely")
    sims["lonely"].forget()
    sims["lonely"].fail("drip:bytes=200,ms=150")
    began = time.monotonic()
    with accounted(stack) as accounts:
        seen = stream(stack, "lonely", 20)
        whole(seen, "lonely")
    assert time.monotonic() - began > IDLE_MS / 1000, "it took longer than any single silence may"
    assert seen.text.count('"content":"') - 1 == 20
    assert (accounts.outcomes, accounts.tokens) == ({"completed": 1}, produced(sims["lonely"]))


def test_a_whole_answer_that_takes_longer_than_every_silence_is_waited_for_and_asked_once(stack, sims):
    sims["first"].fail(f"latency:ms={2 * IDLE_MS}")
    with accounted(stack) as accounts:
        reply = stack.chat(max_tokens=3)
        stack.asked.append("m")
    assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "first")
    assert [sims[name].seen()[0]["requests"] for name in ("first", "second")] == [1, 0], "no other node does the same work"
    assert accounts.outcomes == {"completed": 1}


# After the first byte: never a second answer


@pytest.mark.parametrize("how", ["killed", "reset"])
def test_a_node_that_dies_in_its_streams_cuts_them_all_and_mixes_none(stack, sims, how):
    first, second = sims["first"], sims["second"]
    if how == "reset":
        first.fail("reset:after=20")
    with accounted(stack) as accounts, ThreadPoolExecutor(10) as clients:
        pending = [clients.submit(stream, stack, "m", ROOM) for _ in range(10)]
        if how == "killed":
            stack.eventually(lambda: first.gauge("num_requests_running") == 10, "all run")
            time.sleep(0.2)  # some tokens, not the same for all
            first.end()
        streams = [each.result() for each in pending]
        if how == "killed":
            first.start()
    assert [(seen.status, seen.cut, seen.node) for seen in streams] == [(200, True, "first")] * 10
    assert all(len({event["id"] for event in events(seen.text)}) == 1 for seen in streams)
    assert second.seen()[0]["requests"] == 0, "nobody else was asked"
    assert accounts.outcomes == {"upstream_truncated": 10}
    came = sum(seen.text.count('"content":"') - 1 for seen in streams)
    prompts = 10 * 40
    assert 0 < accounts.tokens <= came * 1.1 + prompts, "what came is charged, not what was asked for"
    first.fail("")
    whole(stream(stack), "first")


def test_an_engine_that_fails_in_its_stream_says_so_in_band_and_once(stack, sims):
    sims["lonely"].fail("error_event:after=3")
    with accounted(stack) as accounts:
        seen = stream(stack, "lonely", ROOM)
        assert (seen.status, seen.cut) == (200, False)
    assert sum("error" in event for event in events(seen.text)) == 1
    assert accounts.outcomes == {"upstream_error": 1}


# Under load


def test_a_node_that_comes_and_goes_under_load_fails_only_streams_that_had_begun(stack, sims):
    first = sims["first"]
    stop, seen = threading.Event(), []

    def client() -> None:
        while not stop.is_set():
            seen.append(stream(stack, tokens=10))

    with accounted(stack), ThreadPoolExecutor(6) as clients:
        running = [clients.submit(client) for _ in range(6)]
        for _ in range(2):
            here = len(seen)
            stack.eventually(lambda here=here: len(seen) > here + 12, "requests go on")
            first.end()
            here = len(seen)
            stack.eventually(lambda here=here: len(seen) > here + 12, "requests go on without it")
            first.start()
        stop.set()
        for each in running:
            each.result()
    cut = [each for each in seen if each.cut or each.status != 200]
    assert len(cut) <= 2 * 6, "at most those that were under way: whoever had not begun was answered by the other node"
    assert {each.node for each in cut} <= {"first"}
    for each in seen:
        if each.status != 200:  # the node had begun, and nothing of it had reached the client yet
            refused(each, 502, "upstream_error")
        elif not each.cut:
            whole(each, each.node)
