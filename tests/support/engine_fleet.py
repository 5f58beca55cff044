"""Several modelled engines in one child process, which starts faster than several processes.

Run: python -m tests.support.engine_fleet OPTIONS   (a JSON list of `EngineSimOptions`)
"""

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Self

import msgspec
import uvloop

from din_extproc.tools.engine_sim.main import EngineSimOptions, build
from tests.support.servers import EngineSim


class FleetMember(EngineSim):
    """One engine of a fleet."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port


class EngineFleet(EngineSim):
    """The process of all engines of a fleet.

    Args:
        engines: Options of each, by a name of one's own.
    """

    def __init__(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._engines = engines
        self.members: dict[str, FleetMember] = {}

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.support.engine_fleet", json.dumps(list(self._engines.values()))]

    def start(self) -> Self:
        """Start the engines and read their ports."""
        super().start()
        ports = re.findall(rb"LISTENING http://127\.0\.0\.1:(\d+)", (self.folder / "log").read_bytes())
        self.members = {name: FleetMember(int(port)) for name, port in zip(self._engines, ports, strict=True)}
        return self

    def stop(self) -> None:
        """End the process and remove all folders."""
        super().stop()
        for member in self.members.values():
            member.stop()


async def _serve(fleet: list[EngineSimOptions]) -> None:
    servers = [build(options) for options in fleet]
    ports = [await server.start("127.0.0.1", 0) for server in servers]
    print("\n".join(f"LISTENING http://127.0.0.1:{port}" for port in ports), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=list[EngineSimOptions])))
