"""The whole gateway while Redis is missing at the start, paused, killed and made to forget: every request is answered, by the policy."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import redis

from tests.support.servers import EngineSim, RedisServer
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.chaos

PATH = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def sim() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=5000.0, prefill_rate=1e6) as server:
        yield server


@pytest.fixture(params=["local_share", "open", "closed"])
def policy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Not started."""
    made = RedisServer()
    yield made
    made.stop()


def gateway(sim: EngineSim, server: RedisServer, policy: str) -> Stack:
    config = {
        "pools": {"pool": {"model": "m", "engine": "vllm", "nodes": [node("sim", sim.address)]}},
        "rules": [{"id": "all", "when": "always", "pool": "pool"}],
        "tenants": [tenant("acme"), tenant("single", rpm=1)],
        "store": {"on_error": policy, "timeout_ms": 200},
    }
    return Stack(config, server=server)


def ready(stack: Stack) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{stack.admin_port}/readyz", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def answers_by(policy: str, replies: list[httpx.Response]) -> None:
    """Whether each reply is what the policy says while Redis is away. `replies`: several of a tenant with one request per minute."""
    statuses = [reply.status_code for reply in replies]
    match policy:
        case "local_share":
            assert sorted(statuses) == [200] + [429] * (len(replies) - 1)
        case "open":
            assert statuses == [200] * len(replies)
            assert not any(name.startswith("x-ratelimit") for reply in replies for name in reply.headers)
        case _:
            assert statuses == [503] * len(replies)
            assert {reply.json()["error"]["code"] for reply in replies} == {"limits_unavailable"}
            assert {reply.headers["retry-after"] for reply in replies} == {"1"}


def several(stack: Stack) -> list[httpx.Response]:
    with stack.client("single") as client, ThreadPoolExecutor(10) as pool:
        return list(pool.map(lambda _: client.post(PATH, json=ASK), range(10)))


def shared(stack: Stack) -> None:
    stack.eventually(lambda: stack.status()["limits"]["shared"] and stack.status()["redis"]["up"], "limits are shared again")


def test_without_redis_at_the_start_the_policy_holds_until_it_comes_and_again_when_it_dies(sim, server, policy):
    stack = gateway(sim, server, policy)
    try:
        stack.start_sidecar(ready=policy != "closed")
        stack.start_envoy()
        stack.eventually(lambda: ready(stack)[0] != 0, "the admin port answers")
        stack.eventually(lambda: "serving configuration" in stack.log("sidecar"), "it serves")
        answers_by(policy, several(stack))
        code, body = ready(stack)
        assert code == (503 if policy == "closed" else 200)
        why = f"no connection to 127.0.0.1:{server.port}"
        assert (why in body) == (policy == "closed")
        assert why in stack.log("sidecar")
        assert f"on_error: {policy}" in stack.log("sidecar")
        assert not stack.status()["limits"]["shared"]
        server.start()
        shared(stack)
        assert ready(stack) == (200, "ready\n")
        assert sorted(reply.status_code for reply in several(stack)) == [200] + [429] * 9, "counted in Redis from now on"
        server.end()
        assert stack.chat(ASK).status_code == (503 if policy == "closed" else 200)
        stack.settled(1)
    finally:
        stack.stop()


class Load:
    """Four clients that ask without a pause inside the block."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self.replies: list[httpx.Response] = []

    def __enter__(self) -> list[httpx.Response]:
        self._clients = [self._pool.submit(self._ask) for _ in range(4)]
        return self.replies

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def _ask(self) -> None:
        with self._stack.client("acme") as client:
            while not self._stop.is_set():
                self.replies.append(client.post(PATH, json=ASK))


def test_a_paused_redis_holds_no_request_beyond_its_time_and_all_is_well_afterwards(sim, server, policy):
    server.start()
    with gateway(sim, server, policy) as stack:
        with Load(stack) as replies:
            stack.eventually(lambda: len(replies) > 20, "some are counted in Redis")
            with server.paused():
                before = len(replies)
                stack.eventually(lambda: not stack.status()["redis"]["up"], "the silence is noticed")
                stack.eventually(lambda: len(replies) > before + 100, "requests are decided without Redis")
                answers_by(policy, several(stack))
            shared(stack)
            after = len(replies)
            stack.eventually(lambda: len(replies) > after + 20, "requests are counted in Redis again")
        assert {reply.status_code for reply in replies[after + 8 :]} == {200}
        assert {reply.status_code for reply in replies} <= ({200, 503} if policy == "closed" else {200})
        assert stack.envoy_stats("ext_proc.message_timeouts") == {"http.din.ext_proc.message_timeouts": 0}
        assert stack.status()["counts"]["faults"] == 0
        stack.settled(1)
        stack.eventually(lambda: stack.redis_keys("acme}:lease:") == [], "what was owed is paid")


def test_forgotten_scripts_and_a_restart_are_seen_by_no_client(sim, server):
    server.start()
    with gateway(sim, server, "local_share") as stack:
        with Load(stack) as replies, redis.Redis(port=server.port) as connection:
            for number in range(20):
                connection.script_flush()
                stack.eventually(lambda number=number: len(replies) > 10 * number, "requests go on")
            assert stack.status()["limits"]["shared"], "a forgotten script is no outage"
            server.restart()
            before = len(replies)
            stack.eventually(lambda: len(replies) > before + 50, "requests go on")
            shared(stack)
        assert {reply.status_code for reply in replies} == {200}
        assert stack.status()["counts"]["faults"] == 0
        assert "NOSCRIPT" not in stack.log("sidecar")


def test_a_redis_that_forgets_everything_under_load_is_seen_by_no_client_and_leaves_nothing_behind(sim, server):
    server.start()
    with gateway(sim, server, "local_share") as stack, redis.Redis(port=server.port) as connection:
        with Load(stack) as replies:
            for _ in range(5):
                here = len(replies)
                stack.eventually(lambda here=here: len(replies) > here + 20, "requests go on")
                connection.flushall()
        assert {reply.status_code for reply in replies} == {200}
        assert sorted(reply.status_code for reply in several(stack)) == [200] + [429] * 9, "what counts from now on counts"
        status = stack.settled(len(replies) + 10)
        assert status["limits"]["shared"]
        assert status["counts"]["faults"] == 0
        assert all(each["tokens_in_use"] == 0 for each in status["nodes"].values())
        stack.eventually(lambda: stack.redis_keys(":lease:") == [], "no lease of the forgotten is left or came back")
