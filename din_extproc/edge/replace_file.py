"""Replacement of a whole file: readers see the old content or the new content, never a part of either."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, *, mode: int = 0o666, durable: bool) -> None:
    """Write a file beside the given one, then rename it to that.

    Args:
        path: The file, in an existing folder.
        content: The whole new content.
        mode: Permissions of the file, reduced by the umask.
        durable: Wait until the content is on disk before the rename, so that a power failure leaves no empty file.

    Raises:
        OSError: the file or its folder can't be written; nothing is left beside the file.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as output:
            output.write(content)
            output.flush()
            if durable:
                os.fsync(output.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
