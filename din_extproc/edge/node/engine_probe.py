"""Status of an engine, from its metrics page and its list of models.

Invariant: time and bytes are bounded. Failures of the engine are part of the result, not exceptions.
"""

import asyncio
from collections.abc import Callable

import aiohttp
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.southbound.listing import PATH, ModelNames, parse_models
from din_extproc.southbound.load import PAGE_LIMIT, SOURCES, EngineLoad, Rates

_TIMEOUT_S = 2.0
_OK = 200


class EngineUnreachable(Exception):  # noqa: N818 - it says what the question is
    """The engine did not respond. `gone`: nothing listens there; otherwise it is slow."""

    def __init__(self, reason: str, *, gone: bool) -> None:
        super().__init__(reason)
        self.gone = gone


class EngineStatus(Struct, frozen=True):
    """Status of an engine at one time."""

    at: float
    """Seconds, by the probe's clock."""
    load: EngineLoad = EngineLoad()
    rates: Rates = Rates()
    problem: str = ""
    """Reason why it accepts no requests; "" if it does."""
    slow: bool = False
    """It did not respond in time: it may be dead or busy."""
    names: ModelNames | None = None
    """The listed models; None: the list could not be read."""


class EngineProbe:
    """Probe of one engine.

    Args:
        session: HTTP session.
        engine: Kind of engine.
        metrics_url: URL of its metrics page.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, session: aiohttp.ClientSession, engine: str, metrics_url: str, clock: Callable[[], float]) -> None:
        self._session = session
        self._source = SOURCES[engine]
        self._metrics_url = metrics_url
        self._clock = clock
        self._before: tuple[float, EngineLoad] | None = None
        self._rates = Rates()

    async def read(self) -> EngineStatus:
        """Read the load. A metrics page that the engine does not serve is not a problem."""
        try:
            status, page = await fetch(self._session, self._metrics_url, PAGE_LIMIT)
        except EngineUnreachable as error:
            self._before = None
            return EngineStatus(self._clock(), problem=str(error), slow=not error.gone)
        now, load = self._clock(), self._source.read(page) if status == _OK else EngineLoad()
        if self._before is not None:
            since, before = self._before
            self._rates = self._rates.update(before, load, now - since)
        self._before = now, load
        return EngineStatus(now, load, self._rates)

    async def check_health(self, url: str, model: str) -> EngineStatus:
        """Read the load and check that the engine serves the model. `url`: its HTTP interface, without a trailing slash."""
        look, names = await asyncio.gather(self.read(), self._list(url))
        if isinstance(names, EngineUnreachable):
            return EngineStatus(look.at, look.load, look.rates, str(names), slow=not names.gone)
        if isinstance(names, str):
            return EngineStatus(look.at, look.load, look.rates, names)
        problem = "" if model in names.models else f"the engine lists {', '.join(sorted(names.models)) or 'no model'}, not {model}"
        return EngineStatus(look.at, look.load, look.rates, problem, names=names)

    async def read_with_adapters(self, url: str) -> EngineStatus:
        """Read the load and what the engine lists, as far as it lists anything. `url`: its HTTP interface, without a trailing slash."""
        look, names = await asyncio.gather(self.read(), self._list(url))
        return replace(look, names=names) if isinstance(names, ModelNames) else look

    async def _list(self, url: str) -> ModelNames | str | EngineUnreachable:
        """Return the names that the engine lists, or why it lists none."""
        try:
            status, body = await fetch(self._session, url + PATH, PAGE_LIMIT)
        except EngineUnreachable as error:
            return error
        names = parse_models(body) if status == _OK else None
        return f"the engine answers {status} to {PATH}: it is not ready" if names is None else names


async def fetch(session: aiohttp.ClientSession, url: str, limit: int) -> tuple[int, bytes]:
    """Fetch a page and return its status and body.

    Args:
        session: HTTP session.
        url: URL of the page.
        limit: Maximum bytes of the body; a longer one is truncated.

    Raises:
        EngineUnreachable: No response within two seconds, or the connection failed.
    """
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), allow_redirects=False) as reply:
            body = bytearray()
            async for chunk in reply.content.iter_any():
                body += chunk
                if len(body) >= limit:
                    break
            return reply.status, bytes(body[:limit])
    except TimeoutError as error:
        raise EngineUnreachable(f"{url} did not respond within {_TIMEOUT_S:g} s", gone=False) from error
    except aiohttp.ClientError as error:
        raise EngineUnreachable(f"{url} can't be reached: {error or type(error).__name__}", gone=True) from error
