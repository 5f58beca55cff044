"""The role `drain`: an Envoy that has to go takes no more connections and ends what it has.

Rule: it is over when no port is open and nothing is in flight, not when a time is over; the time only bounds it. Ports close when load
balancers have heard that this Envoy goes, or whoever still comes would be refused.
"""

import time

from din_extproc.domain.node import Endpoint
from din_extproc.edge.probe.envoy_admin import EnvoyAdmin, EnvoyAdminUnreachable

IN_FLIGHT = r"^http\.din\.downstream_rq_active$"
_LOOK_S = 0.25
_CLOSING_S = 2.0
"""Threads take a moment to close their ports."""


class StillOpen(EnvoyAdminUnreachable):
    """Envoy answers and does not do what it was told."""


def drain(address: Endpoint, at_least_s: float, at_most_s: float) -> int:
    """Drain the Envoy whose administration listens there. Returns how many requests were still in flight at the end.

    Args:
        address: Of the administration.
        at_least_s: So long connections are still taken, although health checks fail: until load balancers have heard that it goes.
        at_most_s: After that, whatever is in flight.

    Raises:
        Silent: nobody answers there.
        StillOpen: it does not close its ports.
    """
    admin = EnvoyAdmin(address)
    admin.say_goodbye()
    began = time.monotonic()
    time.sleep(min(at_least_s, at_most_s))
    admin.close()
    while True:
        closed = admin.closed()  # before: what came through an open port is counted afterwards
        open_requests = sum(admin.stats(IN_FLIGHT).values())
        passed = time.monotonic() - began
        if closed and (not open_requests or passed >= at_most_s):
            return open_requests
        if passed >= at_most_s + _CLOSING_S:
            raise StillOpen(f"Envoy at {address} was told to take no more connections, and still does")
        time.sleep(_LOOK_S)
