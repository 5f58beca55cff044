"""The role of `audit verify`: checks the logs of one or more replicas against their keys and against each other.

Rule: it only reads. A log that is being written is read again if its last line was incomplete.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from din_extproc.audit.report import AuditFinding, AuditReport, find_contradictions
from din_extproc.audit.verify import verify_log
from din_extproc.domain.progress import ShareDone, ignore_progress, part_of
from din_extproc.edge.audit.files import read_log, replicas
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected

_MAX_LISTED = 50
"""Number of findings that the text shows."""
_AGAIN_S = 0.5


class AuditUnreadable(Exception):  # noqa: N818 - it says what the logs are
    """The logs or the keys can't be read; the message says why."""


class ReplicaProof(Struct, frozen=True):
    """The result for one replica's log."""

    replica: str
    folder: str
    network: str
    records: int
    segments: int
    last: int
    first_at: float | None
    last_at: float | None
    kinds: dict[str, int]


class Proof(Struct, frozen=True):
    """The result for all logs."""

    whole: bool
    replicas: tuple[ReplicaProof, ...]
    findings: tuple[AuditFinding, ...]

    @property
    def text(self) -> str:
        """The result as text."""
        lines = [_format_line(each) for each in self.replicas]
        lines += [str(finding) for finding in self.findings[:_MAX_LISTED]]
        if len(self.findings) > _MAX_LISTED:
            lines.append(f"... and {len(self.findings) - _MAX_LISTED} more")
        lines.append("whole: nothing was changed, removed or moved" if self.whole else f"NOT whole: {len(self.findings)} findings")
        return "\n".join(lines)


def verify_logs(
    folders: tuple[Path, ...],
    config: Path | None,
    keys: tuple[str, ...],
    since: int,
    env: Mapping[str, str],
    *,
    progress: ShareDone = ignore_progress,
) -> Proof:
    """Verify every log in the folders.

    Args:
        folders: Folders with logs; empty: that of the configuration.
        config: A configuration with an `audit` section; None: keys are given.
        keys: Further keys, as `ID=FILE`.
        since: The first segment to verify.
        env: The environment for `${NAME}` in the configuration.
        progress: Takes the share done.

    Raises:
        AuditUnreadable: there is no log or no key, or one can't be read.
    """
    known, own = _read_configured_keys(config, env)
    known |= dict(_read_given_key(key) for key in keys)
    try:
        named = [(folder, replica) for folder in folders or own for replica in replicas(folder)]
        found = []
        for number, (folder, replica) in enumerate(named):
            found.append(
                (
                    folder,
                    _verify_replica(folder, replica, known, since, macs=len(named) > 1, progress=part_of(progress, number, len(named))),
                )
            )
    except OSError as error:
        raise AuditUnreadable(f"{error.filename}: {error.strerror}") from error
    if not found:
        raise AuditUnreadable(f"no audit log found in {', '.join(str(folder) for folder in folders or own) or 'no folder'}")
    reports = [report for _, report in found]
    findings = [finding for report in reports for finding in report.findings] + list(find_contradictions(reports))
    proofs = tuple(_make_proof(folder, report) for folder, report in found)
    return Proof(not findings, proofs, tuple(findings))


def _verify_replica(folder: Path, replica: str, keys: dict[str, bytes], since: int, *, macs: bool, progress: ShareDone) -> AuditReport:
    report = verify_log(read_log(folder, replica, since, progress), keys, macs=macs)
    if any("is incomplete" in finding.what for finding in report.findings):
        time.sleep(_AGAIN_S)
        report = verify_log(read_log(folder, replica, since), keys, macs=macs)
    return report


def _read_configured_keys(config: Path | None, env: Mapping[str, str]) -> tuple[dict[str, bytes], tuple[Path, ...]]:
    if config is None:
        return {}, ()
    settings = load(config, env)
    if isinstance(settings, ConfigRejected):
        raise AuditUnreadable(f"{config} has errors, see `din-extproc check {config}`; or give --key and a folder")
    if settings.audit is None:
        raise AuditUnreadable(f"{config} has no section `audit`; add it, or give --key and a folder")
    return {key.id: key.secret for key in settings.audit.keys}, (settings.audit.folder,)


def _read_given_key(key: str) -> tuple[str, bytes]:
    name, _, file = key.partition("=")
    if not name or not file:
        raise AuditUnreadable(f"--key {key!r} is not ID=FILE")
    try:
        return name, Path(file).read_bytes().rstrip()
    except OSError as error:
        raise AuditUnreadable(f"{file}: {error.strerror}") from error


def _make_proof(folder: Path, report: AuditReport) -> ReplicaProof:
    return ReplicaProof(
        replica=report.replica,
        folder=str(folder),
        network=report.network,
        records=report.records,
        segments=report.segments,
        last=report.last,
        first_at=report.first_at,
        last_at=report.last_at,
        kinds=report.kinds,
    )


def _format_line(each: ReplicaProof) -> str:
    when = ""
    if each.first_at is not None and each.last_at is not None:
        when = f", {_format_time(each.first_at)} to {_format_time(each.last_at)}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(each.kinds.items()))
    return f"{each.replica}: {each.records} records in {each.segments} files{when}: {kinds}"


def _format_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
