"""The admin port of a sidecar: status, nodes, tenants, metrics and dashboard.

Rule: numbers are the sums over all processes of the sidecar; no state is kept here.
"""

from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.availability import ModelAvailability
from din_extproc.edge.http.admin import AdminPages
from din_extproc.edge.http.budget_orders import BudgetOrders
from din_extproc.edge.http.node_orders import NodeOrder, NodeOrders
from din_extproc.edge.redis.cluster import ClusterLinks
from din_extproc.edge.redis.guard import GuardedLedger
from din_extproc.edge.redis.link import Link
from din_extproc.observe.exposition import render_slices
from din_extproc.observe.families import Family
from din_extproc.roles.operate.tenants import TenantsPage
from din_extproc.roles.serve.accounting_service import AccountingService
from din_extproc.roles.serve.config_reloader import ConfigReloader
from din_extproc.roles.serve.dashboard_builder import DashboardBuilder
from din_extproc.roles.serve.state_metrics import node_families, request_families, state_families
from din_extproc.settings.settings import Settings
from din_extproc.settings.tls import secured


class AdminServer:
    """The admin port. Call `start`, and `stop` at the end.

    Args:
        reloader: Holds the configuration in use.
        link: Runs Redis commands.
        ledger: The rate-limit counters.
        accounting: The accounting service, which knows the nodes.
        numbers: Returns the sum of the numbers of all processes.
        unready: Returns the reasons why the sidecar is not ready.
    """

    def __init__(
        self,
        reloader: ConfigReloader,
        link: Link | ClusterLinks,
        ledger: GuardedLedger,
        accounting: AccountingService,
        numbers: Callable[[], dict[str, Any]],
        unready: Callable[[], list[str]],
    ) -> None:
        self._reloader = reloader
        self._link = link
        self._ledger = ledger
        self._accounting = accounting
        self._numbers = numbers
        self._unready = unready
        self._tenants_page = TenantsPage(reloader.settings, link)
        self._dashboard = None
        if reloader.settings.gateway.dashboard is not None:
            self._dashboard = DashboardBuilder(
                reloader=reloader,
                status=self._collect_status,
                nodes=self._collect_nodes,
                unready=unready,
                tenants=self._collect_tenants,
                recent=accounting.observers.recent,
            ).pages
        self._port = AdminPages(
            status=self._get_status,
            reasons=unready,
            nodes=self._collect_nodes,
            availability=self._get_availability,
            tenants=self._collect_tenants,
            budgets=self._collect_budgets,
            metrics=self._collect_metrics,
            times=accounting.observers.recent.get_times,
            orders=NodeOrders(reloader.operator, self._apply_order),
            budget_orders=BudgetOrders(reloader.operator, accounting.observers.budgets.apply_order),
            opens=reloader.is_reader,
            dashboard=self._dashboard,
            exposed=not ip_address(reloader.settings.gateway.admin.address.host).is_loopback,
        ).port

    async def start(self, settings: Settings) -> None:
        """Open the port.

        Raises:
            OSError: its address is taken.
        """
        await self._port.start(secured(str(settings.gateway.admin.address), settings.gateway.admin.tls, settings.folder))

    async def stop(self) -> None:
        """Close the port and the streams of open dashboards."""
        if self._dashboard is not None:
            self._dashboard.close()
        await self._port.stop()

    def collect_state_metrics(self) -> Iterator[Family | None]:
        """Yield the state of the sidecar as metrics; None lets other tasks run."""
        status = self._collect_status()
        yield from request_families(status)
        yield from state_families(status, ready=not self._unready())
        yield from node_families(self._accounting.get_rows(self._reloader.settings), stale=self._accounting.stale)

    def _collect_metrics(self) -> Iterator[bytes]:
        return render_slices(self._accounting.observers.collect_families())

    def _get_status(self) -> dict[str, object]:
        return {**self._collect_status(), "membership": self._collect_nodes()}

    def _collect_nodes(self) -> dict[str, Any]:
        settings = self._reloader.settings
        return {
            "network": settings.network,
            "stale": self._accounting.stale,
            "nodes": list(self._accounting.get_rows(settings)),
            "models": self._accounting.get_availability(settings),
        }

    def _get_availability(self, name: str) -> tuple[ModelAvailability, ...] | None:
        """Return the capacity of every model (""), or of those behind a name; None: the name is unknown."""
        settings = self._reloader.settings
        found = self._accounting.get_availability(settings)
        if not name:
            return found
        models = {rule.pool.model for rule in settings.routes.rules_for(name)}
        return tuple(each for each in found if each.model in models) or None

    async def _apply_order(self, order: NodeOrder, node_id: str, operator: str, reason: str) -> str | None:
        return await self._accounting.apply_order(self._reloader.settings, order, node_id, operator, reason)

    async def _collect_tenants(self, tenant: str) -> dict[str, Any]:
        waiting = self._numbers().get("queue", {}).get("by_tenant", {})
        return await self._tenants_page.build_page(self._reloader.settings, tenant, waiting)

    async def _collect_budgets(self, tenant: str) -> dict[str, Any]:
        try:
            return {"stale": False, "budgets": await self._accounting.observers.budgets.collect_rows(tenant)}
        except LimitsUnavailable:
            return {"stale": True, "budgets": []}

    def _collect_status(self) -> dict[str, Any]:
        """Return the status page without its nodes."""
        settings = self._reloader.settings
        return {
            "configuration": {"file": settings.file, "fingerprint": settings.fingerprint, "rejected_successor": self._reloader.problem},
            "limits": self._ledger.state,
            "redis": self._link.state,
            **self._accounting.snapshot(),
            **self._numbers(),
        }
