"""Verify that a log is as it was written: check every line, every file and the end with the keys, and name what differs.

Rule: nothing in a file is believed before its MAC is: not its number, not its place, not its end. Behind a finding the reader goes on
where the next line says that it is, so that one change is one finding, or two.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from msgspec import Struct

from din_extproc.audit import chain
from din_extproc.audit.chain import ChainLine, Keys, LogHead, Sealed, Segment
from din_extproc.audit.records import Gap, Witness
from din_extproc.audit.report import AuditFinding, AuditReport, make_head_name, make_manifest_name, make_segment_name


class LogFiles(Struct, frozen=True):
    """One replica's log as it lies there."""

    replica: str
    head: bytes | None
    manifest: bytes | None
    segments: Iterable[tuple[int, bytes]]
    """By number, in order; read one after the other."""
    since: int = 1
    """The first segment that is looked at; those before it may lie elsewhere."""


class _Peek(Struct):
    """The fields that every kind of record has."""

    kind: str = ""
    at: float = 0.0
    trace_id: str = ""


def split_lines(data: bytes) -> Iterator[bytes]:
    """The lines with their line feeds; the last one may lack it. Only a line feed ends a line."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def verify_log(files: LogFiles, keys: Keys, *, macs: bool = False) -> AuditReport:
    """Hold one replica's log against the keys. `macs`: keep those of all records, because other replicas may have witnessed them."""
    reader = _LogReader(files.replica, keys, macs=macs)
    reader.read_head(files.head)
    reader.read_manifest(files.manifest)
    reader.begin(files.since)
    for number, data in files.segments:
        reader.read_segment(number, data)
    return reader.close()


