"""Progress reports of long-running work."""

from collections.abc import Callable

ShareDone = Callable[[float], None]
"""Takes the share of the work that is done, 0 to 1. Called often."""


def ignore_progress(_: float) -> None:
    """Report to no one."""


def part_of(progress: ShareDone, number: int, count: int) -> ShareDone:
    """Return a `ShareDone` for part `number` (from 0) of `count` equal parts of the work."""
    return lambda share: progress((number + share) / count)
