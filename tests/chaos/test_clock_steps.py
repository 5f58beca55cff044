"""A gateway whose wall clock is set while it runs, forward and back by hours and days: nobody gains, loses or is given up by it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from din_extproc.edge.replace_file import replace_file
from tests.e2e.test_registry import Replica
from tests.support.servers import RedisServer
from tests.support.stack import tenant

pytestmark = pytest.mark.chaos

HOUR_S, DAY_S = 3600, 86_400
STEPS = (HOUR_S, -HOUR_S, DAY_S, -30 * DAY_S, 0)
EACH = 5
STEPPED = """
import os, time
_real = time.time


def _stepped():
    with open(os.environ["DIN_TEST_CLOCK"]) as step:
        return _real() + float(step.read() or 0)


time.time = _stepped
"""


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """By how many seconds the clock of what is started from now on is wrong."""
    (tmp_path / "sitecustomize.py").write_text(STEPPED)
    step = tmp_path / "step"
    step.write_text("0")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("DIN_TEST_CLOCK", str(step))
    return step


@pytest.fixture
def replica(clock: Path) -> Iterator[Replica]:
    """It takes as many requests a minute as the test sends, and no more."""
    with RedisServer() as server:
        made = Replica(server, tenants=[tenant("acme", rpm=EACH * (len(STEPS) + 1))], store={"lease_ms": 2000})
        try:
            made.start_sidecar()
            yield made
        finally:
            made.rest()
            made.stop()


def test_a_clock_that_is_set_gives_up_no_node_and_opens_and_closes_no_limit(replica, clock):
    replica.join("gpu-1")
    replica.eventually(lambda: replica.picked() == "10.0.0.1:8000", "the node is in")
    assert replica.targets(EACH - 1) == {"10.0.0.1:8000"}
    for step in STEPS:
        replace_file(clock, str(step).encode(), durable=False)  # whole, at any moment: the processes read it all the time
        beats = replica.nodes()["gpu-1"]["beat"]["sequence"]
        replica.eventually(lambda beats=beats: replica.nodes()["gpu-1"]["beat"]["sequence"] > beats + 3, "heartbeats go on")
        assert replica.nodes()["gpu-1"]["state"] == "ready", f"after a step of {step} s"
        assert replica.targets(EACH) == {"10.0.0.1:8000"}
    assert replica.picked() == "rate_limit_exceeded", "all of them count, whatever the clock says"
    replica.eventually(lambda: not replica.status()["exchanges"]["open"], "nothing is held")
    replica.eventually(lambda: replica.redis_keys(":lease:") == [], "nor in Redis")
    assert replica.status()["counts"]["faults"] == 0
