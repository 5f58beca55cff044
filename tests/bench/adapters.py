"""Requests for adapters (LoRA), twice as many as fit, in virtual time: how many meet a loaded one."""

from tests.bench.field import Field, Figures
from tests.support.adapter_fleet import FleetSpec, play, round_robin


def adapters(field: Field) -> Figures:
    """The share of requests that meet a loaded adapter, placed by adapter and in turn, and requests that failed while adapters moved."""
    spec = FleetSpec(zipf=1.5, requests=min(20_000, int(100 * field.effort.virtual_seconds)))
    moving = play(FleetSpec(zipf=spec.zipf, requests=spec.requests, changes_per_s=5.0))
    return {
        "adapters_loaded_share": play(spec).loaded,
        "adapters_loaded_share_round_robin": play(spec, round_robin(spec)).loaded,
        "adapters_moving_failed": float(moving.failed),
    }
