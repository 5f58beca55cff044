"""Whatever is done to a log's files, the verifier finds it."""

import random
import shutil
from pathlib import Path

import pytest

from din_extproc.audit import chain
from din_extproc.audit.chain import SigningKey
from din_extproc.audit.records import Witness
from din_extproc.audit.report import find_contradictions
from din_extproc.audit.verify import verify_log
from din_extproc.edge.audit.files import read_log
from tests.support.audit_logs import KEY, KEYS, check, log_files, settled, tamper, write

_TAMPERINGS = 1000
RECORDS = 80


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    write(folder, RECORDS, rotate_bytes=6_500)
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")


def test_a_log_that_nobody_touched_is_whole(original):
    report = check(original)
    assert report.findings == []
    assert report.segments == 4
    assert report.kinds == {"segment": 4, "settled": RECORDS}
    assert report.records == report.last == RECORDS + 4


def test_a_thousand_random_changes_are_all_found(original, tmp_path):
    chance = random.Random(20_261_130)
    kept = {path.name: path.read_bytes() for path in log_files(original)}
    missed = []
    for _ in range(_TAMPERINGS):
        for path in log_files(tmp_path):
            path.unlink()
        for name, data in kept.items():
            (tmp_path / name).write_bytes(data)
        deed = tamper(tmp_path, chance)
        if not check(tmp_path).findings:
            missed.append(deed)
    assert missed == []


def segment(folder: Path, number: int) -> Path:
    return folder / f"gw-1-{number:06d}.jsonl"


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def seq_of(line: bytes) -> int:
    return chain.read_number(chain.parse_line(line))


@pytest.mark.parametrize("at", [3, 17, 20])
def test_an_edited_record_is_named_with_its_line_and_its_trace(folder, at):
    path = segment(folder, 2)
    all_lines = lines(path)
    seq = seq_of(all_lines[at])
    all_lines[at] = all_lines[at].replace(b'"tenant":"acme"', b'"tenant":"evil"')
    path.write_bytes(b"".join(all_lines))
    (finding,) = check(folder).findings
    assert (finding.file, finding.line, finding.seq) == (path.name, at + 1, seq)
    assert finding.trace_id == f"trace-{int(finding.trace_id[6:]):06d}"
    assert f"record {seq} has been changed" in str(finding)


def test_an_edited_mac_is_one_finding(folder):
    path = segment(folder, 1)
    all_lines = lines(path)
    all_lines[5] = all_lines[5][:-10] + b"00000000" + all_lines[5][-2:]
    path.write_bytes(b"".join(all_lines))
    path.write_bytes(path.read_bytes().replace(b"00000000}\n", b'0000000"}\n'))
    assert [finding.seq for finding in check(folder).findings] == [6]


def test_a_removed_record_is_named(folder):
    path = segment(folder, 3)
    all_lines = lines(path)
    seq = seq_of(all_lines[7])
    path.write_bytes(b"".join(all_lines[:7] + all_lines[10:]))
    (finding,) = check(folder).findings
    assert (finding.seq, finding.last) == (seq, seq + 2)
    assert "are missing" in finding.what


def test_swapped_records_are_named(folder):
    path = segment(folder, 2)
    all_lines = lines(path)
    one, other = seq_of(all_lines[4]), seq_of(all_lines[9])
    all_lines[4], all_lines[9] = all_lines[9], all_lines[4]
    path.write_bytes(b"".join(all_lines))
    assert [finding.seq for finding in check(folder).findings] == [one, other]


def test_a_record_that_is_renumbered_is_named_and_blames_no_other(folder):
    path = segment(folder, 1)
    all_lines = lines(path)
    all_lines[4] = all_lines[4].replace(b'"seq":5,', b'"seq":95,')
    path.write_bytes(b"".join(all_lines))
    assert [finding.seq for finding in check(folder).findings] == [5]


def test_a_cut_end_is_named(folder):
    path = segment(folder, 4)
    all_lines = lines(path)
    first, last = seq_of(all_lines[-3]), seq_of(all_lines[-1])
    path.write_bytes(b"".join(all_lines[:-3]))
    (finding,) = check(folder).findings
    assert (finding.seq, finding.last) == (first, last)


def test_a_missing_segment_is_named_with_its_records(folder):
    first, last = seq_of(lines(segment(folder, 2))[0]), seq_of(lines(segment(folder, 2))[-1])
    segment(folder, 2).unlink()
    (finding,) = check(folder).findings
    assert (finding.file, finding.seq, finding.last) == (segment(folder, 2).name, first, last)


def test_all_files_of_the_end_together_are_missed_by_nobody_but_another_replica(folder):
    """Whoever can put back an older head takes the end off unseen, unless another replica has seen it."""
    older = read_log(folder, "gw-1")
    report = verify_log(older, KEYS, macs=True)
    seq, mac = 30, report.macs[30]
    write(folder, 40, replica="gw-2")
    other = check(folder, "gw-2")
    other.witnesses.append(Witness(at=1.0, replica="gw-1", record=seq, chain=mac))
    assert list(find_contradictions([report, other])) == []
    other.witnesses.append(Witness(at=1.0, replica="gw-1", record=report.last + 5, chain=mac))
    (finding,) = find_contradictions([report, other])
    assert (finding.seq, finding.last) == (report.last + 1, report.last + 5)
    other.witnesses[-1:] = [Witness(at=1.0, replica="gw-1", record=seq, chain="0" * 64)]
    (finding,) = find_contradictions([report, other])
    assert "record 30 is not the one that gw-2 saw" in str(finding)
    (finding,) = find_contradictions([other])
    assert "the whole log of gw-1 is missing" in str(finding)


def test_another_key_proves_nothing(folder):
    assert len(check(folder, keys={"k1": b"not the key at all, no"}).findings) > RECORDS
    assert all("which is not here" in finding.what or finding.line for finding in check(folder, keys={"k2": KEY.secret}).findings)


def test_a_log_under_two_keys_is_verified_with_both(tmp_path):
    second = SigningKey("k2", b"the key after the first one")
    write(tmp_path, 10)
    write(tmp_path, 10, keys=(KEY, second))
    assert check(tmp_path, keys={**KEYS, "k2": second.secret}).findings == []
    assert check(tmp_path).findings != []


def test_settled_records_have_nothing_of_the_prompt():
    assert {"prompt", "messages", "content", "body", "hash"} & set(settled(1).__struct_fields__) == set()
