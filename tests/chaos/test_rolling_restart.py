"""Everything is replaced while a hundred streams run and short requests keep coming: workers, then Envoy. Nobody notices."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

from din_extproc.roles.configure.render import render_envoy
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.chaos

STREAMS = 100
PATH = "/v1/chat/completions"


class LinedStack(Stack):
    """With Envoy run by `din-extproc envoy`."""

    def start_envoy(self) -> None:
        self.render()
        command = [sys.executable, "-m", "din_extproc", "envoy", self.folder / "envoy.yaml", "--config", self.config_file]
        self.envoy = self._child("envoy", [*command, "--concurrency", "1", "--drain-s", "90"])
        self._await("envoy", self.envoy, lambda: self._answers(f"http://127.0.0.1:{self.envoy_admin_port}/ready"))

    def render(self) -> None:
        settings = load(self.config_file, {})
        assert isinstance(settings, Settings), str(settings)
        (self.folder / "envoy.yaml").write_text(render_envoy(settings))

    def envoys(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.envoy.pid).children()}

    def workers(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.sidecar.pid).children() if "--worker" in child.cmdline()}

    def epochs(self) -> int:
        return self.log("envoy").count("Envoy is ready, epoch")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=12.0, max_num_seqs=256, kv_tokens=1_000_000) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine) -> Iterator[LinedStack]:
    config = {
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address, max_concurrency=1000)]}},
        "tenants": [tenant("acme")],
    }
    with LinedStack(config, gateway={"workers": 2}, serve=("--drain-s", "90")) as running:
        yield running


def asked(tokens: int, *, stream: bool) -> dict:
    messages = [{"role": "user", "content": "tell"}]
    return {"model": "m", "stream": stream, "max_tokens": tokens, "messages": messages, "ignore_eos": True}


async def whole_stream(client: httpx.AsyncClient, begun: asyncio.Semaphore) -> str:
    async with client.stream("POST", PATH, json=asked(120, stream=True)) as reply:
        if reply.status_code != 200:
            begun.release()
            return f"status {reply.status_code}"
        last, first = "", True
        async for line in reply.aiter_lines():
            if first:
                begun.release()
                first = False
            last = line or last
        return last


async def keep_asking(client: httpx.AsyncClient, done: asyncio.Event, statuses: list[object]) -> None:
    while not done.is_set():
        try:
            statuses.append((await client.post(PATH, json=asked(1, stream=False))).status_code)
        except httpx.HTTPError as error:
            statuses.append(repr(error))
        await asyncio.sleep(0.1)


async def test_workers_and_envoy_are_replaced_under_a_hundred_streams_and_nothing_fails(stack):
    before, first = stack.workers(), stack.epochs()
    statuses: list[object] = []
    begun, done = asyncio.Semaphore(0), asyncio.Event()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    headers = {"authorization": f"Bearer {key_of('acme')}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=60, verify=False, limits=limits) as client:
        streams = [asyncio.create_task(whole_stream(client, begun)) for _ in range(STREAMS)]
        for _ in range(STREAMS):
            await begun.acquire()
        short = asyncio.create_task(keep_asking(client, done, statuses))
        stack.sidecar.send_signal(signal.SIGUSR1)
        stack.envoy.send_signal(signal.SIGHUP)
        await asyncio.to_thread(stack.eventually, lambda: stack.epochs() == first + 1, "a successor of Envoy")
        await asyncio.to_thread(stack.eventually, lambda: len(stack.workers() - before) == 2, "two new workers")
        still_open = sum(not stream.done() for stream in streams)
        ended = await asyncio.gather(*streams)
        done.set()
        await short
    assert set(ended) == {"data: [DONE]"}
    assert set(statuses) == {200}, statuses
    assert len(statuses) > 10
    assert still_open > 0, "the streams outlived what they were served by"
    status = stack.settled(STREAMS + len(statuses))
    assert status["exchanges"]["open"] == 0
    assert stack.redis_keys(":lease:") == []


def test_a_configuration_that_envoy_refuses_leaves_the_one_in_use(stack):
    good = (stack.folder / "envoy.yaml").read_text()
    epochs = stack.epochs()
    (stack.folder / "envoy.yaml").write_text("admin: { adress: nowhere }\n")
    stack.envoy.send_signal(signal.SIGHUP)
    stack.eventually(lambda: "Envoy rejects" in stack.log("envoy"), "a refusal")
    assert "adress" in stack.log("envoy")
    (stack.folder / "envoy.yaml").write_text(good)
    assert stack.epochs() == epochs
    assert stack.chat(max_tokens=1).status_code == 200


def test_sigterm_ends_what_is_in_flight_and_takes_nothing_new(engine):
    config = {
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}},
        "tenants": [tenant("acme")],
    }
    with LinedStack(config) as stack:
        with stack.client() as client, client.stream("POST", PATH, json=asked(30, stream=True)) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            stack.envoy.terminate()
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert stack.envoy.wait(15) == 0
        assert stack.settled(1)["counts"]["outcomes"] == {"completed": 1}
        with pytest.raises(httpx.ConnectError):
            stack.chat()


def takes_connections(stack: LinedStack) -> bool:
    try:
        socket.create_connection(("127.0.0.1", stack.port), timeout=5).close()
    except OSError:
        return False
    return True


def test_draining_by_hand_takes_no_more_connections_and_ends_when_nothing_is_left(engine):
    config = {"pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}}, "tenants": [tenant("acme")]}
    with LinedStack(config) as stack:
        command = [sys.executable, "-m", "din_extproc", "drain", "--config", stack.config_file, "--at-least-s", "0.1"]
        with stack.client() as client, client.stream("POST", PATH, json=asked(60, stream=True)) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            draining = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            stack.eventually(lambda: not takes_connections(stack), "no more connections are taken")
            assert draining.poll() is None, "a stream is in flight"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        _, output = draining.communicate(timeout=30)
        assert (draining.returncode, output) == (0, "")
        assert not takes_connections(stack)
        again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert (again.returncode, again.stderr) == (0, "")
        stack.envoy.terminate()
        stack.envoy.wait(20)
        silent = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert silent.returncode == 1
        assert "does not answer" in silent.stderr
