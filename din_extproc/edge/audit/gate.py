"""Gate for requests while the audit log is not writable and the policy forbids unrecorded requests.

Invariant: a request waits at most `patience_s` and is then rejected with a reason.
"""

import asyncio

from din_extproc.domain.verdict import Refusal, RefusalCode

_RETRY_MS = 1000
_SHUT = Refusal(
    RefusalCode.AUDIT_UNAVAILABLE,
    "The audit log can't be written at the moment; no request is taken meanwhile.",
    retry_after_ms=_RETRY_MS,
    headers=(("retry-after", "1"), ("retry-after-ms", str(_RETRY_MS))),
)


class AuditGate:
    """Gate that is closed until `open`.

    Args:
        timeout_s: Maximum wait of a request; 0: none.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: set[asyncio.Future[None]] = set()

    async def wait_until_open(self) -> Refusal | None:
        """Wait until the gate opens. Return a refusal on time-out."""
        if not self._timeout_s:
            return _SHUT
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(self._timeout_s, _refuse_waiting, waiting)
        self._waiting.add(waiting)
        try:
            await waiting
        except TimeoutError:
            return _SHUT
        finally:
            timer.cancel()
            self._waiting.discard(waiting)
        return None

    def open(self) -> None:
        """Release all waiting requests."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)


def _refuse_waiting(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError())
