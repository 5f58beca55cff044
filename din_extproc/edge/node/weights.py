r"""SHA-256 of a model's weights, and the files that differ from the catalogue.

Invariant: shell tools give the same digest. The digest of a file is that of `sha256sum FILE`. The digest of a folder is that of its
manifest, the output of `sha256sum` for its files sorted by path:

    cd FOLDER
    find -L . -type f -not -path '*/.*' -not -name SHA256SUMS -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum

Hidden files and folders are not weights. `SHA256SUMS` in the folder is not part of the digest; it identifies the file that differs.
"""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from din_extproc.edge.replace_file import replace_file

MANIFEST = "SHA256SUMS"
_CHUNK = 8 << 20
_READERS = 4
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)").fullmatch

Progress = Callable[[int, int], None]
"""Called with bytes done and total bytes, from several threads, one at a time."""


class WeightsUnreadable(Exception):  # noqa: N818 - it says what the weights are
    """The weights cannot be read; the message names the file or folder."""


class Digest(Struct, frozen=True):
    """Digest of weights."""

    sha256: str
    """64 hexadecimal digits."""
    files: dict[str, str]
    """Digest of each file by path; a single file by its name."""
    size: int
    """Total bytes of all files."""


class WeightsMismatch(Struct, frozen=True):
    """The weights differ from the catalogue."""

    expected: str
    found: str
    files: tuple[str, ...]
    """Changed, missing or unknown files, as far as known."""

    def __str__(self) -> str:
        return f"the weights' sha256 is {self.found}, the catalogue says {self.expected}; {'; '.join(self.files)}"


class _Known(Struct, frozen=True):
    """Cached digest of a file, with its metadata at that time."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str


def verify_weights(path: Path, expected: str, cache: Path | None, progress: Progress) -> Digest | WeightsMismatch:
    """Compare weights with the expected digest; "" matches any. Blocks for about a second per GB.

    Args:
        path: A file, or the folder of the model's files.
        expected: 64 hexadecimal digits.
        cache: Cache file; files with unchanged size, mtime and inode are not read again. None: no cache.
        progress: Called repeatedly.

    Raises:
        WeightsUnreadable: A file is unreadable, the folder is empty, or a file name does not fit into a manifest.
    """
    found = compute_digest(path, cache, progress)
    if not expected or found.sha256 == expected:
        return found
    return WeightsMismatch(expected, found.sha256, tuple(_find_differences(path, expected, found)))


def compute_digest(path: Path, cache: Path | None, progress: Progress) -> Digest:
    """Return the digest of weights; see `verify`.

    Raises:
        WeightsUnreadable: As in `verify`.
    """
    try:
        names = list(_list_names(path))
        sizes = {name: _stat_file(path, name).stat() for name in names}
    except OSError as error:
        raise WeightsUnreadable(f"{error.filename or path}: {(error.strerror or str(error)).lower()}") from error
    if not names:
        raise WeightsUnreadable(f"{path}: there are no weights in this folder")
    known = _read_cache(cache)
    bytes_read = _BytesRead(sum(stat.st_size for stat in sizes.values()), progress)
    fresh: dict[str, _Known] = {}

    def hash_file(name: str) -> str:
        file, stat = _stat_file(path, name), sizes[name]
        key = str(file.resolve())
        before = known.get(key)
        if before is not None and (before.size, before.mtime_ns, before.inode) == (stat.st_size, stat.st_mtime_ns, stat.st_ino):
            bytes_read.add(stat.st_size)
            return before.sha256
        sha256 = _hash_file(file, bytes_read)
        fresh[key] = _Known(stat.st_size, stat.st_mtime_ns, stat.st_ino, sha256)
        return sha256

    with ThreadPoolExecutor(_READERS) as readers:
        files = dict(zip(names, readers.map(hash_file, names), strict=True))
    if cache is not None and fresh:
        _write_cache(cache, known | fresh)
    whole = files[path.name] if path.is_file() else hashlib.sha256(_make_manifest(files)).hexdigest()
    return Digest(whole, files, bytes_read.total)


def _list_names(path: Path) -> Iterator[str]:
    """Yield the paths of the files, relative to the folder and sorted by their bytes."""
    if path.is_file():
        yield path.name
        return
    found = []
    for folder, folders, files in os.walk(path, followlinks=True, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(folder).relative_to(path)
        found += [str(inside / name) for name in files if not name.startswith(".") and name != MANIFEST]
    for name in sorted(found, key=os.fsencode):
        if "\n" in name or "\\" in name or "\r" in name:
            raise WeightsUnreadable(f"{path}: {name!r} is no name for a manifest")
        yield name


def _raise_unreadable(error: OSError) -> None:
    raise error


def _stat_file(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _make_manifest(files: dict[str, str]) -> bytes:
    return b"".join(b"%s  %s\n" % (sha256.encode(), os.fsencode(name)) for name, sha256 in files.items())


class _BytesRead:
    """Sum of bytes read by several threads."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress(self._done, self.total)


def _hash_file(file: Path, bytes_read: _BytesRead) -> str:
    summed = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK))
    try:
        with file.open("rb", buffering=0) as stream:
            while size := stream.readinto(chunk):
                summed.update(chunk[:size])
                bytes_read.add(size)
    except OSError as error:
        raise WeightsUnreadable(f"{file}: {(error.strerror or str(error)).lower()}") from error
    return summed.hexdigest()


def _find_differences(path: Path, expected: str, found: Digest) -> Iterator[str]:
    """Yield the files that differ from the folder's manifest if its digest is the expected one; otherwise describe the mismatch."""
    if path.is_file():
        yield f"{path} differs"
        return
    listed = _read_manifest(path / MANIFEST)
    if listed is None:
        yield f"which file of {path} differs can't be told without its {MANIFEST}"
        return
    if hashlib.sha256(_make_manifest(dict(sorted(listed.items(), key=lambda line: os.fsencode(line[0]))))).hexdigest() != expected:
        yield f"{path / MANIFEST} is not the catalogue's either"
    for name in sorted(listed.keys() | found.files.keys()):
        if name not in found.files:
            yield f"{path / name} is missing"
        elif name not in listed:
            yield f"{path / name} does not belong there"
        elif listed[name] != found.files[name]:
            yield f"{path / name} differs"


def _read_manifest(manifest: Path) -> dict[str, str] | None:
    """Parse a manifest. Return None if it is missing or malformed."""
    try:
        lines = os.fsdecode(manifest.read_bytes()).splitlines()
    except OSError:
        return None
    found = [_LINE(line) for line in lines]
    return {line[2].removeprefix("./"): line[1] for line in found if line is not None} if all(found) else None


def _read_cache(cache: Path | None) -> dict[str, _Known]:
    if cache is None:
        return {}
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, _Known])
    except (OSError, msgspec.DecodeError):  # missing or malformed: read all files
        return {}


def _write_cache(cache: Path, known: dict[str, _Known]) -> None:
    """Write the cache. A failure only makes the next start slower."""
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        replace_file(cache, msgspec.json.encode(known), durable=False)
