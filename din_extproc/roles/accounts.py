"""Who hears of finished exchanges in the process that keeps the accounts, and what it makes of them: metrics.

Rule: hearing costs microseconds and never fails; whatever takes longer, or touches a file or the network, is done later, in slices.
"""

from collections.abc import Callable, Iterator

from din_extproc.domain.usage import ExchangeRecord
from din_extproc.edge.counters import Counters
from din_extproc.observe.exchange_metrics import ExchangeMetrics
from din_extproc.observe.families import Family


class Accounts:
    """The observer of one sidecar.

    Args:
        counters: The numbers of the admin page.
        standing: How everything else stands, as families.
    """

    def __init__(self, counters: Counters, standing: Callable[[], Iterator[Family]]) -> None:
        self._counters = counters
        self._standing = standing
        self._metrics = ExchangeMetrics()

    def finished(self, record: ExchangeRecord) -> None:
        """An exchange is over."""
        self._counters.finished(record)
        self._metrics.finished(record)

    def families(self) -> Iterator[Family]:
        """All metrics, as they are now."""
        yield from self._standing()
        yield from self._metrics.families()
