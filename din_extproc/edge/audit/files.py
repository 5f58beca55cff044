"""Reader of audit log files: the segments of each replica in a folder."""

import re
from collections.abc import Iterator
from pathlib import Path

from din_extproc.audit.report import make_head_name, make_manifest_name, make_segment_name
from din_extproc.audit.verify import LogFiles
from din_extproc.domain.progress import ShareDone, ignore_progress

_SEGMENT = re.compile(r"(.+)-(\d{6})\.jsonl").fullmatch
_OTHER = re.compile(r"(.+)\.(?:manifest\.jsonl|head\.json)").fullmatch


def replicas(folder: Path) -> list[str]:
    """Return the names of the replicas with files in the folder.

    Raises:
        OSError: the folder can't be read.
    """
    names = {found[1] for path in folder.iterdir() if (found := _SEGMENT(path.name) or _OTHER(path.name)) is not None}
    return sorted(names)


def segments(folder: Path, replica: str) -> list[int]:
    """Return the numbers of a replica's segments, in order."""
    found = (_SEGMENT(path.name) for path in folder.iterdir())
    return sorted(int(match[2]) for match in found if match is not None and match[1] == replica)


def read_log(folder: Path, replica: str, since: int = 1, progress: ShareDone = ignore_progress) -> LogFiles:
    """Read a replica's log from a segment on. The head is read first, so a concurrent writer is never behind it.

    Raises:
        OSError: A file is unreadable; raised also during iteration.
    """
    head, manifest = _read_file(folder / make_head_name(replica)), _read_file(folder / make_manifest_name(replica))
    return LogFiles(replica, head, manifest, _read_contents(folder, replica, since, progress), since)


def _read_contents(folder: Path, replica: str, since: int, progress: ShareDone) -> Iterator[tuple[int, bytes]]:
    numbers = segments(folder, replica)
    for at, number in enumerate(numbers):
        progress(at / len(numbers))
        if number >= since:
            yield number, (folder / make_segment_name(replica, number)).read_bytes()


def _read_file(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
