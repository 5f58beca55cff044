"""Usage as each source reports it: the audit log, the metrics, Redis and the engines.

Rule: each source is read where a user reads it; none is derived from another.
"""

import json
import re
import urllib.request
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from din_extproc.roles.serve.usage import fetch_usage_rows
from din_extproc.settings.load import load
from tests.support.servers import EngineSim
from tests.support.stack import Stack


def audited(stack: Stack, replica: str = "gw-1") -> dict[str, dict[str, Any]]:
    """Return settled exchanges of the audit log by trace id, each exactly once."""
    lines = [line for path in sorted((stack.folder / "audit").glob(f"{replica}-*.jsonl")) for line in path.read_text().splitlines()]
    settled = [record for line in lines if (record := json.loads(line))["kind"] == "settled"]
    assert len({record["request_id"] for record in settled}) == len(settled)
    return {record["trace_id"]: record for record in settled}


def metrics(stack: Stack) -> tuple[int, int]:
    """Return input and output tokens of all tenants from the metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.admin_port}/metrics", timeout=10) as reply:
        found = re.findall(r'^din_tokens_total\{[^}]*gen_ai_token_type="(input|output)"[^}]*\} (\d+)$', reply.read().decode(), re.MULTILINE)
    return tuple(sum(int(value) for kind, value in found if kind == wanted) for wanted in ("input", "output"))


def in_redis(stack: Stack, model: str = "") -> tuple[int, int]:
    """Return prompt and completion tokens that Redis has counted for charge-back: of one model, or of all."""
    today = datetime.now(UTC).date()
    rows = [row for row in fetch_usage_rows(load(stack.config_file, {}), today, today, "", ("model",)) if model in ("", row["model"])]
    return sum(row["prompt_tokens"] for row in rows), sum(row["completion_tokens"] for row in rows)


def made(engines: Iterable[EngineSim]) -> dict[str, tuple[str, int, int]]:
    """Return outcome and real tokens by trace id, as the engines counted them."""
    found = {}
    for sim in engines:
        for request in sim.seen(2000)[1]:
            headers = {name.lower(): value for name, value in request["headers"]}
            if "x-din-trace-id" in headers:
                found[headers["x-din-trace-id"]] = request["outcome"], request["prompt_tokens"], request["completion_tokens"]
    return found
