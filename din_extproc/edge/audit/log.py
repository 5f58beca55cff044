"""The writer of one replica's audit log: events become signed lines, lines go to disk in batches, full files are sealed.

Invariant: a written record is never rewritten, moved or removed; lost events are recorded in the log as soon as possible.
Noting an event costs microseconds; signing and writing happen between requests and in a thread.

What a full disk (or any other fault of the disk) means is chosen by policy. `drop_with_alarm`: events are lost, counted and said.
`block` and `refuse`: events are kept, up to a bound, and new requests wait or are refused until they are on disk.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import IO, Literal

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.audit import chain
from din_extproc.audit.chain import Keys, LogHead, Sealed, Segment, SigningKey
from din_extproc.audit.records import Event, Gap
from din_extproc.audit.recovery import LogResumption, count_whole_bytes, plan_resumption
from din_extproc.audit.report import make_head_name, make_manifest_name, make_segment_name
from din_extproc.edge.audit.files import read_log, segments
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.replace_file import replace_file

_log = logging.getLogger(__name__)

_SLICE = 128
"""Events that are signed before others go first: half a millisecond."""
_MOST_AT_ONCE = 4096


class AuditOptions(Struct, frozen=True, kw_only=True):
    """Options of the audit log."""

    folder: Path
    replica: str
    network: str = ""
    fsync: Literal["always", "interval", "never"] = "interval"
    """After each batch, once a second, or when the system likes to."""
    fsync_s: float = 1.0
    rotate_bytes: int = 64 << 20
    rotate_s: float = 86400.0
    on_full: Literal["drop_with_alarm", "block", "refuse"] = "drop_with_alarm"
    kept_events: int = 100_000
    """Events in memory at most, under `block` and `refuse`; past that the newest are dropped and counted."""


class AuditLog:
    """One replica's log. `start` it, `note` events, `flush` again and again, `close` it.

    Args:
        options: How it is kept.
        keys: Of this and former times; the last one signs.
        on_blocked: Told when the disk takes no more (True), and when it does again (False).
    """

    def __init__(self, options: AuditOptions, keys: tuple[SigningKey, ...], on_blocked: Callable[[bool], None]) -> None:
        self._options = options
        self._key = keys[-1]
        self._keys: Keys = {key.id: key.secret for key in keys}
        self._turned = on_blocked
        self._events: deque[Event] = deque()
        self._signed: list[bytes] = []
        """Lines that are not on disk yet, `_own` of which are the log's own."""
        self._own = 0
        self._end = LogResumption()
        self._file: _File | None = None
        self._lock: IO[bytes] | None = None
        self._working = asyncio.Lock()
        self._head_due = False
        self._synced_at = 0.0
        self._lost = self._reported = 0
        """Events dropped since the last written `gap` record, and the number of them that the signed lines report."""
        self.failing = ""
        """Reason why the log can't be written; "" if it can."""
        self.written = 0
        """Records since the start."""
        self.dropped = 0
        """Events that were lost since the start."""

    # -- what others do ----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on where the last writer ended.

        Raises:
            OSError: the folder can't be used, or another process writes this replica's log.
        """
        folder, replica = self._options.folder, self._options.replica
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / f"{replica}.lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise OSError(f"another process writes the audit log of {replica} in {folder}") from error
        numbers = segments(folder, replica)
        last = numbers[-1] if numbers else 0
        path = folder / make_segment_name(replica, last)
        if last:
            os.truncate(path, count_whole_bytes(path.read_bytes()))
        self._end = plan_resumption(read_log(folder, replica, max(1, last)), self._keys, SystemClock.wall())
        if self._end.sealed < last == self._end.segment:
            self._seal(path.stat().st_size, sha256(path.read_bytes()).hexdigest())
        if self._end.gap is not None:
            _log.error("the audit log has changed since its writer ended: %s; see `din-extproc audit verify`", self._end.gap.reason)
            self._events.appendleft(self._end.gap)

    def record(self, event: Event) -> None:
        """Record an event, soon."""
        if len(self._events) < self._options.kept_events:
            self._events.append(event)
        else:
            self._lost += 1
            self.dropped += 1

    def set_keys(self, keys: tuple[SigningKey, ...]) -> None:
        """Sign with the last of these from the next file on, which begins with the next batch."""
        self._keys = {key.id: key.secret for key in keys}
        if keys[-1] != self._key:
            self._key = keys[-1]
            if self._file is not None:
                self._file.opened_at = 0.0

    @property
    def head(self) -> tuple[int, str]:
        """The last record on disk: its number and its MAC."""
        return self._end.seq, self._end.before.hex()

    @property
    def waiting(self) -> int:
        """Events that are not on disk."""
        return len(self._events) + len(self._signed)

    async def flush(self) -> None:
        """Put on disk what was noted. What the disk does not take is kept or dropped, as the policy says."""
        loop = asyncio.get_running_loop()
        async with self._working:
            while self._events or self._signed or self._lost or self._head_due:
                await self._sign()
                error = await loop.run_in_executor(None, self._write)
                if error is not None:
                    self._on_failure(error)
                    return
                self._on_success()
            if self._options.fsync == "interval" and self._file is not None and not self._file.synced:
                await loop.run_in_executor(None, self._sync)

    async def close(self) -> None:
        """Put the rest on disk and end in good order."""
        await self.flush()
        async with self._working:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    os.fsync(self._file.descriptor)
                os.close(self._file.descriptor)
                self._file = None
            if self._lock is not None:
                self._lock.close()

    def snapshot(self) -> dict[str, object]:
        """For the admin page."""
        return {
            "records": self._end.seq,
            "segment": self._end.segment,
            "written": self.written,
            "waiting": self.waiting,
            "dropped": self.dropped,
            "failing": self.failing,
        }

    # -- signing, between other things -------------------------------------------------------------------------------------------------

    async def _sign(self) -> None:
        """Make lines of some events, unless lines wait that could not be written before."""
        if self._signed:
            return
        if self._file is not None and self._is_full(self._file):
            await asyncio.get_running_loop().run_in_executor(None, self._rotate)
        own: list[Segment | Gap] = [] if self._file is not None else [self._make_segment()]
        if self._lost:
            self._reported = self._lost
            own.append(Gap(at=SystemClock.wall(), reason="they could not be written in time", dropped=self._lost))
        self._own = len(own)
        seq, before, events = self._end.seq, self._end.before, self._events
        for entry in own:
            seq += 1
            line, before = chain.sign_entry(self._key.secret, before, seq, entry)
            self._signed.append(line)
        for count in range(1, min(len(events), _MOST_AT_ONCE) + 1):
            seq += 1
            line, before = chain.sign_entry(self._key.secret, before, seq, events.popleft())
            self._signed.append(line)
            if not count % _SLICE:
                await asyncio.sleep(0)

    def _make_segment(self) -> Segment:
        options, end = self._options, self._end
        return Segment(
            at=SystemClock.wall(),
            replica=options.replica,
            network=options.network,
            segment=end.segment + 1,
            key=self._key.id,
            previous=end.before.hex(),
        )

    def _is_full(self, file: "_File") -> bool:
        return file.size >= self._options.rotate_bytes or SystemClock.wall() - file.opened_at >= self._options.rotate_s

    def _on_failure(self, error: OSError) -> None:
        if not self.failing:
            self.failing = str(error)
            _log.error("the audit log can't be written, policy %s: %s", self._options.on_full, error)
            self._turned(True)
        if self._options.on_full == "drop_with_alarm":
            lost = len(self._signed) - min(self._own, len(self._signed)) + len(self._events)
            self._signed.clear()
            self._events.clear()
            self._reported = 0
            self._lost += lost
            self.dropped += lost

    def _on_success(self) -> None:
        self._lost -= self._reported
        self._reported = 0
        if self.failing:
            self.failing = ""
            _log.warning("the audit log can be written again; %d events were lost since the start", self.dropped)
            self._turned(False)

    # -- the disk: in a thread, one step at a time -------------------------------------------------------------------------------------

    def _write(self) -> OSError | None:
        """The signed lines to disk, whole, and the head after them. Returns why not."""
        try:
            if self._signed:
                self._append()
            self._write_head()
        except OSError as error:
            return error
        return None

    def _append(self) -> None:
        file = self._file or self._create()
        data = b"".join(self._signed)
        try:
            os.ftruncate(file.descriptor, file.size)  # what was left of a batch that failed
            _write_all(file.descriptor, data)
            if self._options.fsync == "always":
                os.fsync(file.descriptor)
        except OSError:
            if self._file is None:
                os.close(file.descriptor)
            raise
        last = chain.parse_line(self._signed[-1])
        file.size += len(data)
        file.checksum.update(data)
        file.synced = self._options.fsync == "always"
        end, count = self._end, len(self._signed)
        if self._file is None:
            end = replace(end, segment=end.segment + 1, first=end.seq + 1)
            self._file = file
        self._end = replace(end, seq=end.seq + count, before=end.before if last is None else last.mac)
        self._signed.clear()
        self.written += count
        self._head_due = True

    def _create(self) -> "_File":
        path = self._options.folder / make_segment_name(self._options.replica, self._end.segment + 1)
        return _File(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640), SystemClock.wall())

    def _write_head(self) -> None:
        if not self._head_due:
            return
        end, options = self._end, self._options
        head = LogHead(
            at=SystemClock.wall(),
            replica=options.replica,
            segment=end.segment,
            chain=end.before.hex(),
            sealed=end.sealed,
            manifest=end.manifest.hex(),
            key=self._key.id,
        )
        line, _ = chain.sign_entry(self._key.secret, chain.HEAD, end.seq, head)
        replace_file(options.folder / make_head_name(options.replica), line, durable=options.fsync == "always")
        self._head_due = False

    def _sync(self) -> None:
        file, now = self._file, SystemClock.monotonic()
        if file is not None and now - self._synced_at >= self._options.fsync_s:
            self._synced_at = now
            with contextlib.suppress(OSError):  # the next write tells
                os.fsync(file.descriptor)
            file.synced = True

    def _rotate(self) -> None:
        """Seal the file, so that the next batch begins another. A disk that takes no seal leaves it open."""
        file = self._file
        if file is None:
            return
        try:
            os.fsync(file.descriptor)
            self._seal(file.size, file.checksum.hexdigest())
        except OSError as error:
            _log.warning("an audit file can't be sealed yet: %s", error)
            return
        os.close(file.descriptor)
        self._file = None

    def _seal(self, size: int, checksum: str) -> None:
        end, options = self._end, self._options
        sealed = Sealed(segment=end.segment, first=end.first, last=end.seq, bytes=size, sha256=checksum, key=self._key.id)
        line, mac = chain.sign_entry(self._key.secret, end.manifest, end.sealed + 1, sealed)
        path = options.folder / make_manifest_name(options.replica)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            before = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, line)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
        self._end = replace(end, sealed=end.sealed + 1, manifest=mac)
        self._head_due = True


class _File:
    """The segment that is written."""

    __slots__ = ("checksum", "descriptor", "opened_at", "size", "synced")

    def __init__(self, descriptor: int, opened_at: float) -> None:
        self.descriptor = descriptor
        self.opened_at = opened_at
        self.size = 0
        self.checksum = sha256()
        self.synced = True


def _write_all(descriptor: int, data: bytes) -> None:
    """All of it.

    Raises:
        OSError: not all of it could be written.
    """
    while data:
        data = data[os.write(descriptor, data) :]
