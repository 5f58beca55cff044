"""The digest of weights: the one that a shell gives, quick the second time, and exact about what is wrong."""

import hashlib
import os
import subprocess

import pytest

from din_extproc.edge.node import weights
from din_extproc.edge.node.weights import Digest, WeightsMismatch, WeightsUnreadable, compute_digest, verify_weights

RECIPE = "find -L . -type f -not -path '*/.*' -not -name SHA256SUMS -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum"


def ignore(_done, _total):
    """Nobody watches."""


@pytest.fixture
def folder(tmp_path):
    """A model as hubs store it: shards behind links, a hidden folder, names in an order that locales disagree on."""
    blobs, model = tmp_path / "blobs", tmp_path / "model"
    blobs.mkdir()
    (model / "sub").mkdir(parents=True)
    (model / ".cache").mkdir()
    (model / ".cache" / "lock").write_bytes(b"not weights")
    (model / ".gitattributes").write_bytes(b"not weights")
    for number, name in enumerate(["model-00001.safetensors", "Zeta.json", "alpha file.json", "sub/é.bin", "sub-1.bin"]):
        (blobs / str(number)).write_bytes(bytes([number]) * (number * 1000 + 1))
        (model / name).symlink_to(blobs / str(number))
    return model


def shell(folder, command: str) -> str:
    return subprocess.run(["/bin/sh", "-c", command], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_folders_digest_is_the_one_that_a_shell_gives(folder):
    found = compute_digest(folder, None, ignore)
    assert found.sha256 == shell(folder, RECIPE + " | sha256sum").split()[0]
    assert list(found.files) == ["Zeta.json", "alpha file.json", "model-00001.safetensors", "sub-1.bin", "sub/é.bin"]
    assert found.size == sum(number * 1000 + 1 for number in range(5))


def test_a_files_digest_is_its_sha256(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert verify_weights(file, hashlib.sha256(b"weights").hexdigest(), None, ignore) == Digest(
        hashlib.sha256(b"weights").hexdigest(), {"model.gguf": hashlib.sha256(b"weights").hexdigest()}, 7
    )


def test_progress_ends_at_the_whole(folder):
    steps = []
    compute_digest(folder, None, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (10_005, 10_005)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_one_flipped_byte_is_a_mismatch_that_names_its_file(folder):
    (folder / "SHA256SUMS").write_text(shell(folder, RECIPE))
    expected = compute_digest(folder, None, ignore).sha256
    assert expected == hashlib.sha256((folder / "SHA256SUMS").read_bytes()).hexdigest()
    shard = folder / "model-00001.safetensors"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]))
    found = verify_weights(folder, expected, None, ignore)
    assert isinstance(found, WeightsMismatch)
    assert found.files == (f"{shard} differs",)
    assert expected in str(found)


def test_missing_and_foreign_files_are_named(folder):
    (folder / "SHA256SUMS").write_text(shell(folder, RECIPE))
    expected = compute_digest(folder, None, ignore).sha256
    (folder / "Zeta.json").unlink()
    (folder / "adapter.bin").write_bytes(b"foreign")
    found = verify_weights(folder, expected, None, ignore)
    assert found.files == (f"{folder / 'Zeta.json'} is missing", f"{folder / 'adapter.bin'} does not belong there")


def test_without_a_manifest_the_folder_is_all_that_can_be_named(folder):
    found = verify_weights(folder, "0" * 64, None, ignore)
    assert found.files == (f"which file of {folder} differs can't be told without its SHA256SUMS",)


def test_a_manifest_of_another_version_is_reported_as_such(folder):
    (folder / "SHA256SUMS").write_text(f"{'1' * 64}  Zeta.json\n")
    found = verify_weights(folder, "0" * 64, None, ignore)
    assert found.files[0] == f"{folder / 'SHA256SUMS'} is not the catalogue's either"


def test_a_file_that_did_not_change_is_not_read_again(folder, tmp_path, monkeypatch):
    cache = tmp_path / "deep" / "weights.json"
    first = compute_digest(folder, cache, ignore)
    read = []
    original = weights._hash_file
    monkeypatch.setattr(weights, "_hash_file", lambda file, count: read.append(file.name) or original(file, count))
    assert compute_digest(folder, cache, ignore) == first
    assert read == []
    (folder / "Zeta.json").write_bytes(b"other")
    os.utime(folder / "Zeta.json", ns=(1, 1))
    assert compute_digest(folder, cache, ignore).sha256 != first.sha256
    assert read == ["Zeta.json"]


def test_a_broken_cache_is_no_cache(folder, tmp_path):
    cache = tmp_path / "weights.json"
    cache.write_bytes(b'{"x": 1}')
    assert compute_digest(folder, cache, ignore) == compute_digest(folder, None, ignore)


def test_a_cache_that_cant_be_written_is_done_without(folder):
    assert compute_digest(folder, folder / "Zeta.json" / "cache", ignore) == compute_digest(folder, None, ignore)


def test_a_folder_without_weights_is_reported(tmp_path):
    with pytest.raises(WeightsUnreadable, match="no such file"):
        compute_digest(tmp_path / "missing", None, ignore)
    with pytest.raises(WeightsUnreadable, match="no weights"):
        compute_digest(tmp_path, None, ignore)
    (tmp_path / "new\nline").write_bytes(b"")
    with pytest.raises(WeightsUnreadable, match="no name"):
        compute_digest(tmp_path, None, ignore)
