"""What `din-extproc serve` is told on its command line."""

import sys
from pathlib import Path
from typing import Literal

from msgspec import Struct


class ServeOptions(Struct, frozen=True, kw_only=True):
    """The command line of `din-extproc serve`."""

    config: Path
    transport: Literal["wire", "grpcio"] = "wire"
    """Our own HTTP/2, or grpcio's."""
    drain_s: float = 20.0
    """How long open exchanges may go on after SIGTERM."""
    log_level: str = "info"
    worker: int | None = None
    """Which worker this process is; None: the one that is started by hand."""
    channel: int | None = None
    """A worker's end of the channel to the process that started it."""

    def worker_command(self, number: int, channel: int) -> list[str]:
        """The command line of one worker. `channel`: its end, a file descriptor."""
        command = [sys.executable, "-m", "din_extproc", "serve", "--config", str(self.config), "--log-level", self.log_level]
        command += ["--drain-s", str(self.drain_s), "--transport", self.transport]
        return [*command, "--worker", str(number), "--channel", str(channel)]
