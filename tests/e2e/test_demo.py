"""The demo as a newcomer meets it: one command, real parts, everything gone afterwards."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.pages import code_blocks

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
PARTS = {"redis", "node-a", "node-b", "node-c", "sidecar", "envoy"}


def start(log: Path, *options: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        command = [sys.executable, "-m", "din_extproc", "demo", *options]
        return subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True)


def wait_for(demo: subprocess.Popen[bytes], log: Path, words: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while words not in log.read_text():
        assert demo.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def family(demo: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(demo.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []


def finish(demo: subprocess.Popen[bytes]) -> None:
    if demo.poll() is None:
        demo.kill()
        demo.wait()


def take_the_tour(log_text: str) -> None:
    """Run README's tour and compare status, headers and the form of events with what README shows."""
    [example] = code_blocks("README", "console")
    [url] = re.findall(r"answers at (\S+)", log_text)
    [key] = re.findall(r"^key +(\S+)", log_text, re.MULTILINE)
    commands, _, expected = example.replace("http://127.0.0.1:38831", url).replace("din_demo_...", key).partition("\nHTTP/")
    script = re.sub(r"^\$ |^ready\n", "", commands, flags=re.MULTILINE)
    ran = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=90, check=True, env=os.environ)
    ready, _, answer = ran.stdout.replace("\r", "").partition("\nHTTP/")
    assert ready == "ready"

    def form(text: str) -> tuple[str, set[str], set[str]]:
        head, _, events = text.partition("\n\n")
        return (
            head.split("\n")[0],
            set(re.findall(r"^([\w-]+):", head, re.MULTILINE)),
            set(re.findall(r'^data: \{.*"(choices)":', events, re.MULTILINE)),
        )

    (status, headers, choices), (ours, all_headers, all_choices) = form(expected), form(answer)
    assert (ours, all_choices) == (status, choices)
    assert headers <= all_headers


@pytest.mark.timeout(180)
def test_the_demo_holds_every_check_on_real_models(tmp_path):
    log = tmp_path / "log"
    demo = start(log, "--check")
    try:
        assert demo.wait(150) == 0, log.read_text()
    finally:
        finish(demo)
    log_text = log.read_text()
    assert log_text.count("✓") == 8, log_text
    assert "llama.cpp" in log_text


def test_ctrl_c_stops_everything_and_is_no_error(tmp_path):
    log = tmp_path / "log"
    demo = start(log, "--simulated")
    try:
        wait_for(demo, log, "Ctrl-C stops everything")
        processes = family(demo)
        assert len(processes) >= len(PARTS)
        take_the_tour(log.read_text())
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait(40) == 0, log.read_text()
        assert_gone(processes)
    finally:
        finish(demo)
    log_text = log.read_text()
    assert "engine simulators" in log_text
    assert re.search(r"^curl -si http://127\.0\.0\.1:\d+/v1/chat/completions", log_text, re.MULTILINE)
    (folder,) = re.findall(r"Configuration and logs: (\S+)\. Ctrl-C", log_text)
    assert not Path(folder).exists()


def test_ctrl_c_while_it_starts_stops_everything_too(tmp_path):
    log = tmp_path / "log"
    demo = start(log, "--simulated")
    try:
        wait_for(demo, log, "Redis ")
        processes = family(demo)
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait(40) == 0, log.read_text()
        assert_gone(processes)
    finally:
        finish(demo)


def test_a_part_that_dies_is_named_and_ends_the_demo(tmp_path):
    log = tmp_path / "log"
    demo = start(log, "--simulated")
    try:
        wait_for(demo, log, "Ctrl-C stops everything")
        processes = family(demo)
        (redis,) = [process for process in processes if "valkey-server" in process.name() or "redis-server" in process.name()]
        redis.kill()
        assert demo.wait(40) == 1
        assert_gone(processes)
    finally:
        finish(demo)
    log_text = log.read_text()
    assert "The demo stops: redis ended with exit code -9" in log_text
    assert "Traceback" not in log_text
