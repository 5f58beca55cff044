"""The container image, as far as it can be checked without building it: what it copies, installs and runs as."""

import re
import tomllib
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.shipped import DEPLOY, ROOT

HERE = DEPLOY / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def steps() -> list[dict[str, str]]:
    return DockerfileParser(str(HERE / "Dockerfile")).structure


def values(steps: list[dict[str, str]], instruction: str) -> list[str]:
    return [step["value"] for step in steps if step["instruction"] == instruction]


def last_stage(steps: list[dict[str, str]]) -> list[dict[str, str]]:
    begins = [index for index, step in enumerate(steps) if step["instruction"] == "FROM"]
    return steps[begins[-1] :]


def test_it_runs_as_a_user_without_rights_and_receives_signals_itself(steps):
    stage = last_stage(steps)
    assert values(stage, "USER") == ["65532:65532"]
    assert values(stage, "ENTRYPOINT") == ['["din-extproc"]']
    assert values(stage, "CMD") == ['["serve", "--config", "/etc/din/din.yaml"]']
    after = stage[[step["instruction"] for step in stage].index("USER") :]
    assert {step["instruction"] for step in after} <= {"USER", "WORKDIR", "ENTRYPOINT", "CMD", "STOPSIGNAL"}


def test_nothing_comes_from_elsewhere_than_hashed_packages(steps):
    assert values(steps, "ADD") == []
    runs = " ".join(values(steps, "RUN"))
    assert not re.search(r"curl|wget|apt|git ", runs)
    for install in re.findall(r"pip install [^&]*", runs):
        assert "--require-hashes" in install or "--no-index" in install, install


def test_what_it_copies_is_in_the_repository_and_not_ignored(steps):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for copied in values(steps, "COPY"):
        if copied.startswith("--from"):
            continue
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(Path(source).match(pattern) for pattern in allowed), source


def test_the_stages_share_one_base_that_can_be_pinned(steps):
    assert values(steps, "FROM") == ["${BASE} AS build", "${BASE}"]
    [base] = [value for value in values(steps, "ARG") if value.startswith("BASE=")]
    minor = re.search(r"python:(\d+\.\d+)-slim", base)
    assert minor is not None
    assert minor[1] in PROJECT["project"]["requires-python"], "the Python that the tests run on"


@pytest.mark.parametrize(
    ("lock", "wanted"),
    [
        ("runtime.lock", PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["exact"]),
        ("build.lock", PROJECT["build-system"]["requires"]),
    ],
)
def test_the_locks_meet_what_the_project_asks_for_and_hash_everything(lock, wanted):
    entries = re.split(r"\n(?=\S)", "\n".join((HERE / lock).read_text().splitlines()[1:]))
    versions = {}
    for entry in entries:
        pin = Requirement(entry.partition(" \\")[0])
        assert "--hash=sha256:" in entry, entry
        versions[canonicalize_name(pin.name)] = next(iter(pin.specifier)).version
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), f"{requirement}: run `make lock`"
