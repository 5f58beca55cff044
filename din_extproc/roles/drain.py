"""The role `drain`: an Envoy that has to go takes no more connections and ends what it has.

Rule: it is over when nothing is in flight, not when a time is over; the time only bounds it.
"""

import time

from din_extproc.domain.node import Endpoint
from din_extproc.edge.probe.envoy_admin import EnvoyAdmin

IN_FLIGHT = r"^http\.din\.downstream_rq_active$"
_LOOK_S = 0.25


def drain(address: Endpoint, at_least_s: float, at_most_s: float) -> int:
    """Drain the Envoy whose administration listens there. Returns how many requests were still in flight at the end.

    Args:
        address: Of the administration.
        at_least_s: So long it goes on although nothing is in flight: until load balancers have heard that it goes.
        at_most_s: After that, whatever is in flight.

    Raises:
        Silent: nobody answers there.
    """
    admin = EnvoyAdmin(address)
    admin.drain()
    began = time.monotonic()
    while True:
        open_requests = sum(admin.stats(IN_FLIGHT).values())
        passed = time.monotonic() - began
        if passed >= at_most_s or (not open_requests and passed >= at_least_s):
            return open_requests
        time.sleep(_LOOK_S)