class _LogReader:
    """One pass over one log."""

    def __init__(self, replica: str, keys: Keys, *, macs: bool) -> None:
        self.report = AuditReport(replica=replica)
        self._keys = keys
        self._macs = macs
        self._head: LogHead | None = None
        self._head_seq = 0
        self._at_head = ""
        """The MAC of the record that the head names."""
        self._seals: dict[int, Sealed] = {}
        self._segment = 0
        self._name = ""
        self._secret: bytes | None = None
        self._seq = 0
        self._before: tuple[bytes, ...] = (chain.LOG,)
        """MACs that the line before may have had; none: it is not known, because of a finding."""
        self._kinds: Counter[str] = Counter()

    # -- head and manifest -----------------------------------------------------------------------------------------------------------

    def read_head(self, data: bytes | None) -> None:
        name = make_head_name(self.report.replica)
        if data is None:
            self._report(name, "the head is missing: whether the log's end was cut can't be told")
            return
        line = chain.parse_line(data)
        number, head = (None, None) if line is None else (chain.read_number(line), chain.decode_line(line, LogHead))
        if line is None or head is None or number is None:
            self._report(name, "the head has been changed")
        elif head.key not in self._keys:
            self._report(name, f"the head is signed with the key {head.key!r}, which is not here")
        elif not chain.is_genuine(self._keys[head.key], chain.HEAD, line) or head.replica != self.report.replica:
            self._report(name, "the head has been changed, or is another log's")
        else:
            self._head, self._head_seq = head, number

    def read_manifest(self, data: bytes | None) -> None:
        name = make_manifest_name(self.report.replica)
        before, count = chain.MANIFEST, 0
        for count, text in enumerate(split_lines(data or b""), 1):
            line = chain.parse_line(text)
            sealed = None if line is None else chain.decode_line(line, Sealed)
            secret = None if sealed is None else self._keys.get(sealed.key)
            if line is None or sealed is None or secret is None or not chain.is_genuine(secret, before, line) or sealed.segment != count:
                self._report(name, f"line {count} has been changed, moved or removed, or is signed with a key that is not here", line=count)
            else:
                self._seals[count] = sealed
            before = b"" if line is None else line.mac
        head = self._head
        if head is not None and (count < head.sealed or (count == head.sealed > 0 and before.hex() != head.manifest)):
            self._report(name, f"the manifest had {head.sealed} lines and has {count}")

    def begin(self, since: int) -> None:
        """Go on from where the manifest says that the segment before ended."""
        if since > 1:
            before = self._seals.get(since - 1)
            self._segment, self._before = since - 1, ()
            self._seq = 0 if before is None else before.last

    # -- segments --------------------------------------------------------------------------------------------------------------------

    def read_segment(self, number: int, data: bytes) -> None:
        self._report_lost(number)
        self._segment, self._name = number, make_segment_name(self.report.replica, number)
        self.report.segments += 1
        found, seal = len(self.report.findings), self._seals.get(number)
        texts = [*split_lines(data), b""]
        self._open(texts[0], number, seal)
        for at, (text, following) in enumerate(pairwise(texts), 1):
            self._read_line(text, following, at)
        if seal is None:
            return
        if self._seq < seal.last:
            self._report_missing(self._seq + 1, seal.last)
            self._seq, self._before = seal.last, ()
        elif len(self.report.findings) == found and (seal.bytes, seal.sha256) != (len(data), chain.compute_checksum(data)):
            self._report(self._name, "the file is not the one that was sealed")

    def close(self) -> AuditReport:
        report, head = self.report, self._head
        if head is not None:
            self._report_lost(head.segment + 1)
            self._name = make_segment_name(report.replica, head.segment)
            if self._seq < self._head_seq:
                self._report_missing(self._seq + 1, self._head_seq)
            elif self._at_head != head.chain and not report.findings:
                self._report(self._name, f"record {self._head_seq} is not the one that was written", seq=self._head_seq)
        report.last = self._seq
        report.kinds = dict(self._kinds)
        return report

    def _open(self, text: bytes, number: int, seal: Sealed | None) -> None:
        """Choose the secret of a file by its first line, or by who else knows."""
        line = chain.parse_line(text)
        opened = None if line is None else chain.decode_line(line, Segment)
        if opened is not None and line is not None:
            if (opened.replica, opened.segment) != (self.report.replica, number):
                self._report(self._name, f"this is segment {opened.segment} of {opened.replica}", line=1)
            self.report.network = opened.network
            if not self._before and len(opened.previous) == 2 * chain.MAC_BYTES:
                self._before = (bytes.fromhex(opened.previous),)
        named = [each.key for each in (seal, opened, self._head) if each is not None]
        secrets = [self._keys[key] for key in [*named, *self._keys] if key in self._keys]
        fits = [secret for secret in secrets if line is not None and self._find_key(secret, line)]
        self._secret = next(iter([*fits, *secrets]), None)
        if opened is not None and opened.key not in self._keys:
            self._report(self._name, f"it is signed with the key {opened.key!r}, which is not here: nothing in it is proved", line=1)
            self._secret = None

    def _read_line(self, text: bytes, following: bytes, at: int) -> None:
        line = chain.parse_line(text)
        number = None if line is None else chain.read_number(line)
        expected = self._seq + 1
        if line is not None and number == expected:
            sound = self._secret is None or not self._before or self._find_key(self._secret, line)
            if not sound:
                self._report(self._name, f"record {number} has been changed", line=at, seq=number, trace_id=_peek_line(line).trace_id)
            self._accept_line(line, number, sound=sound)
            return
        behind = _parse_number(following)
        if behind == expected:
            what = "this line is no record" if number is None else f"record {number} stands before record {expected}: moved, or repeated"
            self._report(self._name, what, line=at, seq=number or 0)
        elif line is None or number is None:
            torn = "is incomplete" if not text.endswith(b"\n") else "has been changed: its line is no record any more"
            self._report(self._name, f"record {expected} {torn}", line=at, seq=expected)
            self._seq, self._before = expected, ()
        elif number > expected and behind in {None, number + 1}:
            self._report_missing(expected, number - 1, at)
            self._accept_line(line, number)
        else:
            what = f"record {number} stands where record {expected} belongs"
            self._report(self._name, what, line=at, seq=expected, trace_id=_peek_line(line).trace_id)
            self._seq, self._before = expected, ()

    def _accept_line(self, line: ChainLine, number: int, *, sound: bool = True) -> None:
        """The next line is the one behind this one. Its MAC is the recorded one or, of a line that was changed, perhaps what should."""
        should: tuple[bytes, ...] = ()
        if not sound and self._secret is not None:
            should = tuple(chain.compute_mac(self._secret, before, line.signed) for before in self._before)
        self._seq, self._before = number, (line.mac, *should)
        report, peek = self.report, _peek_line(line)
        report.records += 1
        self._kinds[peek.kind] += 1
        if peek.at:
            report.first_at = peek.at if report.first_at is None else report.first_at
            report.last_at = peek.at
        if number == self._head_seq:
            self._at_head = line.mac.hex()
        if self._macs:
            report.macs[number] = line.mac.hex()
        if peek.kind == "witness" and (witness := chain.decode_line(line, Witness)) is not None:
            report.witnesses.append(witness)
        elif peek.kind == "gap" and (gap := chain.decode_line(line, Gap)) is not None:
            self._accept_gap(gap, number)

    def _accept_gap(self, gap: Gap, number: int) -> None:
        """The writer itself says that something is missing."""
        if gap.last:
            what = f"records {gap.first} to {gap.last} are missing, as the writer found before record {number}: {gap.reason}"
        elif gap.dropped:
            what = f"{gap.dropped} events were not recorded before record {number}: {gap.reason}"
        else:
            what = f"before record {number}: {gap.reason}"
        self._report(self._name, what, seq=gap.first or number, last=gap.last, reported=True)

    def _find_key(self, secret: bytes, line: ChainLine) -> bool:
        return any(chain.is_genuine(secret, before, line) for before in self._before)

    def _report_lost(self, number: int) -> None:
        """Every file between the last one and this one is missing."""
        for missing in range(self._segment + 1, number):
            seal = self._seals.get(missing)
            first, last = (0, 0) if seal is None else (seal.first, seal.last)
            self._report(make_segment_name(self.report.replica, missing), f"segment {missing} is missing", seq=first, last=last)
            self._segment, self._before = missing, ()
            self._seq = last or self._seq

    def _report_missing(self, first: int, last: int, at: int = 0) -> None:
        what = f"record {first} is missing" if first == last else f"records {first} to {last} are missing"
        self._report(self._name, what, line=at, seq=first, last=last)

    def _report(
        self, file: str, what: str, *, line: int = 0, seq: int = 0, last: int = 0, trace_id: str = "", reported: bool = False
    ) -> None:
        self.report.findings.append(AuditFinding(file=file, what=what, line=line, seq=seq, last=last, trace_id=trace_id, reported=reported))


def _parse_number(text: bytes) -> int | None:
    line = chain.parse_line(text)
    return None if line is None else chain.read_number(line)


def _peek_line(line: ChainLine) -> _Peek:
    return chain.decode_line(line, _Peek) or _Peek()
