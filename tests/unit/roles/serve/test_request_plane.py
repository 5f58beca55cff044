"""The request plane's periodic work."""

import asyncio
from pathlib import Path

from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.support.waiting import turns

EXAMPLE = Path(__file__).parents[4] / "envoy" / "din.yaml"


class Renewals:
    """A ledger that keeps what was renewed, by turn of the loop."""

    def __init__(self) -> None:
        self.renewed: list[str] = []
        self.most_at_once = 0
        self._now = 0

    async def renew(self, _tenant: str, request_id: str, _lease_ms: int) -> None:
        if not self._now:
            asyncio.get_running_loop().call_soon(self._turned)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        self.renewed.append(request_id)

    def _turned(self) -> None:
        self._now = 0


async def test_thousands_of_leases_are_renewed_a_few_at_a_time() -> None:
    settings = load(EXAMPLE, {})
    assert isinstance(settings, Settings), str(settings)
    ledger = Renewals()
    plane = RequestPlane(settings, ledger, Background(), DecisionCounters())  # type: ignore[arg-type]
    held = [f"r-{number}" for number in range(2000)]
    plane.context.live.update(dict.fromkeys(held, "acme"))
    renewing = asyncio.ensure_future(plane._renew_leases())
    await turns()
    for ended in held[1000:1100]:
        del plane.context.live[ended]
    await renewing
    assert ledger.renewed == held[:1000] + held[1100:]
    assert ledger.most_at_once <= 64
