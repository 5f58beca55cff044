"""Writes runtime.lock and build.lock: every package of the image with its version and the hashes of its wheels, from pyproject.toml.

Run: make lock. Rule: the image installs nothing that does not stand here.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
_WHAT = {"runtime": "What the image installs", "build": "What builds the wheel inside the image"}


def main() -> None:
    """Ask uv, which resolves for the image's Python, not for the one that runs this."""
    project = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text())
    wanted = {
        "runtime": [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["exact"]],
        "build": project["build-system"]["requires"],
    }
    for name, requirements in wanted.items():
        command = [sys.executable, "-m", "uv", "pip", "compile", "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet", "-"]
        locked = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, check=True).stdout  # noqa: S603
        (HERE / f"{name}.lock").write_text(f"# {_WHAT[name]}, by hash: made by `make lock` from pyproject.toml.\n{locked}")


if __name__ == "__main__":
    main()
