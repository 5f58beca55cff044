"""Data of the dashboard, as it is sent to the page.

Rule: names of the operator's, numbers, codes and trace ids; what is not known is left out.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.observe.recent import RecentEvent, TrafficStats
from din_extproc.observe.timelines import TimelineData


class BreakerView(Struct, frozen=True, omit_defaults=True):
    """The state and reason of a breaker that is not closed, and the result of the last probe."""

    state: str = "closed"
    share: float = 1.0
    """Share of its requests that it gets, 0 to 1."""
    reason: str = ""
    probe: str = ""
    """Reason why the last probe failed."""
    ttft_ms: int | None = None
    """Of the last probe."""


class NodeRow(Struct, frozen=True, omit_defaults=True):
    """One node."""

    id: str
    pools: tuple[str, ...]
    state: str
    trust: float
    model: str
    version: str
    dtype: str
    engine: str
    slots: int
    waiting: int | None = None
    running: int | None = None
    kv: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    silence_s: int = 0
    reason: str = ""
    ttft: tuple[int | None, ...] = ()
    """Milliseconds to the first token, one point per `step_s`, the newest last."""
    breaker: BreakerView | None = None


class PoolRow(Struct, frozen=True, omit_defaults=True):
    """One pool."""

    name: str
    model: str
    engine: str
    scheduler: str
    breaker: BreakerView | None = None


class TenantRow(Struct, frozen=True, omit_defaults=True):
    """One tenant: what all replicas have counted against its limits, and its last minute through this sidecar."""

    id: str
    here: TrafficStats
    requests: int | None = None
    """In the limits' window; None: the counters can't be asked."""
    rpm: int | None = None
    tokens: int | None = None
    tpm: int | None = None
    streams: int | None = None
    max_streams: int | None = None
    waiting: int = 0
    cost: str = ""
    """Of today (UTC), with what smaller models saved; "" without prices."""


class DashboardData(Struct, frozen=True):
    """Everything, at one moment."""

    at: float
    step_s: int
    window_s: int
    network: str
    configuration: str
    problems: tuple[str, ...]
    open: int
    decisions: Mapping[str, int]
    pools: tuple[PoolRow, ...]
    nodes: tuple[NodeRow, ...]
    rules: Mapping[str, TrafficStats]
    aliases: Mapping[str, TrafficStats]
    tenants: tuple[TenantRow, ...]
    events: tuple[RecentEvent, ...]
    """The newest first."""
    timelines: TimelineData | None
    """None in a change: as before."""


class DashboardChange(Struct, frozen=True):
    """The difference between a dashboard and the previous one."""

    board: DashboardData
    """Without nodes."""
    nodes: tuple[NodeRow, ...]
    """New ones, and those that are not as they were."""
    gone: tuple[str, ...]


def diff_dashboards(before: DashboardData, board: DashboardData) -> DashboardChange:
    """Return the change that turns the page from `before` to `board`."""
    old = {row.id: row for row in before.nodes}
    changed = tuple(row for row in board.nodes if old.get(row.id) != row)
    gone = tuple(old.keys() - {row.id for row in board.nodes})
    timelines = None if board.timelines == before.timelines else board.timelines
    return DashboardChange(replace(board, nodes=(), timelines=timelines), changed, gone)
