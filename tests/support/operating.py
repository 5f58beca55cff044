"""An operator at the admin port of a `Stack` whose admin keys may give orders."""

import os
import subprocess
import sys
from typing import Any

import httpx

from tests.support.stack import Stack, key_of, tenant

OPS, READER = "ops", "prometheus"


def admin_keys() -> list[dict[str, Any]]:
    """`gateway.admin.keys`: one that may give orders, and one that may only look."""
    return [{"id": name, "hash": tenant(name)["keys"][0]["hash"], **({"operate": True} if name == OPS else {})} for name in (OPS, READER)]


class Operator:
    """Asks and orders, over HTTP and by the command line."""

    def __init__(self, stack: Stack, key: str = OPS) -> None:
        self._stack = stack
        self._key = "" if not key else key_of(key)

    def get(self, page: str) -> httpx.Response:
        """One page."""
        return httpx.get(f"{self._stack.admin_url}{page}", headers=self._headers())

    def post(self, page: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """One order."""
        return httpx.post(f"{self._stack.admin_url}{page}", headers=self._headers(), json=body or {})

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of `din-extproc` for this stack."""
        command = [sys.executable, "-m", "din_extproc", *arguments, "-c", str(self._stack.config_file)]
        env = {**os.environ, "DIN_ADMIN_KEY": self._key}
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)

    def states(self) -> dict[str, str]:
        """The state of every node."""
        return {row["node"]["id"]: row["state"] for row in self.get("/nodes").json()["nodes"]}

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"} if self._key else {}
