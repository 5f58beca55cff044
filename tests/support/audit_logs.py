"""Audit logs for tests: written by the real writer, tampered with at random, and verified.

Rule: a tampering returns the records that it affects, so that a test can check whether the verifier names one of them.
"""

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path

from din_extproc.audit.chain import SigningKey
from din_extproc.audit.records import Event, SettlementRecord
from din_extproc.audit.report import AuditReport
from din_extproc.audit.verify import verify_log
from din_extproc.edge.audit.files import read_log
from din_extproc.edge.audit.log import AuditLog, AuditOptions

KEY = SigningKey("k1", b"a key of a test, long enough")
KEYS = {KEY.id: KEY.secret}


def settled(at: int, **fields) -> SettlementRecord:
    """Return a record like those of finished exchanges."""
    defaults = {"tenant": "acme", "key_id": "k", "model": "m", "outcome": "completed", "status": 200, "pool": "p", "node_id": "gpu-7"}
    defaults |= {"request_id": f"r-{at}", "trace_id": f"trace-{at:06d}", "prompt_tokens": at % 977, "completion_tokens": at % 91}
    return SettlementRecord(at=1_700_000_000.0 + at, **(defaults | fields))


def log_in(folder: Path, keys: tuple[SigningKey, ...] = (KEY,), on_blocked=lambda _: None, **options) -> AuditLog:
    """Return a started writer."""
    log = AuditLog(AuditOptions(**({"folder": folder, "replica": "gw-1"} | options)), keys, on_blocked)
    log.start()
    return log


async def written(folder: Path, events: Iterable[Event], **options) -> None:
    """Write events a few at a time, and close the log in order."""
    log = log_in(folder, **options)
    for at, event in enumerate(events):
        log.record(event)
        if at % 7 == 6:
            await log.flush()
    await log.close()


def write(folder: Path, count: int, **options) -> None:
    """Write a log of `count` exchanges."""
    asyncio.run(written(folder, [settled(at) for at in range(count)], **options))


def check(folder: Path, replica: str = "gw-1", keys=None) -> AuditReport:
    """Return the verifier's report."""
    return verify_log(read_log(folder, replica), KEYS if keys is None else keys)


def log_files(folder: Path) -> list[Path]:
    """Return segments, manifest and head."""
    return sorted(path for path in folder.iterdir() if path.suffix in {".jsonl", ".json"})


def tamper(folder: Path, chance: random.Random) -> str:
    """Change something in the log and return what was done."""
    deeds = (_edit, _edit, _delete, _swap, _truncate, _repeat, _remove_file, _swap_files, _insert)
    while True:
        before = {path: path.read_bytes() for path in log_files(folder)}
        damage = chance.choice(deeds)(folder, chance)
        if {path: path.read_bytes() for path in log_files(folder)} != before:
            return damage


def _some_file(folder: Path, chance: random.Random) -> Path:
    return chance.choice(log_files(folder))


def _edit(folder: Path, chance: random.Random) -> str:
    path = _some_file(folder, chance)
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    data[at] = chance.choice([byte for byte in b'0123456789abcdef"{},:\n AZ\xff' if byte != data[at]])
    path.write_bytes(bytes(data))
    return f"byte {at} of {path.name}"


def _insert(folder: Path, chance: random.Random) -> str:
    path = _some_file(folder, chance)
    data = path.read_bytes()
    at = chance.randrange(len(data) + 1)
    path.write_bytes(data[:at] + chance.choice([b"\n", b" ", b"0", b'{"seq":1}\n', b"\x00"]) + data[at:])
    return f"something put in at {at} of {path.name}"


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def _delete(folder: Path, chance: random.Random) -> str:
    path = _some_file(folder, chance)
    lines = _lines(path)
    at = chance.randrange(len(lines))
    count = chance.randint(1, 5)
    path.write_bytes(b"".join(lines[:at] + lines[at + count :]))
    return f"lines {at + 1} to {at + count} of {path.name} removed"


def _swap(folder: Path, chance: random.Random) -> str:
    path = _some_file(folder, chance)
    lines = _lines(path)
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    path.write_bytes(b"".join(lines))
    return f"lines {one + 1} and {other + 1} of {path.name} swapped"


def _truncate(folder: Path, chance: random.Random) -> str:
    path = _some_file(folder, chance)
    data = path.read_bytes()
    at = chance.randrange(len(data))
    path.write_bytes(data[:at])
    return f"{path.name} cut at {at} of {len(data)}"


def _repeat(folder: Path, chance: random.Random) -> str:
    path = _some_file(folder, chance)
    lines = _lines(path)
    at = chance.randrange(len(lines))
    lines.insert(chance.randrange(len(lines) + 1), lines[at])
    path.write_bytes(b"".join(lines))
    return f"line {at + 1} of {path.name} repeated"


def _remove_file(folder: Path, chance: random.Random) -> str:
    path = _some_file(folder, chance)
    path.unlink()
    return f"{path.name} removed"


def _swap_files(folder: Path, chance: random.Random) -> str:
    one, other = chance.sample(log_files(folder), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"{one.name} and {other.name} swapped"
