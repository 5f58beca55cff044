"""Replicas witness each other's audit logs."""

from pathlib import Path

from pydantic import SecretStr

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.audit.chain import SigningKey
from din_extproc.audit.report import find_contradictions
from din_extproc.audit.verify import verify_log
from din_extproc.edge.audit.files import read_log
from din_extproc.edge.background import Background
from din_extproc.roles.serve.audit_recorder import AuditRecorder
from din_extproc.settings.audit import AuditKeySection, AuditSection, AuditSettings
from tests.support.audit_logs import KEY, KEYS, log_files, settled


class Heads:
    """One hash of a Redis that may be away."""

    def __init__(self) -> None:
        self.written: dict[bytes, bytes] = {}
        self.away = False

    async def _call(self, command) -> object:
        if self.away:
            raise LimitsUnavailable("away")
        if command[0] == "HSET":
            self.written[command[2].encode()] = command[3].encode()
            return 1
        return [part for pair in self.written.items() for part in pair]

    def call(self, *command):
        return self._call(command)


def auditor(folder: Path, replica: str, heads: Heads) -> AuditRecorder:
    section = AuditSection(folder=str(folder), keys={KEY.id: AuditKeySection(value=SecretStr("x" * 16))})
    return AuditRecorder(
        AuditSettings(section=section, folder=folder, replica=replica, keys=(SigningKey(KEY.id, KEY.secret),)), "", heads, lambda _: None
    )


async def test_an_older_state_of_a_whole_log_is_found_by_what_another_replica_recorded(tmp_path):
    heads, background = Heads(), Background()
    one, other = auditor(tmp_path, "gw-1", heads), auditor(tmp_path, "gw-2", heads)
    one.start(background)
    other.start(background)
    for at in range(5):
        one.record(settled(at))
    await one._log.flush()
    older = {path: path.read_bytes() for path in log_files(tmp_path) if path.name.startswith("gw-1")}
    for at in range(7):
        one.record(settled(10 + at))
    await one._log.flush()
    heads.away = True
    await one.publish_head()
    heads.away = False
    for each in (one, other, one, other, one, other):
        await each.publish_head()
    await background.close()
    await one.stop()
    await other.stop()
    reports = [verify_log(read_log(tmp_path, replica), KEYS, macs=True) for replica in ("gw-1", "gw-2")]
    assert [report.findings for report in reports] == [[], []]
    assert list(find_contradictions(reports)) == []
    assert reports[1].kinds == {"segment": 1, "witness": 1}
    for path, data in older.items():
        path.write_bytes(data)
    reports = [verify_log(read_log(tmp_path, replica), KEYS, macs=True) for replica in ("gw-1", "gw-2")]
    assert reports[0].findings == []
    (finding,) = find_contradictions(reports)
    assert (finding.seq, finding.last) == (7, 13)
