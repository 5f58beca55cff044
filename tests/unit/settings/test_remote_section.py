"""Nodes that are hosted APIs, as written: what is refused, and that no secret is read into the settings."""

from pathlib import Path

import pytest
import yaml

from din_extproc.domain.node import CredentialSource
from din_extproc.edge.credentials import CredentialFiles, CredentialUnavailable, read_credential
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings
from tests.support.stack import tenant

SECRET = "sk-0123456789"


def loaded(folder: Path, env: dict[str, str] | None = None, engine: str = "openai", **fields) -> Settings | ConfigRejected:
    node = {"id": "account", "url": "https://api.example/v1", "max_seq_len": 8192, **fields}
    node = {name: value for name, value in node.items() if value is not None}
    config = {"version": 1, "pools": {"cloud": {"model": "m", "engine": engine, "nodes": [node]}}, "tenants": [tenant("acme")]}
    file = folder / "din.yaml"
    file.write_text(yaml.safe_dump(config))
    return load(file, env or {})


def refused(folder: Path, **fields) -> str:
    found = loaded(folder, **fields)
    assert isinstance(found, ConfigRejected)
    return str(found)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("https://api.example/v1", ("api.example", 443, "/v1", True, "api.example")),
        ("https://api.example:8443/a/b/", ("api.example", 8443, "/a/b", True, "api.example:8443")),
        ("https://[::1]:8443", ("::1", 8443, "", True, "[::1]:8443")),
        ("http://127.0.0.1:8080/v1", ("127.0.0.1", 8080, "/v1", False, "127.0.0.1:8080")),
    ],
)
def test_a_url_is_read_into_its_parts(tmp_path, url, parts):
    found = loaded(tmp_path, url=url)
    assert isinstance(found, Settings), str(found)
    remote = found.pools[0].nodes[0].remote
    assert remote is not None
    assert (remote.host, remote.port, remote.base_path, remote.tls, remote.authority) == parts


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://api.example/v1", "clear text"),
        ("https://user:word@api.example/v1", "holds no credential"),
        ("https://api.example/v1?key=1", "is expected"),
        ("https://api.example/v1#part", "is expected"),
        ("https://api.example:99999/v1", "is expected"),
        ("ftp://api.example/v1", "is expected"),
        ("https://api.example/a b", "is expected"),
        ("https://", "is expected"),
    ],
)
def test_a_url_that_leaks_or_means_nothing_is_refused(tmp_path, url, message):
    assert message in refused(tmp_path, url=url)


@pytest.mark.parametrize("field", ["credential", "headers"])
def test_a_credential_in_the_file_is_refused_and_not_repeated(tmp_path, field):
    value = SECRET if field == "credential" else {"Authorization": f"Bearer {SECRET}"}
    assert SECRET not in refused(tmp_path, **{field: value})


def test_a_credential_has_one_source(tmp_path):
    assert "either `env` or `file`" in refused(tmp_path, credential={})
    assert "either `env` or `file`" in refused(tmp_path, credential={"env": "A", "file": "b"})


def test_an_engine_is_reached_by_its_address_and_an_api_by_its_url(tmp_path):
    assert "has no `url`" in refused(tmp_path, engine="vllm")
    assert "has no `address`" in refused(tmp_path, address="10.0.0.1:80")
    assert "has no url" in refused(tmp_path, url=None)
    assert "only nodes with a `url`" in refused(tmp_path, engine="vllm", url=None, address="10.0.0.1:80", headers={"a": "b"})


def test_a_missing_credential_is_a_warning_with_its_name(tmp_path):
    found = loaded(tmp_path, credential={"env": "CLOUD_KEY"})
    assert isinstance(found, Settings)
    assert "CLOUD_KEY is not set or empty" in str(found.warnings[0])
    assert not loaded(tmp_path, {"CLOUD_KEY": SECRET}, credential={"env": "CLOUD_KEY"}).warnings


def test_the_settings_hold_no_secret(tmp_path):
    found = loaded(tmp_path, {"CLOUD_KEY": SECRET}, credential={"env": "CLOUD_KEY"})
    assert SECRET not in repr(found)


@pytest.mark.parametrize("content", ["", " \n", "two\nlines", "é"])
def test_a_credential_that_no_header_takes_is_not_used(tmp_path, content):
    (tmp_path / "key").write_text(content)
    with pytest.raises(CredentialUnavailable):
        read_credential(CredentialSource(file=str(tmp_path / "key")), {})


def test_a_file_is_replaced_only_by_another_credential_and_kept_without_one(tmp_path):
    settings = loaded(tmp_path, credential={"env": "CLOUD_KEY"})
    env = {"CLOUD_KEY": SECRET}
    files, file = CredentialFiles(env), tmp_path / "credentials" / "account.yaml"
    assert files.write(settings.pools, settings.credentials_folder) == ()
    first = file.stat().st_ino
    files.write(settings.pools, settings.credentials_folder)
    assert file.stat().st_ino == first
    env["CLOUD_KEY"] = "another"
    files.write(settings.pools, settings.credentials_folder)
    assert "another" in file.read_text()
    env.clear()
    (problem,) = files.write(settings.pools, settings.credentials_folder)
    assert "another" in file.read_text()
    assert "another" not in problem
