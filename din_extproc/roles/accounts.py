"""Who hears of requests in the process that keeps the accounts, and what it makes of them: metrics, the usage by day and the audit log.

Rule: hearing costs microseconds and never fails; whatever takes longer, or touches a file or the network, is done later, in slices.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from din_extproc.audit.records import Event
from din_extproc.domain.usage import ExchangeRecord
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.counters import Counters
from din_extproc.edge.redis.ledger import Runner
from din_extproc.observe.exchange_metrics import ExchangeMetrics
from din_extproc.observe.families import Family
from din_extproc.observe.recent import Recent
from din_extproc.registry.table import Event as NodeEvent
from din_extproc.roles.auditor import Auditor
from din_extproc.roles.standing import audit_families
from din_extproc.roles.usage import UsageKeeper
from din_extproc.settings.settings import Settings

_SAY_S = 1.0


class Accounts:
    """The observer of one sidecar.

    Args:
        settings: The configuration.
        link: What carries commands to Redis.
        counters: The numbers of the admin page.
        standing: How everything else stands, as families.
        shut: Told when requests may not be taken because they can't be recorded (True), and when they may again (False).
    """

    def __init__(
        self, settings: Settings, link: Runner, counters: Counters, standing: Callable[[], Iterator[Family]], shut: Callable[[bool], None]
    ) -> None:
        self._counters = counters
        self._standing = standing
        self._metrics = ExchangeMetrics()
        self._usage = UsageKeeper(link, settings.network)
        self.recent = Recent()
        """The last minutes, for who watches."""
        self._auditor = None if settings.audit is None else Auditor(settings.audit, settings.network, shut)

    def start(self, background: Background) -> None:
        """Begin to write.

        Raises:
            OSError: the audit log's folder can't be used.
        """
        background.every(_SAY_S, "telling what tenants used", self._usage.say)
        if self._auditor is not None:
            self._auditor.start(background)

    async def stop(self) -> None:
        """Write the rest."""
        await self._usage.say()
        if self._auditor is not None:
            await self._auditor.stop()

    def use(self, settings: Settings) -> None:
        """Another configuration is in use."""
        if self._auditor is not None:
            self._auditor.use(settings)

    def admitted(self, records: Iterable[Any]) -> None:
        """Requests were sent on."""
        if self._auditor is not None:
            self._auditor.admitted(records)

    def finished(self, record: ExchangeRecord) -> None:
        """An exchange is over."""
        self._counters.finished(record)
        self._metrics.finished(record)
        self._usage.finished(record)
        self.recent.finished(record, SystemClock.monotonic())
        if self._auditor is not None:
            self._auditor.finished(record)

    def nodes(self, events: list[NodeEvent]) -> None:
        """Nodes came, changed or went."""
        if self._auditor is not None:
            self._auditor.nodes(events)

    def note(self, event: Event) -> None:
        """Something else that is to be recorded."""
        if self._auditor is not None:
            self._auditor.note(event)

    def families(self) -> Iterator[Family]:
        """All metrics, as they are now."""
        yield from self._standing()
        yield from self._metrics.families()
        if self._auditor is not None:
            yield from audit_families(self._auditor.shown())

    def shown(self) -> dict[str, object]:
        """For the admin page."""
        return {} if self._auditor is None else {"audit": self._auditor.shown()}
