"""The data of the dashboard: pools, nodes, traffic, tenants and recent refusals, built once for all viewers.

Rule: read only, bounded, without secrets; rows of many nodes are built in slices so that requests go first.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec.structs import replace

from din_extproc.edge.clock import SystemClock
from din_extproc.edge.http.dashboard import DashboardPages
from din_extproc.edge.registry.forms import HealthForm, MemberForm
from din_extproc.observe.dashboard_data import BreakerView, DashboardData, NodeRow, PoolRow, TenantRow
from din_extproc.observe.recent import WINDOW_S, Recent, TrafficStats
from din_extproc.observe.timelines import STEP_S
from din_extproc.roles.serve.config_reloader import ConfigReloader

_SLICE = 50
_OLD_S = 5
"""Heartbeat age from which on a node is reported."""


class DashboardBuilder:
    """Builds the data of the dashboard.

    Args:
        reloader: Holds the configuration in use.
        status: Returns the status page without nodes.
        nodes: Returns the nodes page.
        unready: Returns the reasons why the sidecar is not ready.
        tenants: Returns the tenants page, with "" for all tenants.
        recent: Statistics of the last minutes.
    """

    def __init__(
        self,
        reloader: ConfigReloader,
        status: Callable[[], dict[str, Any]],
        nodes: Callable[[], dict[str, Any]],
        unready: Callable[[], list[str]],
        tenants: Callable[[str], Awaitable[dict[str, Any]]],
        recent: Recent,
    ) -> None:
        self._reloader = reloader
        self._status = status
        self._nodes = nodes
        self._unready = unready
        self._tenants = tenants
        self._recent = recent
        self.pages = DashboardPages(self._owner, self.build)

    def _owner(self, authorization: str) -> str | None:
        """Return the id of the dashboard key, by the configuration in use."""
        section = self._reloader.settings.gateway.dashboard
        return None if section is None else section.owner(authorization)

    async def build(self) -> DashboardData:
        """Build the current data."""
        settings, status, members = self._reloader.settings, self._status(), self._nodes()
        now = SystemClock.monotonic()
        traffic = self._recent.get_traffic(now)
        tenants = (await self._tenants(""))["tenants"]
        breakers = status["breakers"].get("pools", {})
        rows: list[NodeRow] = []
        for at, member in enumerate(members["nodes"]):
            if at % _SLICE == 0:
                await asyncio.sleep(0)
            rows.append(_row(member, self._recent.get_first_tokens(member.node.id, now)))
        return DashboardData(
            at=SystemClock().wall(),
            step_s=STEP_S,
            window_s=WINDOW_S,
            network=members["network"],
            configuration=settings.fingerprint,
            problems=tuple(_problems(status, self._unready(), stale=members["stale"])),
            open=status["exchanges"].get("open", 0),
            decisions={"sent": status["counts"]["sent"], "refused": sum(status["counts"]["refused"].values())},
            pools=tuple(
                PoolRow(pool.name, pool.model, pool.engine, pool.scheduler, _breaker(breakers.get(pool.name))) for pool in settings.pools
            ),
            nodes=tuple(rows),
            rules=traffic["rules"],
            aliases=traffic["aliases"],
            tenants=tuple(_tenant(row, traffic["tenants"]) for row in tenants),
            events=tuple(reversed(self._recent.events)),
            timelines=self._recent.get_timelines(now),
        )


def _row(member: MemberForm, ttft: tuple[int | None, ...]) -> NodeRow:
    node, beat = member.node, member.beat
    silence = 0 if member.beat_age_s is None or member.beat_age_s < _OLD_S else int(member.beat_age_s)
    row = NodeRow(
        id=node.id,
        pools=member.pools or ((node.pool,) if node.pool else ()),
        state=member.state.value,
        trust=round(member.trust, 2),
        model=node.model,
        version=node.version,
        dtype=node.dtype,
        engine=node.engine,
        slots=node.max_concurrency,
        silence_s=silence,
        reason=member.reasons[-1] if member.reasons else "",
        ttft=ttft,
        breaker=_breaker(member.health),
    )
    if beat is None:
        return row
    kv = None if beat.kv_cache_usage is None else round(beat.kv_cache_usage, 2)
    return replace(row, waiting=beat.waiting, running=beat.running, kv=kv)


def _breaker(health: HealthForm | None) -> BreakerView | None:
    if health is None:
        return None
    ttft_ms = None if health.ttft_ms is None else round(health.ttft_ms)
    return BreakerView(health.state.value, round(health.share, 2), health.reason, health.probe, ttft_ms)


def _problems(status: Mapping[str, Any], unready: list[str], *, stale: bool) -> list[str]:
    """Yield the problems that need attention, in words."""
    problems = [f"not ready: {reason}" for reason in unready]
    if not status["redis"].up:
        problems.append("Redis can't be reached: limits follow `on_error`")
    if stale:
        problems.append("the node table is stale: Redis can't be reached")
    if status["configuration"]["rejected_successor"]:
        problems.append("a changed configuration was rejected: see /status")
    dropped = status["access_logs"]["dropped"]
    if dropped:
        problems.append(f"Envoy has dropped {dropped} access log entries")
    return problems


def _tenant(row: Mapping[str, Any], here: Mapping[str, TrafficStats]) -> TenantRow:
    counted = {name: row[name] for name in ("requests", "rpm", "tokens", "tpm", "streams", "max_streams", "waiting", "cost")}
    return TenantRow(row["tenant"], here.get(row["tenant"], TrafficStats()), **counted)
