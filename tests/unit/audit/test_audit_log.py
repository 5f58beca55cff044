"""The writer: batches, files, keys, full disks, and what it finds when it begins again."""

import errno
import os
import random
from pathlib import Path

import pytest

from din_extproc.audit.chain import LOG, SigningKey, sign_entry
from din_extproc.audit.records import Configured, Event
from din_extproc.edge.audit import log as audit_log
from tests.support.audit_logs import KEY, check, log_files, log_in, settled, written


async def test_a_writer_that_begins_again_goes_on_with_the_numbers_and_the_chain(tmp_path):
    for run in range(4):
        await written(tmp_path, [settled(at) for at in range(run)])
    report = check(tmp_path)
    assert report.findings == []
    assert (report.segments, report.kinds) == (3, {"segment": 3, "settled": 6})  # nothing to say, nothing written


async def test_what_was_being_written_when_the_writer_died_is_cut_off_and_the_log_is_whole(tmp_path):
    log = log_in(tmp_path)
    for at in range(5):
        log.record(settled(at))
    await log.flush()
    log._lock.close()  # as the kernel does for a process that is gone
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"seq":7,"kind":"settled","at":17000')
    assert "is incomplete" in str(check(tmp_path).findings[0])
    await written(tmp_path, [settled(9)])
    report = check(tmp_path)
    assert report.findings == []
    assert report.kinds == {"segment": 2, "settled": 6}


async def test_records_that_are_gone_when_the_writer_begins_again_are_reported_in_the_log(tmp_path):
    await written(tmp_path, [settled(at) for at in range(20)])
    (path,) = tmp_path.glob("gw-1-*.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-4]))
    await written(tmp_path, [settled(99)])
    findings = check(tmp_path).findings
    assert {(finding.seq, finding.last) for finding in findings} == {(18, 21)}
    assert any("as the writer found" in finding.what for finding in findings)
    await written(tmp_path, [settled(100)])
    assert {(finding.seq, finding.last) for finding in check(tmp_path).findings} == {(18, 21)}


async def test_files_end_at_their_size_and_at_their_age_and_are_sealed(tmp_path, monkeypatch):
    await written(tmp_path, [settled(at) for at in range(60)], rotate_bytes=3000)
    report = check(tmp_path)
    assert report.findings == []
    assert report.segments > 4
    assert (tmp_path / "gw-1.manifest.jsonl").read_bytes().count(b"\n") == report.segments - 1
    await written(tmp_path, [settled(at) for at in range(15)], replica="gw-2", rotate_s=0.0)
    assert check(tmp_path, "gw-2").segments == 3


async def test_another_key_begins_another_file(tmp_path):
    second = SigningKey("k2", b"the key after the first one")
    log = log_in(tmp_path)
    log.record(settled(1))
    await log.flush()
    log.set_keys((KEY, second))
    log.record(settled(2))
    await log.flush()
    log.set_keys((KEY, second))
    log.record(settled(3))
    await log.close()
    report = check(tmp_path, keys={KEY.id: KEY.secret, second.id: second.secret})
    assert report.findings == []
    assert report.segments == 2
    assert [b'"key":"k2"' in path.read_bytes() for path in sorted(tmp_path.glob("gw-1-*.jsonl"))] == [False, True]


async def test_only_one_process_writes_a_replica_s_log(tmp_path):
    log = log_in(tmp_path)
    with pytest.raises(OSError, match="another process writes"):
        log_in(tmp_path)
    await log.close()


class FullDisk:
    """Takes so many more bytes, then nothing."""

    def __init__(self, monkeypatch) -> None:
        self.room = 1 << 40
        self._real = os.write
        monkeypatch.setattr(audit_log.os, "write", self._write)

    def _write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._real(descriptor, bytes(data[: self.room]))
        self.room -= count
        return count


@pytest.mark.parametrize("room", [0, 150, 1000])
async def test_e_full_disk_under_drop_with_alarm_loses_events_and_says_how_many(tmp_path, monkeypatch, room):
    turns = []
    log = log_in(tmp_path, on_blocked=turns.append)
    disk = FullDisk(monkeypatch)
    log.record(settled(1))
    await log.flush()
    disk.room = room
    for at in range(10):
        log.record(settled(at))
    await log.flush()
    assert (log.dropped, log.waiting, bool(log.failing)) == (10, 0, True)
    log.record(settled(50))
    await log.flush()
    assert log.dropped == 11
    disk.room = 1 << 40
    log.record(settled(51))
    await log.flush()
    assert (log.failing, turns) == ("", [True, False])
    await log.close()
    (finding,) = check(tmp_path).findings
    assert "11 events were not recorded" in finding.what
    assert check(tmp_path).kinds == {"segment": 1, "settled": 2, "gap": 1}


@pytest.mark.parametrize("policy", ["block", "refuse"])
async def test_a_full_disk_under_the_other_policies_loses_nothing(tmp_path, monkeypatch, policy):
    turns = []
    log = log_in(tmp_path, on_blocked=turns.append, on_full=policy, kept_events=40)
    disk = FullDisk(monkeypatch)
    disk.room = 300
    for at in range(30):
        log.record(settled(at))
        await log.flush()
    assert (log.dropped, log.waiting) == (0, 31)
    assert turns == [True]
    disk.room = 1 << 40
    await log.flush()
    assert turns == [True, False]
    for at in range(60):
        log.record(settled(at))
    assert log.dropped == 20
    await log.close()
    report = check(tmp_path)
    assert report.kinds["settled"] == 70
    assert ["20 events were not recorded" in str(finding) for finding in report.findings] == [True]


async def test_a_disk_that_fails_now_and_then_leaves_a_log_that_is_whole_but_for_what_it_says(tmp_path, monkeypatch):
    chance = random.Random(3)
    log = log_in(tmp_path, rotate_bytes=3000)
    disk = FullDisk(monkeypatch)
    for at in range(200):
        disk.room = chance.choice([0, 100, 700, 1 << 40, 1 << 40])
        log.record(settled(at))
        await log.flush()
    disk.room = 1 << 40
    await log.close()
    report = check(tmp_path)
    assert all(finding.reported for finding in report.findings), report.findings
    missing = sum(int(finding.what.split()[0]) for finding in report.findings)
    assert missing == log.dropped
    assert report.kinds["settled"] + log.dropped == 200


def test_a_record_leaves_out_what_says_nothing(tmp_path):
    line, _ = sign_entry(KEY.secret, LOG, 1, Configured(at=1.5, fingerprint="abc"))
    assert line.startswith(b'{"seq":1,"kind":"configured","at":1.5,"fingerprint":"abc","mac":"')
    assert log_files(Path(tmp_path)) == []


def test_no_record_has_a_field_that_is_the_line_s_own():
    kinds = Event.__args__
    assert [kind for kind in kinds if {"seq", "mac"} & set(kind.__struct_fields__)] == []
