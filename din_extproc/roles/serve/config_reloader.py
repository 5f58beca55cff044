"""A configuration that changes while it is in use: looked at again and again, taken whole or not at all.

Rule: what is in use stays until its successor is sound; what was wrong with the successor is said once. Files are read in a thread:
a large one takes seconds.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from din_extproc.edge.clock import SystemClock
from din_extproc.edge.registry.catalog_source import CatalogSource
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_Mark = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of change, per file: a replaced symlink and a rewritten file both change it."""


class ConfigReloader:
    """Watches one configuration and its catalogue.

    Args:
        settings: The one in use.
        use: Takes a sound successor.
        source: What its catalogue was pulled with.
    """

    def __init__(self, settings: Settings, use: Callable[[Settings], Awaitable[None]], source: CatalogSource) -> None:
        self.settings = settings
        self.problem = ""
        """Why the file as it is now is not in use, "" when it is."""
        self._use = use
        self._mark: _Mark = _mark(settings)
        self._source = source
        self._wanted = ""
        """The fingerprint of what another process has taken."""
        self._following = asyncio.Lock()
        self._asked_at = SystemClock.monotonic()

    def opens(self, authorization: str) -> bool:
        """Whether who sends this may see the admin port's pages, by the configuration in use."""
        return self.settings.gateway.admin.opens(authorization)

    def demand(self) -> None:
        """Take the files over at the next look, even if they seem unchanged."""
        self._mark = ()

    async def look(self) -> None:
        """Take the files over when they have changed and are sound."""
        mark = _mark(self.settings)
        if mark == self._mark and not await self._pulled():
            return
        self._mark = mark
        loaded = await asyncio.get_running_loop().run_in_executor(None, load, Path(self.settings.file), os.environ, self._source)
        if isinstance(loaded, ConfigRejected):
            self.problem = str(loaded)
            _log.error("the changed configuration is not used, %s stays: %s", self.settings.fingerprint, loaded)
            return
        self.problem = ""
        if loaded.fingerprint == self.settings.fingerprint:
            return
        at_start = {"gateway": {"scrape_s"}, "store": set[str]()}
        for section, but in at_start.items():
            if getattr(loaded, section).model_dump(exclude=but) != getattr(self.settings, section).model_dump(exclude=but):
                _log.warning("`%s` has changed: it takes effect at the next start", section)
        if loaded.telemetry != self.settings.telemetry or _recording(loaded) != _recording(self.settings):
            _log.warning("`telemetry`, or `audit` in more than its keys, has changed: it takes effect at the next start")
        if self.settings.gateway.xds is not None:
            if loaded.envoy != self.settings.envoy:
                _log.warning("`envoy` has changed: what it says of the listener takes effect when Envoy's configuration is rendered again")
        elif loaded.pools != self.settings.pools or loaded.envoy != self.settings.envoy:
            _log.warning("`pools` or `envoy` have changed: render Envoy's configuration again")
        if loaded.files != self.settings.files:
            self._mark = _mark(loaded)  # before it is in use: that takes a while, in which the files may change again
        await self._use(loaded)
        self.settings = loaded
        _log.info("configuration %s is in use", loaded.fingerprint)

    async def follow(self, fingerprint: str = "") -> None:
        """Take over what another process of this sidecar has taken over and has said everything about.

        Args:
            fingerprint: Of that configuration; "": of the one named last, if it could not be had then.
        """
        self._wanted = fingerprint or self._wanted
        async with self._following:
            mark = _mark(self.settings)
            if self._wanted in {"", self.settings.fingerprint} or not (fingerprint or mark != self._mark):
                return
            self._mark = mark
            loaded = await asyncio.get_running_loop().run_in_executor(None, self._read_again)
            if isinstance(loaded, ConfigRejected) or loaded.fingerprint != self._wanted:
                _log.warning("configuration %s is not in the files any more: %s stays", self._wanted, self.settings.fingerprint)
                return
            await self._use(loaded)
            self.settings = loaded

    def _read_again(self) -> Settings | ConfigRejected:
        if self.settings.catalog_url is not None:
            self._source.changed(self.settings.catalog_url)
        return load(Path(self.settings.file), os.environ, self._source)

    async def _pulled(self) -> bool:
        """Whether it was time to ask for the catalogue again, and there is another one."""
        url, refresh_s = self.settings.catalog_url, self.settings.catalog_refresh_s
        now = SystemClock.monotonic()
        if url is None or refresh_s is None or now - self._asked_at < refresh_s:
            return False
        self._asked_at = now
        return await asyncio.get_running_loop().run_in_executor(None, self._source.changed, url)


def _recording(settings: Settings) -> object:
    """How the audit log is kept, but for its keys."""
    return None if settings.audit is None else settings.audit.section.model_copy(update={"keys": {}})


def _mark(settings: Settings) -> _Mark:
    return tuple(_seen(file) for file in settings.files)


def _seen(file: str) -> tuple[int, int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
