"""Limit of concurrent connections of a port.

Invariant: at the limit, an idle connection is closed for the new one: first one without any request, then the one idle for longest. If
all connections are active, the new one is closed.
"""

import resource
from typing import Protocol

_SHARE = 8
"""Divisor of the open-file limit for one port; there are five ports, Redis and nodes."""
_MOST = 16_384


class LimitedConnection(Protocol):
    """One connection."""

    @property
    def idle(self) -> tuple[bool, float] | None:
        """Return whether it ever sent a request, and since when (seconds) it is idle. None: it is active."""

    def abort(self) -> None:
        """Close the connection at once."""


def compute_max_connections() -> int:
    """Return the maximum connections of one port, by the open-file limit."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if files == resource.RLIM_INFINITY else max(1, min(files // _SHARE, _MOST))


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class ConnectionLimiter:
    """Connections of a port.

    Args:
        most: Maximum connections. None: by the open-file limit.
    """

    def __init__(self, most: int | None = None) -> None:
        self._max_connections = most or compute_max_connections()
        self.connections: dict[LimitedConnection, None] = {}
        self.sent_away = 0
        """Connections closed for others since the start."""

    def add(self, connection: LimitedConnection) -> None:
        """Add a connection; close one at the limit."""
        self.connections[connection] = None
        if len(self.connections) <= self._max_connections:
            return
        idle = [(state, other) for other in self.connections if other is not connection and (state := other.idle) is not None]
        leaving = min(idle, key=lambda each: each[0])[1] if idle else connection
        self.sent_away += 1
        self.connections.pop(leaving, None)
        leaving.abort()

    def remove(self, connection: LimitedConnection) -> None:
        """Remove a closed connection."""
        self.connections.pop(connection, None)
