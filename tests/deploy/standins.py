"""Stands in for programs that need a cluster, a container engine or root: checks what they were asked to do, as far as that goes here.

Run: python -m tests.deploy.standins PROGRAM ARGUMENT ...
"""

import sys
from itertools import pairwise
from pathlib import Path

import helm_python
import yaml

from tests.deploy.shipped import ROOT

_TRIAL = {"redis": {"bundled": {"enabled": True}}}


def docker(arguments: list[str]) -> None:
    """`docker compose -f FILE up`: the file is there and has services."""
    assert arguments[0] == "compose"
    file = ROOT / arguments[arguments.index("-f") + 1]
    assert yaml.safe_load(file.read_text())["services"]
    assert "up" in arguments


def helm(arguments: list[str]) -> None:
    """`helm install NAME CHART ...`: the chart renders."""
    verb, name, chart = arguments[:3]
    assert verb == "install"
    with helm_python.Chart.load(str(ROOT / chart)) as loaded:
        given = dict(word.split("=", 1) for before, word in pairwise(arguments) if before == "--set")
        assert loaded.render(_TRIAL | given, name=name, namespace=arguments[arguments.index("-n") + 1])


def sudo(arguments: list[str]) -> None:
    """`sudo cp FILE ... FOLDER` and `sudo systemctl VERB UNIT ...`: files and units are there."""
    units = ROOT / "deploy" / "systemd"
    if arguments[0] == "cp":
        files = [path for pattern in arguments[1:-1] for path in ROOT.glob(pattern)]
        assert files, arguments
    else:
        verb, *named = [word for word in arguments[1:] if word != "--now"]
        assert (arguments[0], verb in {"enable", "restart", "reload"}) == ("systemctl", True)
        assert all((units / f"{unit}.service").is_file() for unit in named)


def kubectl(arguments: list[str]) -> None:
    """`kubectl apply -f FILE`: the file holds resources; `kubectl create secret` of a folder."""
    if arguments[:3] == ["create", "secret", "generic"]:
        assert arguments[-1].startswith("--from-file=/")
        print(f"secret/{arguments[3]} created")
        return
    assert arguments[:2] == ["apply", "-f"]
    resources = list(yaml.safe_load_all(Path(arguments[2]).read_text()))
    assert resources
    assert all({"apiVersion", "kind", "metadata"} <= each.keys() for each in resources)


if __name__ == "__main__":
    {"docker": docker, "helm": helm, "kubectl": kubectl, "sudo": sudo}[Path(sys.argv[1]).name](sys.argv[2:])
