"""Child processes are awaited, have logs of their own, and never outlive their parent."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from din_extproc.tools.demo.processes import ChildFailed, Children, free_ports, http_ready, tcp_ready, unix_ready
from tests.support.waiting import eventually, turns, until

SLEEP = [sys.executable, "-c", "import signal; signal.pause()"]
DEAF = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()",
]


async def at_once() -> bool:
    return True


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_child_is_waited_for_until_it_serves(tmp_path):
    (port,) = free_ports(1)
    async with Children(tmp_path) as children:
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", tmp_path]
        child = await children.start("web", command, ready=http_ready(f"http://127.0.0.1:{port}/"))
        assert await tcp_ready("127.0.0.1", port)()
        assert child.exit_code is None
    assert child.exit_code is not None
    assert not await tcp_ready("127.0.0.1", port)()


async def test_a_unix_socket_is_ready_when_it_accepts(tmp_path):
    path = tmp_path / "s"
    assert not await unix_ready(path)()
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path)
    async with server:
        assert await unix_ready(path)()


async def test_a_child_that_ends_early_is_reported_with_its_last_words(tmp_path):
    program = "print('one'); print('the port is taken'); raise SystemExit(3)"
    async with Children(tmp_path) as children:
        with pytest.raises(ChildFailed, match=r"(?s)node-a ended with exit code 3 before it was ready.*the port is taken"):
            await children.start("node-a", [sys.executable, "-c", program], ready=tcp_ready("127.0.0.1", 1))


async def test_a_child_that_never_serves_is_reported_and_ended(tmp_path):
    async with Children(tmp_path) as children:
        with pytest.raises(ChildFailed, match=r"slow was not ready within 0\.3 s"):
            await children.start("slow", SLEEP, ready=tcp_ready("127.0.0.1", 1), timeout_s=0.3)
        pid = children.newest.pid
    assert not alive(pid)


async def test_a_program_that_is_not_there_is_reported(tmp_path):
    async with Children(tmp_path) as children:
        with pytest.raises(ChildFailed, match=r"ghost failed to start"):
            await children.start("ghost", [tmp_path / "nothing"], ready=at_once)


async def test_the_first_death_is_distinguished(tmp_path):
    async with Children(tmp_path) as children:
        await children.start("stays", SLEEP, ready=at_once)
        mortal = await children.start("dies", SLEEP, ready=at_once)
        death = asyncio.ensure_future(children.first_death())
        await turns(5)
        os.kill(mortal.pid, signal.SIGKILL)
        assert await death is mortal
        assert "dies ended with exit code -9" in str(mortal.failure(f"ended with exit code {mortal.exit_code}"))


async def test_a_child_stopped_on_purpose_is_no_death(tmp_path):
    async with Children(tmp_path) as children:
        await children.start("stays", SLEEP, ready=at_once)
        leaves = await children.start("leaves", SLEEP, ready=at_once)
        death = asyncio.ensure_future(children.first_death())
        await children.stop(leaves)
        assert not alive(leaves.pid)
        await turns(20)
        assert not death.done()
        death.cancel()


async def test_a_child_that_does_not_listen_is_ended_all_the_same(tmp_path):
    async with Children(tmp_path) as children:
        child = await children.start("deaf", DEAF, ready=at_once)
        await until(lambda: "deaf" in child.log.read_text())
        await child.stop(grace_s=0.1)
        assert child.exit_code == -signal.SIGKILL


async def test_what_a_child_has_started_goes_with_it(tmp_path):
    program = f"import signal, subprocess; print(subprocess.Popen({SLEEP!r}).pid, flush=True); signal.pause()"
    async with Children(tmp_path) as children:
        child = await children.start("parent", [sys.executable, "-c", program], ready=at_once)
        await until(lambda: child.log.read_text().strip())
        grandchild = int(child.log.read_text())
    await until(lambda: not alive(grandchild))
    assert not alive(child.pid)


def test_children_end_when_we_are_killed(tmp_path):
    program = f"""
import asyncio, sys
from pathlib import Path
from din_extproc.tools.demo.processes import Children
async def ready(): return True
async def main():
    async with Children(Path({str(tmp_path)!r})) as children:
        child = await children.start("orphan", {SLEEP!r}, ready=ready)
        print(child.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[4])
    with parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    eventually(lambda: not alive(child))
