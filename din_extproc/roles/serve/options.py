"""The options of `din-extproc serve`."""

import sys
from pathlib import Path
from typing import Literal

from msgspec import Struct


class ServeOptions(Struct, frozen=True, kw_only=True):
    """The command line of `din-extproc serve`."""

    config: Path
    transport: Literal["wire", "grpcio"] = "wire"
    """The built-in HTTP/2 server, or grpcio's."""
    drain_s: float = 20.0
    """Seconds that open exchanges may take to end after SIGTERM."""
    log_level: str = "info"
    worker: int | None = None
    """The number of this worker process; None: the main process."""
    channel: int | None = None
    """The file descriptor of a worker's channel to the main process."""

    def worker_command(self, number: int, channel: int) -> list[str]:
        """Return the command line of one worker. `channel`: the file descriptor of its end."""
        command = [sys.executable, "-m", "din_extproc", "serve", "--config", str(self.config), "--log-level", self.log_level]
        command += ["--drain-s", str(self.drain_s), "--transport", self.transport]
        return [*command, "--worker", str(number), "--channel", str(channel)]
