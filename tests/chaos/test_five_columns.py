"""The sums agree, to the token, while workers are killed, Redis freezes, nodes cut streams and clients leave: what clients got, what the
audit log says, what metrics say, what Redis counted, what the engines counted themselves."""

import contextlib
import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support.audit_logs import check
from tests.support.columns import audited, in_redis, made, metrics
from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.chaos

CLIENTS, EACH, CUT_AFTER = 5, 10, 4
KILLED = (0, 1, 0)
"""Numbers of the workers that are killed, one after another."""
KEY = b"an audit key of these tests"


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineSim]]:
    made = [EngineSim(model="m", decode_rate=300.0, max_num_seqs=256, kv_tokens=1_000_000) for _ in range(2)]
    try:
        yield [sim.start() for sim in made]
    finally:
        for sim in made:
            sim.stop()


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    stack = Stack({}, gateway={"workers": 2})
    (stack.folder / "audit.key").write_bytes(KEY)
    nodes = [node(f"n{at}", sim.address) for at, sim in enumerate(engines)]
    stack.write(
        {
            "pools": {"p": {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": nodes}},
            "tenants": [tenant("acme"), tenant("trial")],
            "store": {"timeout_ms": 200},
            "envoy": {"retry": {"attempts": 0}},
            "audit": {"folder": "audit", "replica": "gw-1", "keys": {"k1": {"file": "audit.key"}}, "flush_ms": 50},
        }
    )
    with stack as running:
        yield running


class Client(threading.Thread):
    """One client after another request: whole answers, streams with and without usage, and streams that it leaves."""

    def __init__(self, stack: Stack, number: int, over: threading.Event) -> None:
        super().__init__()
        self.got: dict[str, tuple[int, int]] = {}
        """Prompt and completion tokens of whole answers, by trace id; prompt -1: the answer had no usage."""
        self.stack, self.number, self.over = stack, number, over

    def run(self) -> None:
        for count in itertools.count():
            if count >= EACH and self.over.is_set():
                return
            trace = f"five-{self.number:02d}-{count:04d}"
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                self._ask(trace, count % EACH)

    def _ask(self, trace: str, at: int) -> None:
        stream, reported = at % 3 != 0, at % 3 == 1
        body = {"model": "m", "messages": [{"role": "user", "content": "word " * (1 + at * 7)}], "max_tokens": 10 + at, "ignore_eos": True}
        body |= {"stream": stream} | ({"stream_options": {"include_usage": True}} if reported else {})
        headers = {"authorization": f"Bearer {key_of(('acme', 'trial')[self.number % 2])}", "x-din-trace-id": trace}
        with (
            httpx.Client(base_url=self.stack.url, timeout=30, headers=headers) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as reply,
        ):
            if reply.status_code != 200:
                reply.read()
                return
            if not stream:
                usage = json.loads(reply.read())["usage"]
                self.got[trace] = usage["prompt_tokens"], usage["completion_tokens"]
                return
            self._read(trace, reply, leaves=at % 7 == 6)

    def _read(self, trace: str, reply: httpx.Response, *, leaves: bool) -> None:
        deltas, usage = 0, None
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                self.got[trace] = (usage["prompt_tokens"], usage["completion_tokens"]) if usage else (-1, deltas)
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                deltas += any(choice["delta"].get("content") for choice in event.get("choices", ()))
                if leaves and deltas >= CUT_AFTER:
                    return


def trouble(stack: Stack, over: threading.Event) -> None:
    """Redis stands still for a moment, a worker is killed; once more when another one serves in its place. Clients ask until it is over."""
    try:
        for number in KILLED:
            stack.redis.process.send_signal(signal.SIGSTOP)
            time.sleep(0.4)
            stack.redis.process.send_signal(signal.SIGCONT)
            gone = [child for child in psutil.Process(stack.sidecar.pid).children() if worker_number(child) == str(number)]
            for child in gone:
                child.kill()
            psutil.wait_procs(gone)
            stack.eventually(lambda path=f"{stack.folder}/ext_proc.sock.{number}": serves(path), f"worker {number} serves again")
    finally:
        over.set()


def worker_number(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
    except psutil.Error:  # it has just ended
        return ""
    return command[command.index("--worker") + 1] if "--worker" in command else ""


def serves(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def audit(stack: Stack) -> dict[str, tuple[str, int, int]]:
    """Outcome and tokens by trace id."""
    return {trace: (record["outcome"], record["prompt_tokens"], record["completion_tokens"]) for trace, record in audited(stack).items()}


def test_five_columns_agree_to_the_token_under_load_with_kills(stack, engines):
    engines[0].fail(f"reset:after={CUT_AFTER},probability=0.1", seed=5)
    over = threading.Event()
    clients = [Client(stack, number, over) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    trouble(stack, over)
    for client in clients:
        client.join()
    got = {trace: tokens for client in clients for trace, tokens in client.got.items()}
    assert len(got) > CLIENTS * EACH / 3, "most requests come through"
    stack.eventually(lambda: got.keys() <= audit(stack).keys(), "every answer is in the audit log")
    stack.eventually(lambda: in_redis(stack) == metrics(stack), f"Redis has {in_redis(stack)}, metrics {metrics(stack)}")
    recorded, seen, whole = audit(stack), made(engines), sorted(got)
    reported = [trace for trace in whole if got[trace][0] >= 0]
    columns = {
        "client": (sum(got[trace][0] for trace in reported), sum(got[trace][1] for trace in whole)),
        "audit": (sum(recorded[trace][1] for trace in reported), sum(recorded[trace][2] for trace in whole)),
        "engine": (sum(seen[trace][1] for trace in reported), sum(seen[trace][2] for trace in whole)),
    }
    every = {
        "audit": (sum(tokens[1] for tokens in recorded.values()), sum(tokens[2] for tokens in recorded.values())),
        "metrics": metrics(stack),
        "redis": in_redis(stack),
    }
    cut = sorted(recorded.keys() - got.keys())
    rest = {
        "audit": (sum(recorded[trace][1] for trace in whole), sum(recorded[trace][2] for trace in whole)),
        "cut": (sum(recorded[trace][1] for trace in cut), sum(recorded[trace][2] for trace in cut)),
    }
    print(f"\n{'':22} {'client':>14} {'audit':>14} {'metrics':>14} {'redis':>14} {'engine':>14}")
    for at, kind in enumerate(("prompt", "completion")):
        whole_of = {name: every[name][at] - rest["cut"][at] for name in ("metrics", "redis")}
        engine = sum(seen[trace][at + 1] for trace in whole)
        client = columns["client"][at] + (0 if at else sum(seen[trace][1] for trace in whole if got[trace][0] < 0))
        row = (client, rest["audit"][at], whole_of["metrics"], whole_of["redis"], engine)
        print(f"{len(whole)} whole, {kind:11} " + " ".join(f"{value:>14}" for value in row))
        assert len(set(row)) == 1, row
    print(f"{len(cut)} cut or failed: charged {rest['cut']}, the engines made {[seen[trace] for trace in cut if trace in seen]}")
    assert columns["client"] == columns["audit"] == columns["engine"]
    assert every["audit"] == every["metrics"] == every["redis"]
    for trace in cut:
        outcome, _, completion = recorded[trace]
        assert completion <= seen.get(trace, (outcome, 0, 0))[2], (trace, recorded[trace], seen.get(trace))
    assert stack.status()["workers"]["restarts"] >= len(KILLED)
    assert check(stack.folder / "audit", keys={"k1": KEY}).findings == []
