"""What Envoy alone knows: how many access-log entries it has dropped.

Rule: an Envoy that can't be asked changes nothing; one that began anew counts from zero.
"""

import re

import aiohttp

from din_extproc.domain.node import Endpoint

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_DROPPED = re.compile(r"logs_dropped: (\d+)$", re.MULTILINE)


class DroppedLogs:
    """Asks the Envoy beside this sidecar."""

    def __init__(self, admin: Endpoint) -> None:
        self._url = f"http://{admin}/stats?filter=logs_dropped"
        self._latest = 0
        self.total = 0

    async def ask(self) -> None:
        """Once more."""
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(self._url) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return
        now = sum(int(count) for count in _DROPPED.findall(text))
        self.total += now - self._latest if now >= self._latest else now
        self._latest = now
