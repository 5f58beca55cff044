"""What accounting costs per request, part by part, and what a scrape of 100,000 series does to decisions beside it.

Rule: the parts are those that the sidecar runs; the page is made at the pace of the admin port.
"""

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from din_extproc.audit.chain import Key
from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.edge.audit.log import AuditLog, AuditOptions
from din_extproc.edge.http.paced import paced
from din_extproc.edge.telemetry.exchange_log import ExchangeLog
from din_extproc.edge.telemetry.otlp import OtlpExporter
from din_extproc.flow.audited import ending
from din_extproc.observe import instruments as of
from din_extproc.observe.exchange_metrics import ExchangeMetrics
from din_extproc.observe.exposition import slices
from din_extproc.observe.families import Distributions
from tests.bench.contenders import chat_body
from tests.bench.field import BODY_BYTES, Field, Figures
from tests.bench.growth import decide, desk_of
from tests.bench.harness import median

_RECORDS = 4000
_DECISIONS = 1000
_SERIES = 100_000
RECORD = ExchangeRecord(
    request_id="0192f0c1d2e300010000000000000abc", trace_id="0192f0c1d2e300010000000000000abc", tenant="acme", key_id="k", model="m",
    alias="a", pool="p", rule="r1", node_id="gpu-7", status=200, outcome=Outcome.COMPLETED, stream=True, usage=Usage(900, 200, 400),
    reserved_tokens=1300, prompt_estimate=910, features=(1.0, 2.0), fixed=3, attempts=1, degraded=False, started_at=1_700_000_000.0,
    duration_ms=1300.0, first_token_ms=300.0, operation="/v1/chat/completions", received_ms=2.0, sent_ms=10.0, version="2025.3.1",
)  # fmt: skip


def accounting(field: Field) -> Figures:
    """CPU of each part per finished exchange, and the wait of decisions without and with a large scrape."""
    rounds = max(3, field.effort.rounds)
    alone, beside, pages = asyncio.run(_beside_a_scrape(rounds, field.effort.many_tenants))
    parts = {name: median(asyncio.run(part()) for _ in range(rounds)) for name, part in _PARTS.items()}
    return {
        **{f"account_{name}_us": spent for name, spent in parts.items()},
        "account_us": parts["metrics"] + parts["audit"] + parts["log"],
        "decision_p99_beside_a_scrape_vs_alone": median(one / other for one, other in zip(beside, alone, strict=True)),
        "scrape_series": _SERIES * field.effort.many_tenants // 100_000,
        "scrape_s": median(pages),
    }


async def _metrics() -> float:
    metrics = ExchangeMetrics()
    records = [replace(RECORD, node_id=f"gpu-{at % 50}", tenant=f"t{at % 20}") for at in range(_RECORDS)]
    return _us(lambda: [metrics.finished(record) for record in records])


async def _audit() -> float:
    with tempfile.TemporaryDirectory() as folder:
        log = AuditLog(AuditOptions(folder=Path(folder), replica="gw", kept_events=1 << 20), (Key("k", b"k" * 32),), lambda _: None)
        log.start()
        began = time.process_time()
        for _ in range(_RECORDS):
            log.note(ending(RECORD))
        await log.flush()
        spent = time.process_time() - began
        await log.close()
    return spent / _RECORDS * 1e6


async def _log() -> float:
    lines: list[bytes] = []
    log = ExchangeLog("all", lines.append)
    began = time.process_time()
    for _ in range(_RECORDS):
        log.finished(RECORD)
    await log.flush()
    return (time.process_time() - began) / _RECORDS * 1e6


async def _spans() -> float:
    """Of an exchange that leaves spans; the collector is not there, so nothing is sent."""
    exporter = OtlpExporter("http://127.0.0.1:9", {}, {"service.name": "din"}, 1.0, ExchangeMetrics().families)
    record = replace(RECORD, span=f"{RECORD.request_id}-{'1' * 16}-")
    for _ in range(500):
        exporter.finished(record)
    began = time.process_time()
    await exporter.push_spans()
    return (time.process_time() - began) / 500 * 1e6


_PARTS = {"metrics": _metrics, "audit": _audit, "log": _log, "span": _spans}


def _us(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) / _RECORDS * 1e6


async def _beside_a_scrape(rounds: int, many: int) -> tuple[list[float], list[float], list[float]]:
    """P99 of decisions, each from its turn to its verdict, alone and beside scrapes that follow each other; and seconds of a page."""
    per_set = len(of.NODE_DURATION.bounds) + 3
    spread = Distributions(of.NODE_DURATION, cap=1 << 30)
    for at in range(_SERIES * many // 100_000 // per_set):
        spread.record((f"node-{at}", "m"), at % 90)
    alone, beside, pages = [], [], []
    for _ in range(rounds):
        alone.append(await _p99())
        scraping = asyncio.get_running_loop().create_task(_scrape(spread, pages))
        beside.append(await _p99())
        scraping.cancel()
        await asyncio.gather(scraping, return_exceptions=True)
    return alone, beside, pages


async def _scrape(spread: Distributions, pages: list[float]) -> None:
    while True:
        began = time.perf_counter()
        async for _ in paced(slices([spread.family()])):
            pass
        pages.append(time.perf_counter() - began)


async def _p99() -> float:
    """Decisions at half load: as long a pause as a decision takes."""
    desk, body, running, waits = desk_of(), chat_body(BODY_BYTES), deque(), []
    loop = asyncio.get_running_loop()
    for _ in range(_DECISIONS):
        due = loop.time() + 0.0005
        await asyncio.sleep(0.0005)
        decide(desk, body, running)
        waits.append(loop.time() - due)
    waits.sort()
    return waits[int(len(waits) * 0.99)]
