"""The report of benchmarks: figures with their targets, contenders, and the machine.

Invariant: the performance page is changed between its markers only.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

from msgspec import Struct

from din_extproc.edge.process.envoy_binary import find_envoy, read_envoy_version
from tests.bench.contenders import LITELLM, ROOT, TITLES, VLLM_ROUTER, python_version_of
from tests.bench.field import Figures
from tests.bench.peers.build import PROGRAMS
from tests.bench.peers.go_gateways import GO_TITLES
from tests.support.servers import redis_binary

BENCH, STRATEGIES, STALL, COSTS, CALIBRATE, CLAIMS = "bench", "strategies", "stall", "costs", "calibrate", "claims"
"""Names of the markers in the performance page."""
PAGE = ROOT / "deploy" / "docs" / "pages" / "performance.md"


class Bar(Struct, frozen=True):
    """A figure with its target. `at_most` False: the figure has to be at least the target."""

    name: str
    means: str
    bar: float
    dream: float
    at_most: bool = True

    def met(self, figure: float, line: float) -> bool:
        """Whether the figure meets the target."""
        return figure <= line if self.at_most else figure >= line


BARS = (
    Bar("sidecar_cpu_vs_grpc_aio_noop", "sidecar CPU per request, everything on ÷ no-op over grpc.aio", 0.25, 0.16),
    Bar("sidecar_cpu_vs_wire_noop", "sidecar CPU per request, everything on ÷ no-op over our wire", 3.0, 2.0),
    Bar("sidecar_cpu_vs_grpc_go_noop", "sidecar CPU per request, everything on ÷ empty grpc-go server", 2.8, 2.0),
    Bar("stack_cpu_vs_aibrix", "whole stack (Envoy + sidecar + Redis) CPU per request ÷ AIBrix", 0.9, 0.7),
    Bar("stack_cpu_vs_aibrix_light", "the same, 2 connections", 0.9, 0.7),
    Bar("stack_cpu_vs_aigw_with_limits", "whole stack CPU per request ÷ Envoy AI Gateway with the Go rate limit service", 0.65, 0.5),
    Bar("stack_cpu_vs_aigw_with_limits_light", "the same, 2 connections", 0.65, 0.5),
    Bar("stack_cpu_vs_aigw", "whole stack CPU per request ÷ Envoy AI Gateway without limits", 1.3, 1.0),
    Bar("stack_cpu_vs_aigw_light", "the same, 2 connections", 1.2, 1.0),
    Bar("stack_cpu_vs_litellm", "whole stack CPU per request ÷ LiteLLM", 0.055, 0.04),
    Bar("redis_cpu_vs_one_evalsha", "all Redis work of a request ÷ one reservation alone in its round trip", 1.5, 1.1),
    Bar("throughput_vs_wire_noop", "throughput, everything on ÷ Envoy + no-op over our wire", 0.5, 0.65, at_most=False),
    *(
        Bar(f"added_{name}_vs_aibrix_{rate}", f"added {name.upper()} at {rate} requests/s over plain Envoy ÷ AIBrix's", 0.8, 0.5)
        for rate in (100, 200)
        for name in ("p50", "p99")
    ),
    Bar("stack_cpu_hosted_vs_local", "whole stack CPU per request of a hosted API (TLS, kept connections) ÷ of a local node", 1.3, 1.15),
    Bar("decision_p99_ms_200", "decision P99 inside the server at 200 requests/s, ms", 5, 2),
    Bar("decision_1k_rules_vs_10", "decision time behind 1,000 rules that don't hold ÷ behind 10", 1.5, 1.1),
    Bar("added_p99_ms_half_load", "added P99 at half load, everything on, over plain Envoy, ms", 5, 2),
    Bar("decision_p99_ms_half_load", "decision P99 inside the server at half load, ms", 1, 0.4),
    Bar("decision_10k_nodes_vs_10", "decision time with 10,000 nodes ÷ with 10", 1.5, 1.1),
    Bar("heartbeat_cpu_10k_nodes_vs_100", "CPU per heartbeat at 1,000 a second, 10,000 nodes ÷ 100", 1.3, 1.1),
    Bar("decision_beside_10k_beating_nodes_vs_100", "decision time beside these heartbeats, 10,000 nodes ÷ 100", 1.5, 1.1),
    Bar("decision_p99_beside_a_scrape_vs_alone", "decision P99 beside a scrape of 100,000 series ÷ without", 1.2, 1.1),
    Bar("admit_100k_tenants_vs_10", "admission cost with 100,000 tenants ÷ with 10", 1.3, 1.1),
    Bar("admit_sidecar_budgets_one_vs_none", "sidecar CPU per admission with a budget ÷ without", 1.15, 1.05),
    Bar("admit_redis_budgets_one_vs_none", "Redis CPU likewise", 1.15, 1.05),
    Bar("admit_sidecar_budgets_two_vs_none", "sidecar CPU per admission with two budgets ÷ without", 1.15, 1.05),
    Bar("admit_redis_budgets_two_vs_none", "Redis CPU likewise", 1.15, 1.05),
    Bar("limits_held_requests", "requests admitted in 30 s at three times the limits, two replicas ÷ limit", 1.0, 1.0),
    Bar("limits_held_tokens", "tokens likewise ÷ bucket and refill", 1.05, 1.0),
    Bar("limits_held_peak", "requests in flight likewise ÷ limit", 1.0, 1.0),
    Bar("limits_leaked", "slots still taken afterwards", 0, 0),
    Bar("limits_noise_p99", "P99 of a tenant beside one at ten times its limit ÷ alone", 1.3, 1.05),
    Bar("chunk_envoy_cpu_lua_vs_none", "Envoy CPU per stream chunk, with the usage filter ÷ without", 1.6, 1.3),
    Bar("sidecar_bytes_per_open_stream", "memory per open stream in the sidecar, bytes", 20_000, 6_000),
    Bar("estimate_32k_time_vs_tokenizer", "token estimate of a 32 k-token prompt ÷ exact tokenizer, time", 0.05, 0.01),
    Bar("dearest_body_vs_chat", "reading the dearest body we know ÷ a chat of its size, CPU", 12, 7),
    Bar("screen_1mb_vs_128kb", "looking for sensitive data in 1 MB ÷ in 125 kB, CPU, the worst text we know", 24, 9),
    Bar("simulate_1k_nodes_hour_s", "simulating 1,000 nodes, 100,000 tenants and 180,000 requests for an hour, s", 60, 20),
    Bar(
        "prefix_affinity_first_token_vs_round_robin",
        "P90 of the first token behind long shared prompts, prefix affinity ÷ round robin",
        0.5,
        0.1,
    ),
    Bar("adapters_loaded_share", "requests that meet a loaded adapter, 64 adapters (Zipf 1.5) in 32 places", 0.9, 0.94, at_most=False),
    Bar("adapters_moving_failed", "requests that fail while adapters come and go", 0, 0),
    Bar("estimate_error_p95", "its relative error, P95 over the mixed corpus", 0.08, 0.04),
)
CAPTIONS = {
    "body_1kb_sidecar_ms": "sidecar CPU for a body of 1 kB, ms",
    "body_32kb_sidecar_ms": "sidecar CPU for a body of 32 kB, ms",
    "body_1mb_sidecar_ms": "sidecar CPU for a body of 1 MB, ms",
    "chunk_cpu_translated_vs_passed": "Envoy + sidecar CPU per stream chunk, translated (Ollama natively) ÷ passed on",
    "chunk_translated_sidecar_us": "the sidecar's part of it, µs per chunk",
    "chunk_translated_added_ms": "by how much a translated chunk comes later, ms",
    "late_modes_cpu_ratio": "Envoy + no-op CPU per request without a body, answer's messages switched on by the reply ÷ from the start",
    **{
        f"limits_redis_{fault}_{what}": f"Redis {fault.replace('_', ' ')} under load: {means}"
        for fault in ("restarted", "flushed", "paused", "failed_over")
        for what, means in (("errors", "errors that clients saw"), ("admitted", "requests admitted ÷ limit"))
    },
    "scrape_s": "a scrape of 100,000 series beside decisions, s",
}


def machine() -> dict[str, object]:
    """Describe the machine."""
    cpus = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_1m": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Return the versions of all programs."""
    envoy, go = find_envoy(), shutil.which("go")
    found = {name: importlib.metadata.version(name) for name in ("din-extproc", "grpcio", "protobuf", "uvloop", "hiredis", "msgspec")}
    done = subprocess.run([redis_binary("valkey8"), "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    return {
        **found,
        "python": platform.python_version(),
        "envoy": read_envoy_version(envoy) if envoy is not None else "none",
        "redis": done.strip().partition(" sha=")[0],
        "go": subprocess.run([go, "version"], capture_output=True, text=True, timeout=20, check=True).stdout.split()[2] if go else "none",
        LITELLM: python_version_of(LITELLM),
        VLLM_ROUTER: python_version_of(VLLM_ROUTER),
        **{source.repository: source.commit[:12] for source in PROGRAMS.values()},
    }


def markdown(figures: Figures, missing: dict[str, str], on: dict[str, object], of: dict[str, str]) -> str:
    """Return the tables as Markdown."""
    done = (
        f"Measured by `make bench` on {on['cores']} cores of {on['cpu']}, {on['memory_gb']} GB, {on['system']}; Envoy {of['envoy']} "
        f"`--concurrency 1`, {of['redis']}, Python {of['python']}, grpcio {of['grpcio']}. 16 connections, 1.3 kB chat body, medians of "
        "interleaved rounds; CPU by the kernel's count."
    )
    lines = [
        done,
        "",
        *_contenders(figures, missing),
        "",
        "| figure | measured | bar | dream |",
        "|---|---|---|---|",
        *(_row(bar, figures) for bar in BARS),
        *(f"| {means} | {_number(figures[name])} | | |" for name, means in CAPTIONS.items() if name in figures),
    ]
    return "\n".join(lines)


def costs(figures: Figures) -> str:
    """What a request costs besides the way through Envoy, part by part: of the benchmarks `tenants`, `accounting` and `screening`."""
    admission = [
        (f"reserved, released and settled, with {many}", f"admit_sidecar_us_{size}_tenants", f"admit_redis_us_{size}_tenants", 1.0)
        for size, many in (("1", "1 tenant"), ("100", "100 tenants"), ("100k", "100,000 tenants"))
    ]
    rows = (
        *admission,
        ("accounts of a finished exchange: metrics, audit record, log line", "account_us", "", 1.0),
        ("spans, of one that leaves any", "account_span_us", "", 1.0),
        ("looking for sensitive data in a clean prompt of 1 kB", "screen_1kb_us", "", 1.0),
        ("the same, 1 MB", "screen_1mb_ms", "", 1e3),
        ("the same, 1 MB that is full of what looks so", "screen_1mb_dearest_ms", "", 1e3),
    )
    lines = ["| CPU per request, µs | sidecar | Redis |", "|---|---|---|"]
    for means, here, there, scale in rows:
        lines.append(f"| {means} | {_number(figures[here] * scale)} | {_number(figures[there]) if there else ''} |")
    return "\n".join(lines)


def _contenders(figures: Figures, missing: dict[str, str]) -> list[str]:
    rows = [
        "| CPU per request, µs | Envoy | ext_proc server | rate limiter | Redis | sum | sum, light | requests/s |",
        "|---" * 8 + "|",
    ]
    for name, title in (TITLES | GO_TITLES).items():
        rate = figures.get(f"requests_per_s_{name}")
        if rate is None:
            rows.append(f"| {title} | {missing.get(name, 'not measured')} | | | | | | |")
            continue
        parts = ("envoy", "gateway"), ("server",), ("limiter",), ("redis",)
        cells = [_cell(figures, name, *either) for either in parts]
        cells += [f"{sum(figures.get(f'cpu_us_{name}_{part}', 0) for either in parts for part in either):,.0f}"]
        cells += [_number(figures[f"cpu_us_{name}_light"]) if f"cpu_us_{name}_light" in figures else ""]
        rows.append(f"| {title} | {' | '.join(cells)} | {rate:,.0f} |")
    return rows


def _cell(figures: Figures, name: str, *parts: str) -> str:
    found = [figures[f"cpu_us_{name}_{part}"] for part in parts if f"cpu_us_{name}_{part}" in figures]
    return f"{found[0]:,.0f}" if found else ""


def _row(bar: Bar, figures: Figures) -> str:
    sign = "≤" if bar.at_most else "≥"
    figure = figures.get(bar.name)
    measured = "not measured" if figure is None else _number(figure) + _spread(bar.name, figures) + _mark(bar, figure)
    return f"| {bar.means} | {measured} | {sign} {bar.bar:g} | {sign} {bar.dream:g} |"


def _spread(name: str, figures: Figures) -> str:
    """Return the measured range of a figure, if there is one."""
    bounds = [figures[f"{name}_{end}"] for end in ("lowest", "highest") if f"{name}_{end}" in figures]
    return f" ({' to '.join(map(_number, bounds))})" if bounds else ""


def _mark(bar: Bar, figure: float) -> str:
    if bar.met(figure, bar.dream):
        return " ★"
    return "" if bar.met(figure, bar.bar) else " ✗"


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def rewrite_page(name: str, text: str) -> bool:
    """Replace the text between the page's markers of this name. False: it has none."""
    content = PAGE.read_text(encoding="utf-8")
    before, begin, rest = content.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not begin or not end:
        return False
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
    return True
