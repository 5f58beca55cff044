"""A webhook: JSON events, signed and repeated until the receiver takes them.

Invariant: an event keeps its id over all attempts, so that the receiver can drop repetitions.
"""

import asyncio
import hashlib
import hmac
import logging
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 5.0
_PAUSES_S: Final = (1.0, 5.0, 30.0, 120.0, 600.0)
"""Before each further attempt."""


def sign(secret: str, at: int, body: bytes) -> str:
    """Return the value of `x-din-signature`: the time, and the HMAC-SHA256 of the time, a dot and the body, in hex digits."""
    digest = hmac.new(secret.encode(), b"%d.%b" % (at, body), hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


class Webhook:
    """One receiver.

    Args:
        url: Where events are posted.
        secret: The key of their signature.
        wall: Returns the seconds since the epoch.
        pause: Waits between attempts.
    """

    def __init__(self, url: str, secret: str, wall: Callable[[], float], pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._url = url
        self._secret = secret
        self._wall = wall
        self._pause = pause

    async def deliver(self, event: dict[str, Any]) -> None:
        """Post an event until it is taken or all attempts have failed, which is logged."""
        body = msgspec.json.encode(event)
        for pause_s in (*_PAUSES_S, None):
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._post, body)
            except OSError as error:
                if pause_s is None:
                    _log.error("webhook %s: event %s given up after %d attempts: %s", self._url, event["id"], len(_PAUSES_S) + 1, error)
                    return
                _log.warning("webhook %s: %s; next attempt in %.0f s", self._url, error, pause_s)
                await self._pause(pause_s)
            else:
                return

    def _post(self, body: bytes) -> None:
        """Post once. Every answer but a success is an `OSError`."""
        headers = {"content-type": "application/json", "x-din-signature": sign(self._secret, int(self._wall()), body)}
        request = urllib.request.Request(self._url, body, headers, method="POST")  # noqa: S310 - the scheme was checked
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310 - likewise
            return
