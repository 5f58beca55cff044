"""Editor of the key file for `din-extproc keys`: read, modified and replaced atomically, one writer at a time.

Invariant: readers never see a partial file, and a new file is readable by its owner only.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from din_extproc.edge.replace_file import replace_file

_PRIVATE = 0o600
_HEAD = "# Kept by `din-extproc keys`. Hashes only: a key itself is shown once, when it is made.\n"


@contextlib.contextmanager
def edit_keys(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the entries for modification; write them when the block ends without an error.

    Raises:
        OSError: the file or its folder can't be written.
    """
    with (file.parent / f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries: list[dict[str, Any]] = []
        mode = _PRIVATE
        if file.exists():
            entries = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("keys") or []
            mode = file.stat().st_mode & 0o777
        yield entries
        text = _HEAD + yaml.safe_dump({"keys": entries}, sort_keys=False)
        replace_file(file, text.encode(), mode=mode, durable=True)
