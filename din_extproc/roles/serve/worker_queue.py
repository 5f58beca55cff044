"""The admission queue of a worker, and the channel that wakes it.

Rule: the channel is subscribed to only if the requests of some tenant may wait.
"""

from din_extproc.admit.queue import QueueState
from din_extproc.edge.admission_queue import AdmissionQueue
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.guard import GuardedLedger
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.subscription import ChannelSubscription
from din_extproc.edge.redis.topology import make_locator
from din_extproc.edge.redis.wakeup_channel import RedisWakeupChannel
from din_extproc.settings.settings import Settings


class WorkerQueue:
    """The admission queue of one worker.

    Args:
        settings: The configuration.
        link: Runs Redis commands.
        ledger: The rate-limit counters.
        background: Runs the subscription.
    """

    def __init__(self, settings: Settings, link: Runner, ledger: GuardedLedger, background: Background) -> None:
        names = Names(settings.network, settings.store.one_slot)
        channel = RedisWakeupChannel(link, names)
        self.queue = AdmissionQueue(
            ledger=ledger,
            wakeups=channel,
            shared=lambda: ledger.state.shared,
            now_ms=SystemClock.monotonic_ms,
            start=background.start,
            queue=QueueState(),
        )
        locate = make_locator(settings.store.url.get_secret_value())
        on_message = channel.make_listener(self.queue.on_freed, self.queue.on_remote_grant)
        self._subscription = ChannelSubscription(locate, names.channel, on_message, self.queue.on_any_freed)
        self._background = background
        self._listening = False

    def reload(self, settings: Settings) -> None:
        """Subscribe to wake-ups if requests may wait under this configuration."""
        if not self._listening and settings.longest_wait_ms:
            self._listening = True
            self._background.run("receiving wake-ups", self._subscription.run())
