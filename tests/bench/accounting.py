"""CPU of accounting per request, part by part, and the effect of a scrape of 100,000 series on decisions.

Rule: the parts are those that the sidecar runs.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from din_extproc.audit.chain import SigningKey
from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.edge.audit.log import AuditLog, AuditOptions
from din_extproc.edge.telemetry.exchange_log import ExchangeLog
from din_extproc.edge.telemetry.otlp import OtlpExporter
from din_extproc.flow.audit_records import make_ending_record
from din_extproc.observe.exchange_metrics import ExchangeMetrics
from tests.bench.beside_a_scrape import beside_a_scrape
from tests.bench.field import Field, Figures
from tests.bench.harness import median

_RECORDS = 4000
RECORD = ExchangeRecord(
    request_id="0192f0c1d2e300010000000000000abc", trace_id="0192f0c1d2e300010000000000000abc", tenant="acme", key_id="k", model="m",
    alias="a", pool="p", rule="r1", node_id="gpu-7", status=200, outcome=Outcome.COMPLETED, stream=True, usage=Usage(900, 200, 400),
    reserved_tokens=1300, prompt_estimate=910, features=(1.0, 2.0), fixed=3, attempts=1, degraded=False, started_at=1_700_000_000.0,
    duration_ms=1300.0, first_token_ms=300.0, operation="/v1/chat/completions", received_ms=2.0, sent_ms=10.0, version="2025.3.1",
)  # fmt: skip


def accounting(field: Field) -> Figures:
    """CPU of each part per finished exchange, and the wait for decisions without and with a large scrape."""
    rounds = max(3, field.effort.rounds)
    parts = {name: median(asyncio.run(part()) for _ in range(rounds)) for name, part in _PARTS.items()}
    return {
        **{f"account_{name}_us": spent for name, spent in parts.items()},
        "account_us": parts["metrics"] + parts["audit"] + parts["log"],
        **beside_a_scrape(field),
    }


async def _metrics() -> float:
    metrics = ExchangeMetrics()
    records = [replace(RECORD, node_id=f"gpu-{at % 50}", tenant=f"t{at % 20}") for at in range(_RECORDS)]
    return _us(lambda: [metrics.on_exchange(record) for record in records])


async def _audit() -> float:
    with tempfile.TemporaryDirectory() as folder:
        log = AuditLog(AuditOptions(folder=Path(folder), replica="gw", kept_events=1 << 20), (SigningKey("k", b"k" * 32),), lambda _: None)
        log.start()
        began = time.process_time()
        for _ in range(_RECORDS):
            log.record(make_ending_record(RECORD))
        await log.flush()
        spent = time.process_time() - began
        await log.close()
    return spent / _RECORDS * 1e6


async def _log() -> float:
    lines: list[bytes] = []
    log = ExchangeLog("all", lines.append)
    began = time.process_time()
    for _ in range(_RECORDS):
        log.on_exchange(RECORD)
    await log.flush()
    return (time.process_time() - began) / _RECORDS * 1e6


async def _spans() -> float:
    """Of an exchange that leaves spans; the collector is not there, so nothing is sent."""
    exporter = OtlpExporter("http://127.0.0.1:9", {}, {"service.name": "din"}, 1.0, ExchangeMetrics().collect_families)
    record = replace(RECORD, span=f"{RECORD.request_id}-{'1' * 16}-")
    for _ in range(500):
        exporter.on_exchange(record)
    began = time.process_time()
    await exporter.push_spans()
    return (time.process_time() - began) / 500 * 1e6


_PARTS = {"metrics": _metrics, "audit": _audit, "log": _log, "span": _spans}


def _us(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) / _RECORDS * 1e6
