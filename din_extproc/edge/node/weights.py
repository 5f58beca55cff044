r"""The SHA-256 of a model's weights, and what of them differs from what the catalogue knows.

Rule: anybody with a shell can get the same digest. A file's is that of `sha256sum FILE`. A folder's is that of its manifest, the lines
that `sha256sum` prints for its files sorted by path:

    cd FOLDER
    find -L . -type f -not -path '*/.*' -not -name SHA256SUMS -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum

Hidden files and folders are not weights. A manifest that lies in the folder as `SHA256SUMS` is not part of it; it tells which file differs.
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

MANIFEST = "SHA256SUMS"
_CHUNK = 8 << 20
_READERS = 4
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)").fullmatch

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all; from several threads, one at a time."""


class WeightsUnreadable(Exception):  # noqa: N818 - it says what the weights are
    """There is nothing to make a digest of; the message names the file or folder."""


class Digest(Struct, frozen=True):
    """What the weights are."""

    sha256: str
    """64 hexadecimal digits."""
    files: dict[str, str]
    """Each file's own digest by its path; a single file stands under its name."""
    size: int
    """Bytes, all files together."""


class WeightsMismatch(Struct, frozen=True):
    """The weights are not those of the catalogue."""

    expected: str
    found: str
    files: tuple[str, ...]
    """What differs: changed, missing or unknown files, as far as that can be told."""

    def __str__(self) -> str:
        return f"the weights' sha256 is {self.found}, the catalogue says {self.expected}; {'; '.join(self.files)}"


class _Known(Struct, frozen=True):
    """A file as it was when it was last read."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str


def verify(path: Path, expected: str, cache: Path | None, progress: Progress) -> Digest | WeightsMismatch:
    """Hold weights against the catalogue's digest; "" expects nothing. Blocks for as long as reading takes: about a second per GB.

    Args:
        path: A file, or a folder with all files of the model.
        expected: 64 hexadecimal digits.
        cache: Where digests are kept; files whose size, mtime and inode did not change are not read again. None: nowhere.
        progress: Told now and then.

    Raises:
        Unreadable: a file can't be read, the folder has none, or a name no manifest can hold.
    """
    found = digest(path, cache, progress)
    if not expected or found.sha256 == expected:
        return found
    return WeightsMismatch(expected, found.sha256, tuple(_blame(path, expected, found)))


def digest(path: Path, cache: Path | None, progress: Progress) -> Digest:
    """The digest of weights; see `verify`.

    Raises:
        Unreadable: likewise.
    """
    try:
        names = list(_names(path))
        sizes = {name: _of(path, name).stat() for name in names}
    except OSError as error:
        raise WeightsUnreadable(f"{error.filename or path}: {(error.strerror or str(error)).lower()}") from error
    if not names:
        raise WeightsUnreadable(f"{path}: there are no weights in this folder")
    known = _read_cache(cache)
    tally = _BytesRead(sum(stat.st_size for stat in sizes.values()), progress)
    fresh: dict[str, _Known] = {}

    def one(name: str) -> str:
        file, stat = _of(path, name), sizes[name]
        key = str(file.resolve())
        before = known.get(key)
        if before is not None and (before.size, before.mtime_ns, before.inode) == (stat.st_size, stat.st_mtime_ns, stat.st_ino):
            tally.add(stat.st_size)
            return before.sha256
        read = _sha256(file, tally)
        fresh[key] = _Known(stat.st_size, stat.st_mtime_ns, stat.st_ino, read)
        return read

    with ThreadPoolExecutor(_READERS) as readers:
        files = dict(zip(names, readers.map(one, names), strict=True))
    if cache is not None and fresh:
        _write_cache(cache, known | fresh)
    whole = files[path.name] if path.is_file() else hashlib.sha256(_manifest(files)).hexdigest()
    return Digest(whole, files, tally.total)


def _names(path: Path) -> Iterator[str]:
    """The weights' files, sorted by the bytes of their paths, which are relative to the folder."""
    if path.is_file():
        yield path.name
        return
    found = []
    for folder, folders, files in os.walk(path, followlinks=True, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(folder).relative_to(path)
        found += [str(inside / name) for name in files if not name.startswith(".") and name != MANIFEST]
    for name in sorted(found, key=os.fsencode):
        if "\n" in name or "\\" in name or "\r" in name:
            raise WeightsUnreadable(f"{path}: {name!r} is no name for a manifest")
        yield name


def _raise(error: OSError) -> None:
    raise error


def _of(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _manifest(files: dict[str, str]) -> bytes:
    return b"".join(b"%s  %s\n" % (sha256.encode(), os.fsencode(name)) for name, sha256 in files.items())


class _BytesRead:
    """Adds up what several threads have read."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress(self._done, self.total)


def _sha256(file: Path, tally: _BytesRead) -> str:
    summed = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK))
    try:
        with file.open("rb", buffering=0) as stream:
            while size := stream.readinto(chunk):
                summed.update(chunk[:size])
                tally.add(size)
    except OSError as error:
        raise WeightsUnreadable(f"{file}: {(error.strerror or str(error)).lower()}") from error
    return summed.hexdigest()


def _blame(path: Path, expected: str, found: Digest) -> Iterator[str]:
    """Which files differ: those that do from the folder's own manifest, if that is the catalogue's; else all that is known."""
    if path.is_file():
        yield f"{path} differs"
        return
    listed = _listed(path / MANIFEST)
    if listed is None:
        yield f"which file of {path} differs can't be told without its {MANIFEST}"
        return
    if hashlib.sha256(_manifest(dict(sorted(listed.items(), key=lambda line: os.fsencode(line[0]))))).hexdigest() != expected:
        yield f"{path / MANIFEST} is not the catalogue's either"
    for name in sorted(listed.keys() | found.files.keys()):
        if name not in found.files:
            yield f"{path / name} is missing"
        elif name not in listed:
            yield f"{path / name} does not belong there"
        elif listed[name] != found.files[name]:
            yield f"{path / name} differs"


def _listed(manifest: Path) -> dict[str, str] | None:
    """A manifest's lines, in any order. None: there is none, or it is none."""
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
    except (OSError, msgspec.DecodeError):  # none yet, or not ours: everything is read
        return {}


def _write_cache(cache: Path, known: dict[str, _Known]) -> None:
    """A cache that can't be written costs time at the next start, nothing else."""
    new = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(msgspec.json.encode(known))
        new.replace(cache)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
