"""Where the requests of one process wait for tokens and slots, and what wakes them.

Rule: nothing is listened to as long as no tenant's requests may wait.
"""

from din_extproc.admit.queue import QueueState
from din_extproc.edge.admission_queue import AdmissionQueue
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.redis.guard import GuardedLedger
from din_extproc.edge.redis.ledger import Names, Runner
from din_extproc.edge.redis.subscription import ChannelSubscription
from din_extproc.edge.redis.topology import locator
from din_extproc.edge.redis.wakeup_channel import RedisWakeupChannel
from din_extproc.settings.settings import Settings


class WorkerQueue:
    """The waiting room and its bell.

    Args:
        settings: The configuration.
        link: What carries commands to Redis.
        ledger: The counters.
        background: Runs what listens.
    """

    def __init__(self, settings: Settings, link: Runner, ledger: GuardedLedger, background: Background) -> None:
        names = Names(settings.network, settings.store.one_slot)
        bell = RedisWakeupChannel(link, names)
        self.room = AdmissionQueue(
            ledger=ledger,
            bell=bell,
            shared=lambda: ledger.state.shared,
            now_ms=SystemClock.monotonic_ms,
            start=background.start,
            queue=QueueState(),
        )
        locate = locator(settings.store.url.get_secret_value())
        heard = bell.heard(self.room.ring, self.room.granted_elsewhere)
        self._subscription = ChannelSubscription(locate, names.channel, heard, self.room.ring_for_everybody)
        self._background = background
        self._listening = False

    def reload(self, settings: Settings) -> None:
        """Listen from now on, if somebody may have to wait under this configuration."""
        if not self._listening and any(tenant.queueing.max_wait_ms for tenant in settings.tenants):
            self._listening = True
            self._background.run("hearing what comes back", self._subscription.run())
