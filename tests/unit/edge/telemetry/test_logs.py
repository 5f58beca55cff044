"""The log: a line is one JSON object whatever stands in it, names the request, and is not flooded."""

import json
import logging

import pytest

from din_extproc.edge.telemetry.logs import JsonLines, LogThrottle

HOSTILE = [
    'a\r\n{"level":"ERROR","message":"forged"}',
    "\u001b[2J\n2026 ERROR",
    "model\nwith a newline",
    "\u2028\u2029\x85",
    "\ud83d",
    '"}\n{"',
]


def record(message: str, *arguments: object, at: float = 0.0, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "din", "levelname": "ERROR", "msg": message, "args": arguments, **extra})
    made.created = at
    return made


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_whatever_a_client_wrote_a_line_is_one_object(text):
    line = JsonLines().format(record("said %s", text.encode("utf-8", "replace").decode()))
    assert len(line.splitlines()) == 1 or not any(end in line for end in "\r\n")
    assert "\n" not in line
    assert "\x1b" not in line
    assert json.loads(line)["level"] == "error"


def test_a_fault_names_the_request_and_keeps_its_traceback_short():
    error = ValueError("x" * 100_000)
    made = record("failed", exc_info=(ValueError, error, None), trace_id="0123")
    entry = json.loads(JsonLines().format(made))
    assert entry["trace_id"] == "0123"
    assert len(entry["error"]) <= 16_000


def test_a_message_of_every_request_is_logged_a_few_times_and_counted():
    sparing = LogThrottle()
    passed = [sparing.filter(record("failed %s", number, at=number / 1000)) for number in range(1000)]
    assert passed == [True] * 20 + [False] * 980
    assert sparing.filter(record("another", at=1.0))
    later = record("failed %s", 1000, at=10.0)
    assert sparing.filter(later)
    assert json.loads(JsonLines().format(later))["left_out"] == 980
    assert not hasattr(record("failed %s", 1001, at=10.1), "left_out")
