"""Measure everything, side by side. `python -m tests.bench [--json FILE] [--smoke] [NAME...]`; `claims`: what the papers' page is made of.

Rule: a benchmark that fails is named, the others go on, and the exit code is 1.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.bench import (
    accounting,
    adapters,
    bodies,
    budgets,
    calibrate,
    claims,
    costly_bodies,
    discovery,
    estimate_error,
    growth,
    heartbeats,
    hosted,
    late_modes,
    limits,
    open_streams,
    prefixes,
    report,
    screening,
    side_by_side,
    stall,
    strategies,
    translation,
    virtual,
)
from tests.bench.field import SMOKE, Effort, Field, Figures
from tests.bench.vocabularies import NAMES


def estimate(field: Field) -> Figures:
    """Measure error and speed of the token estimate."""
    return estimate_error.measure(field.effort.tokenizers or NAMES)


BENCHMARKS: dict[str, tuple[Callable[[Field], Figures], tuple[str, ...]]] = {
    "side_by_side": (
        side_by_side.side_by_side,
        ("sidecar_cpu_vs_grpc_aio_noop", "sidecar_cpu_vs_wire_noop", "throughput_vs_wire_noop"),
    ),
    "light": (side_by_side.light, ("cpu_us_everything_on_light",)),
    "beside_aibrix": (side_by_side.beside_aibrix, ("added_p99_ms_200", "decision_p99_ms_200")),
    "half_load": (side_by_side.half_load, ("added_p99_ms_half_load", "decision_p99_ms_half_load")),
    "bodies": (bodies.bodies, ("body_1mb_sidecar_ms", "body_1kb_sidecar_ms")),
    "costly_bodies": (costly_bodies.costly_bodies, ("dearest_body_vs_chat",)),
    "streams": (bodies.streams, ("chunk_envoy_cpu_lua_vs_none",)),
    "translation": (translation.translation, ("chunk_cpu_translated_vs_passed", "chunk_translated_added_ms")),
    "late_modes": (late_modes.late_modes, ("late_modes_cpu_ratio",)),
    "hosted": (hosted.hosted, ("stack_cpu_hosted_vs_local",)),
    "nodes": (growth.nodes, ("decision_10k_nodes_vs_10",)),
    "rules": (growth.rules, ("decision_1k_rules_vs_10",)),
    "tenants": (growth.tenants, ("admit_100k_tenants_vs_10",)),
    "budgets": (
        budgets.budgets,
        ("admit_sidecar_budgets_two_vs_none", "admit_redis_budgets_two_vs_none", "admit_redis_budgets_of_others_vs_none"),
    ),
    "limits": (
        limits.limits,
        (
            "limits_held_requests",
            "limits_held_tokens",
            "limits_held_peak",
            "limits_leaked",
        ),
    ),
    "discovery": (discovery.discovery, ("xds_change_10k_nodes_ms", "xds_change_10k_nodes_built_ms")),
    "heartbeats": (heartbeats.heartbeats, ("heartbeat_cpu_10k_nodes_vs_100", "decision_beside_10k_beating_nodes_vs_100")),
    "accounting": (accounting.accounting, ("account_us", "decision_p99_beside_a_scrape_vs_alone")),
    "open_streams": (open_streams.open_streams, ("sidecar_bytes_per_open_stream",)),
    "screening": (screening.screening, ("screen_1kb_us", "screen_1mb_ms", "screen_1mb_dearest_ms", "screen_1mb_vs_128kb")),
    "stall": (stall.stall, ("stall_errors_probes_2", "stall_errors_breaker_2")),
    "ramp": (stall.ramp, ("ramp_worst_deviation",)),
    "strategies": (strategies.strategies, ("token_available_vs_round_robin", "best_strategy_vs_round_robin")),
    "prefixes": (prefixes.prefixes, ("prefix_affinity_first_token_vs_round_robin",)),
    "adapters": (adapters.adapters, ("adapters_loaded_share", "adapters_loaded_share_round_robin", "adapters_moving_failed")),
    "baseline": (claims.baseline, ("baseline_ratio",)),
    "shipped_rules": (claims.shipped_rules, ("shipped_light_off_big", "shipped_utilisation")),
    "virtual": (virtual.virtual, ("simulate_1k_nodes_hour_s", "simulated_requests_per_s")),
    "calibrate": (calibrate.calibrate, ("calibrate_worst_error",)),
    "estimate": (estimate, ("estimate_32k_time_vs_tokenizer", "estimate_error_p95")),
}
"""The benchmarks, each with the figures that it has to return."""
LONG = ("limits", "stall", "ramp", "baseline", "shipped_rules", "virtual", "calibrate")
"""Benchmarks that run only by name or with the whole list: together they double the time."""
CLAIMS = "claims"
"""The name for the benchmarks of the papers' claims."""
PAGES: tuple[tuple[str, tuple[str, ...], Callable[[Figures], str]], ...] = (
    (report.STALL, ("stall",), stall.table),
    (report.STRATEGIES, ("strategies",), strategies.table),
    (report.CALIBRATE, ("calibrate",), calibrate.table),
    (report.COSTS, ("tenants", "accounting", "screening"), report.costs),
    (report.CLAIMS, claims.PARTS, claims.table),
)
"""Tables of the performance page: their marker, and the benchmarks that they need."""


def main() -> int:
    """Run the requested benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure everything, side by side.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}, {CLAIMS} (all but the long ones)")
    parser.add_argument("--all", action="store_true", help=f"the long ones, too: {', '.join(each for each in BENCHMARKS if each in LONG)}")
    parser.add_argument("--json", type=Path, help="write machine, versions and figures to this file")
    parser.add_argument("--smoke", action="store_true", help="every benchmark once, briefly: do they still run?")
    given = parser.parse_args()
    asked = [name for each in given.names for name in (claims.PARTS if each == CLAIMS else (each,))]
    unknown = set(asked) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    os.environ["PYTHONPATH"] = str(report.ROOT)  # for the children
    names = list(dict.fromkeys(asked)) or [each for each in BENCHMARKS if given.all or given.smoke or each not in LONG]
    figures: Figures = {}
    on, of = report.machine(), report.versions()
    with Field(SMOKE if given.smoke else Effort()) as field:
        failed = [name for name in names if not _run(name, field, figures)]
        missing = field.missing
    tables = report.markdown(figures, missing, on, of)
    print(f"\n{tables}\n")
    if given.json:
        given.json.write_text(json.dumps({"machine": on, "versions": of, "figures": figures, "missing": missing}, indent=2) + "\n")
    if not (given.smoke or given.names or failed) and report.rewrite_page(report.BENCH, tables):
        print("the table of the performance page is up to date")
    for marker, parts, table in PAGES:
        if set(parts) <= set(names) and not set(parts) & set(failed):
            print(f"\n{table(figures)}")
            if not given.smoke:
                report.rewrite_page(marker, table(figures))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, field: Field, figures: Figures) -> bool:
    """Run one benchmark. False: it failed, or did not return all its figures."""
    measure, owed = BENCHMARKS[name]
    began = time.monotonic()
    try:
        found = measure(field)
    except Exception:  # noqa: BLE001 - printed with its traceback; the next benchmark may still work
        traceback.print_exc()
        return False
    absent = [figure for figure in owed if figure not in found]
    if absent:
        print(f"{name}: no figure {', '.join(absent)}", file=sys.stderr)
        return False
    figures |= found
    summary = ", ".join(f"{figure} {found[figure]:.3g}" for figure in owed)
    print(f"{name:13} {time.monotonic() - began:6.1f} s  {summary}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
