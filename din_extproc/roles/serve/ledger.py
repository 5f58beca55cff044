"""Builds the rate-limit counters that all replicas share.

Rule: all counting goes through the outage policy (`GuardedLedger`).
"""

import os
import socket

from din_extproc.admit.local import LocalLedger
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.redis.budgets import TOP_UP
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.cluster import ClusterLinks
from din_extproc.edge.redis.guard import PRESENCE, GuardedLedger, OnError
from din_extproc.edge.redis.ledger import SCRIPTS, RedisLedger
from din_extproc.edge.redis.link import Link
from din_extproc.edge.redis.nodes import NODE_SCRIPTS
from din_extproc.edge.redis.prober import PROBER
from din_extproc.edge.redis.topology import make_carrier
from din_extproc.edge.redis.usage import USAGE
from din_extproc.settings.settings import Settings


def replica_name() -> str:
    """Return this process's name among all that share one Redis."""
    return f"{socket.gethostname()}:{os.getpid()}"


def make_ledger(settings: Settings, *, decides: bool) -> tuple[Link | ClusterLinks, GuardedLedger]:
    """Return the Redis link and the guarded counters. `decides`: whether this process takes a share of the limits."""
    store = settings.store
    link = make_carrier(
        store.url.get_secret_value(), (*SCRIPTS, PRESENCE, PROBER, USAGE, TOP_UP, *NODE_SCRIPTS), timeout_ms=store.timeout_ms
    )
    shared, local = RedisLedger(link, names=Names(settings.network, store.one_slot)), LocalLedger(SystemClock.monotonic_ms)
    name, workers = replica_name(), settings.gateway.workers
    return link, GuardedLedger(
        runner=link,
        shared=shared,
        local=local,
        on_error=OnError(store.on_error),
        replica=name,
        network=settings.network,
        workers=workers,
        decides=decides,
    )
