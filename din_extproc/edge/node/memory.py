"""Free memory of the accelerators by `nvidia-smi`, or of the machine if there are none.

Invariant: the result is None if the memory is unknown.
"""

import asyncio
import shutil
from pathlib import Path

_QUERY = ("--query-gpu=memory.free", "--format=csv,noheader,nounits")
_TIMEOUT_S = 5.0
_MIB = 1 << 20
_KIB = 1 << 10


async def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the free bytes of all accelerators."""
    tool = shutil.which("nvidia-smi")
    free = None if tool is None else await _read_accelerators(tool)
    return _read_machine(meminfo) if free is None else free


async def _read_accelerators(tool: str) -> int | None:
    """Return the free bytes; None if the tool fails, hangs or prints something else."""
    quiet = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(tool, *_QUERY, stdin=quiet, stdout=asyncio.subprocess.PIPE, stderr=quiet)
    except OSError:
        return None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, _ = await process.communicate()
        return sum(int(line) for line in output.split()) * _MIB if output.strip() and process.returncode == 0 else None
    except (TimeoutError, ValueError):
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _read_machine(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * _KIB
    except (OSError, ValueError, IndexError):
        return None
    return None
