"""Asks an engine how it does: its metrics page, and which models it lists.

Rule: bounded in time and bytes, and never an exception for what an engine does: what went wrong is in the answer.
"""

import asyncio
from collections.abc import Callable

import aiohttp
from msgspec import Struct

from din_extproc.southbound.listing import PATH, parse_models
from din_extproc.southbound.load import PAGE_LIMIT, SOURCES, EngineLoad, Rates

_TIMEOUT_S = 2.0
_OK = 200


class EngineUnreachable(Exception):  # noqa: N818 - it says what the question is
    """No answer; `gone`: nobody listens there, as opposed to being slow."""

    def __init__(self, reason: str, *, gone: bool) -> None:
        super().__init__(reason)
        self.gone = gone


class EngineStatus(Struct, frozen=True):
    """An engine as it was seen at one moment."""

    at: float
    """Seconds, by the clock that the probe was given."""
    load: EngineLoad = EngineLoad()
    rates: Rates = Rates()
    problem: str = ""
    """Why it takes no requests; "" when it does."""
    slow: bool = False
    """It did not answer in time: it may be dead, or only busy."""


class EngineProbe:
    """Asks one engine.

    Args:
        session: Carries the questions.
        engine: Its kind.
        metrics_url: Where its metrics page is.
        clock: Seconds that only grow.
    """

    def __init__(self, session: aiohttp.ClientSession, engine: str, metrics_url: str, clock: Callable[[], float]) -> None:
        self._session = session
        self._source = SOURCES[engine]
        self._metrics_url = metrics_url
        self._clock = clock
        self._before: tuple[float, EngineLoad] | None = None
        self._rates = Rates()

    async def read(self) -> EngineStatus:
        """How busy it is. A page that the engine does not serve says nothing, and is no problem."""
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

    async def look(self, url: str, model: str) -> EngineStatus:
        """How busy it is, and whether it serves the model. `url`: of its HTTP interface, without a slash at the end."""
        look, problem = await asyncio.gather(self.read(), self._why_not(url, model))
        if isinstance(problem, EngineUnreachable):
            return EngineStatus(look.at, look.load, look.rates, str(problem), slow=not problem.gone)
        return EngineStatus(look.at, look.load, look.rates, problem)

    async def _why_not(self, url: str, model: str) -> str | EngineUnreachable:
        try:
            status, body = await fetch(self._session, url + PATH, PAGE_LIMIT)
        except EngineUnreachable as error:
            return error
        names = parse_models(body) if status == _OK else None
        if names is None:
            return f"the engine answers {status} to {PATH}: it is not ready"
        if model not in names:
            return f"the engine lists {', '.join(sorted(names)) or 'no model'}, not {model}"
        return ""


async def fetch(session: aiohttp.ClientSession, url: str, limit: int) -> tuple[int, bytes]:
    """A page's status and body.

    Args:
        session: Carries the question.
        url: Of the page.
        limit: Bytes of the body that are taken at most; a longer one is cut.

    Raises:
        Unanswered: nothing came within two seconds, or the connection failed.
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
        raise EngineUnreachable(f"{url} does not answer within {_TIMEOUT_S:g} s", gone=False) from error
    except aiohttp.ClientError as error:
        raise EngineUnreachable(f"{url} can't be reached: {error or type(error).__name__}", gone=True) from error
