"""A progress bar on standard error for commands that take longer than two seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from din_extproc.domain.progress import ShareDone

_QUICK_S = 2.0
"""Shorter work shows no bar."""


@contextmanager
def show_progress(task: str) -> Iterator[ShareDone]:
    """Yield a function that takes the share done. The bar disappears at the end; without a terminal there is none."""
    began = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    task_id = bar.add_task(task, total=1.0)

    def report(share: float) -> None:
        if not bar.live.is_started and time.monotonic() - began >= _QUICK_S:
            bar.start()
        bar.update(task_id, completed=share)

    try:
        yield report
    finally:
        bar.stop()
