"""Resumption of a log after its previous writer ended or crashed.

Rule: damage is never hidden: a record of the log itself reports what is missing or changed.
"""

from msgspec import Struct

from din_extproc.audit import chain
from din_extproc.audit.chain import ChainLine, LogHead
from din_extproc.audit.records import Gap
from din_extproc.audit.verify import LogFiles, split_lines, verify_log


class LogResumption(Struct, frozen=True, kw_only=True):
    """The end of a log, from which a writer can resume."""

    segment: int = 0
    """The last one; 0: there is none."""
    first: int = 1
    """Its first record."""
    seq: int = 0
    """The last record that there was."""
    before: bytes = chain.LOG
    """The MAC of the last record."""
    sealed: int = 0
    manifest: bytes = chain.MANIFEST
    gap: Gap | None = None
    """The record to append first; None: the log is complete."""


def count_whole_bytes(data: bytes) -> int:
    """Return the length in bytes of the complete lines: the writer may have ended in the middle of the last one."""
    return data.rfind(b"\n") + 1


def plan_resumption(files: LogFiles, keys: chain.Keys, now: float) -> LogResumption:
    """Read the last segment, cut to whole lines, and what stands beside it. `now`: seconds since the epoch."""
    segments = list(files.segments)
    number, data = segments[-1] if segments else (0, b"")
    manifest, sealed = _find_last(files.manifest or b"")
    if not data and files.head is None and not sealed:
        return LogResumption()
    report = verify_log(LogFiles(files.replica, files.head, files.manifest, segments, max(1, number)), keys)
    head, _ = _find_last(files.head or b"")
    end, _ = _find_last(data)
    begun = chain.parse_line(next(split_lines(data), b""))
    seq = max(report.last, 0 if head is None else chain.read_number(head) or 0)
    fresh = [finding for finding in report.findings if not finding.reported]
    gap = None
    if fresh:
        lost = next((finding for finding in fresh if finding.last), None)
        first, last = (0, 0) if lost is None else (lost.seq, lost.last)
        gap = Gap(at=now, reason=str(fresh[0]), first=first, last=last)
    return LogResumption(
        segment=max(number, sealed, 0 if head is None else _read_segment_number(head)),
        first=(None if begun is None else chain.read_number(begun)) or seq + 1,
        seq=seq,
        before=chain.LOG if end is None else end.mac,
        sealed=sealed,
        manifest=chain.MANIFEST if manifest is None else manifest.mac,
        gap=gap,
    )


def _find_last(data: bytes) -> tuple[ChainLine | None, int]:
    """The last line, and how many there are."""
    texts = list(split_lines(data))
    return (chain.parse_line(texts[-1]) if texts else None), len(texts)


def _read_segment_number(head: ChainLine) -> int:
    found = chain.decode_line(head, LogHead)
    return 0 if found is None else found.segment
