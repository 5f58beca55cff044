"""How many connections a port holds at once.

Rule: a newcomer finds a place. The one that goes for it has nothing under way: first whoever never asked for anything, then whoever has
been silent for longest. Only where all are at work the newcomer goes.
"""

import resource
from typing import Protocol

_SHARE = 8
"""The part of the process's open files that one port may take: there are five ports, Redis and nodes beside them."""
_MOST = 16_384


class LimitedConnection(Protocol):
    """One connection."""

    @property
    def idle(self) -> tuple[bool, float] | None:
        """Whether it has ever been served, and since when (seconds) it has had nothing under way. None: something is under way."""

    def abort(self) -> None:
        """Close it now."""


def most_connections() -> int:
    """Of one port, by what the process may open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if files == resource.RLIM_INFINITY else max(1, min(files // _SHARE, _MOST))


def open_as_many_files_as_allowed() -> None:
    """Raise the process's limit to the one that the system sets it: many systems start processes with a lower one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class ConnectionLimiter:
    """The connections of a port.

    Args:
        most: How many there may be. None: what the process's open files allow.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most or most_connections()
        self.guests: dict[LimitedConnection, None] = {}
        self.sent_away = 0
        """How many had to go for others, since the start."""

    def enter(self, newcomer: LimitedConnection) -> None:
        """One more."""
        self.guests[newcomer] = None
        if len(self.guests) <= self._most:
            return
        idle = [(standing, guest) for guest in self.guests if guest is not newcomer and (standing := guest.idle) is not None]
        leaving = min(idle, key=lambda each: each[0])[1] if idle else newcomer
        self.sent_away += 1
        self.guests.pop(leaving, None)
        leaving.abort()

    def leave(self, guest: LimitedConnection) -> None:
        """It is gone."""
        self.guests.pop(guest, None)
