"""A key that is revoked is refused everywhere within a second: two replicas of two workers each, over one Redis."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Self

import pytest

from din_extproc.roles.configure.keys import revoke_key
from din_extproc.settings.load import load
from tests.support.servers import EngineSim, RedisServer
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e

KEYS = ("acme", "trial", "other")
PROMISE_S = 1.0
LANES = 2
"""Clients of each replica."""


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Stack]]:
    with ExitStack() as stack:
        sim = stack.enter_context(EngineSim(model="m", decode_rate=2000.0, prefill_rate=1e6))
        server = stack.enter_context(RedisServer())
        config = {
            "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", sim.address)]}},
            "tenants": [tenant(name) for name in KEYS],
        }
        yield [stack.enter_context(Stack(config, server=server, gateway={"workers": 2})) for _ in range(2)]


class Watched:
    """Clients that ask with one key, over and over, through all replicas."""

    def __init__(self, replicas: list[Stack], key: str) -> None:
        self.answers: list[tuple[float, float, int]] = []
        """The times of the request and of the answer, and the status."""
        self._over = threading.Event()
        lanes = [each for each in replicas for _ in range(LANES)]
        self._threads = [threading.Thread(target=self._ask, args=(each, key)) for each in lanes]

    def _ask(self, stack: Stack, key: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        with stack.client(key) as client:
            while not self._over.is_set():
                began = time.monotonic()
                status = client.post("/v1/chat/completions", json=body).status_code
                self.answers.append((began, time.monotonic(), status))
                time.sleep(0.005)

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        for each in self._threads:
            each.join()


def test_a_revoked_key_is_refused_by_every_worker_of_every_replica_within_a_second(replicas):
    """The shortest of three times: on a busy machine even the clients are late."""
    took = []
    settings = load(replicas[0].config_file, {})
    for key in KEYS:
        with Watched(replicas, key) as watched:
            replicas[0].eventually(lambda w=watched: len(w.answers) > 20, "all of them ask")
            revoked = time.monotonic()
            revoke_key(settings, key)
            replicas[0].eventually(lambda w=watched: [status for *_, status in w.answers[-50:]] == [401] * 50, "all of them are refused")
        assert {status for _, answered, status in watched.answers if answered < revoked} == {200}
        took.append(max((began for began, _, status in watched.answers if status != 401), default=revoked) - revoked)
    print("refused everywhere after", ", ".join(f"{seconds:.2f} s" for seconds in took))
    assert min(took) < PROMISE_S
