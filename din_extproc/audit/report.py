"""The result of a verification: one finding per alteration, and the statements of replicas about each other."""

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from din_extproc.audit.records import Witness


def make_segment_name(replica: str, number: int) -> str:
    """Return the file name of a segment."""
    return f"{replica}-{number:06d}.jsonl"


def make_manifest_name(replica: str) -> str:
    """Return the file name of the manifest."""
    return f"{replica}.manifest.jsonl"


def make_head_name(replica: str) -> str:
    """Return the name of the head."""
    return f"{replica}.head.json"


class AuditFinding(Struct, frozen=True, omit_defaults=True):
    """One deviation from what the writer signed."""

    file: str
    what: str
    line: int = 0
    """Counted from 1; 0: the whole file."""
    seq: int = 0
    """The record's number; 0: none."""
    last: int = 0
    """With `seq`: all records from there to here."""
    trace_id: str = ""
    """The record's present content."""
    reported: bool = field(default=False, name="told")
    """The writer itself reported it in a `gap` record."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        trace = f" (trace {self.trace_id})" if self.trace_id else ""
        return f"{where}: {self.what}{trace}"


class AuditReport(Struct, kw_only=True):
    """The result of verifying one replica's log."""

    replica: str
    network: str = ""
    records: int = 0
    segments: int = 0
    last: int = 0
    """The number of the last record."""
    first_at: float | None = None
    last_at: float | None = None
    kinds: dict[str, int] = {}
    findings: list[AuditFinding] = []
    witnesses: list[Witness] = []
    """Its statements about other replicas."""
    macs: dict[int, str] = {}
    """Of its records, when others may have witnessed them."""


def find_contradictions(reports: Iterable[AuditReport]) -> Iterator[AuditFinding]:
    """Yield a finding for each record that another replica has seen and that is now missing or changed."""
    known = {report.replica: report for report in reports}
    newest: dict[str, tuple[int, str]] = {}
    for report in known.values():
        for witness in report.witnesses:
            seen, (seq, _) = known.get(witness.replica), newest.get(witness.replica, (0, ""))
            if witness.record > seq:
                newest[witness.replica] = witness.record, report.replica
            if seen is not None and seen.macs.get(witness.record, witness.chain) != witness.chain:
                what = f"record {witness.record} is not the one that {report.replica} saw"
                yield AuditFinding(make_head_name(seen.replica), what, seq=witness.record)
    for replica, (seq, witness_of) in newest.items():
        seen = known.get(replica)
        if seen is None:
            yield AuditFinding(
                make_head_name(replica), f"the whole log of {replica} is missing: {witness_of} saw its record {seq}", seq=1, last=seq
            )
        elif seen.last < seq:
            what = f"records {seen.last + 1} to {seq} are missing at the end: {witness_of} saw the last of them"
            yield AuditFinding(make_head_name(replica), what, seq=seen.last + 1, last=seq)
