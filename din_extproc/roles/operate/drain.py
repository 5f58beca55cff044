"""The role of `drain`: an Envoy that is about to stop accepts no more connections and finishes its requests.

Rule: it ends when no port is open and no request in flight; the time only bounds it. Ports close after load balancers have noticed that
this Envoy stops, because later connections are refused.
"""

import time

from din_extproc.domain.node import Endpoint
from din_extproc.edge.probe.envoy_admin import EnvoyAdmin, EnvoyAdminUnreachable

IN_FLIGHT = r"^http\.din\.downstream_rq_active$"
_LOOK_S = 0.25
_CLOSING_S = 2.0
"""Seconds that Envoy's threads may take to close their ports."""


class EnvoyStillOpen(EnvoyAdminUnreachable):
    """Envoy answers, but keeps its ports open."""


def drain(address: Endpoint, at_least_s: float, at_most_s: float) -> int:
    """Drain an Envoy and return how many requests were still in flight at the end.

    Args:
        address: The address of Envoy's admin interface.
        at_least_s: Seconds for which connections are still accepted while health checks fail, so that load balancers notice.
        at_most_s: Seconds after which the drain ends, even with requests in flight.

    Raises:
        EnvoyAdminUnreachable: the admin interface does not answer.
        EnvoyStillOpen: Envoy does not close its ports.
    """
    admin = EnvoyAdmin(address)
    admin.fail_health_checks()
    began = time.monotonic()
    time.sleep(min(at_least_s, at_most_s))
    admin.close()
    while True:
        closed = admin.wait_closed()  # read first: requests through an open port are counted afterwards
        open_requests = sum(admin.fetch_stats(IN_FLIGHT).values())
        passed = time.monotonic() - began
        if closed and (not open_requests or passed >= at_most_s):
            return open_requests
        if passed >= at_most_s + _CLOSING_S:
            raise EnvoyStillOpen(f"Envoy at {address} still accepts connections after the order to drain; stop it, or try again")
        time.sleep(_LOOK_S)
