"""Reloads the configuration while it is in use: whole or not at all.

Rule: the configuration in use stays until a valid one replaces it; the errors of a rejected one are logged once. Files are read in a
thread, because a large one takes seconds.
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
"""Inode, size and change time per file: a replaced symlink and a rewritten file both change it."""


class ConfigReloader:
    """Watches the files of one configuration and its catalogue.

    Args:
        settings: The configuration in use.
        use: Applies a valid new configuration.
        source: Fetches the catalogue.
    """

    def __init__(self, settings: Settings, use: Callable[[Settings], Awaitable[None]], source: CatalogSource) -> None:
        self.settings = settings
        self.problem = ""
        """Reason why the current file is not in use; "": it is."""
        self._use = use
        self._mark: _Mark = _mark(settings)
        self._source = source
        self._wanted = ""
        """The fingerprint of the configuration that the accounting process uses."""
        self._following = asyncio.Lock()
        self._fetched_at = SystemClock.monotonic()

    def is_reader(self, authorization: str) -> bool:
        """Whether this `authorization` header may read the admin port, by the configuration in use."""
        return self.settings.gateway.admin.opens(authorization)

    def operator(self, authorization: str) -> str | None:
        """Return the id of the admin key in this header, if its holder may change nodes by the configuration in use."""
        return self.settings.gateway.admin.operator(authorization)

    def force_reload(self) -> None:
        """Reload at the next check, even if no file seems changed."""
        self._mark = ()

    async def reload_if_changed(self) -> None:
        """Reload if the files have changed and are valid."""
        mark = _mark(self.settings)
        if mark == self._mark and not await self._check_catalogue():
            return
        self._mark = mark
        loaded = await asyncio.get_running_loop().run_in_executor(None, load, Path(self.settings.file), os.environ, self._source)
        if isinstance(loaded, ConfigRejected):
            self.problem = str(loaded)
            _log.error("changed configuration rejected, %s stays in use: %s", self.settings.fingerprint, loaded)
            return
        self.problem = ""
        if loaded.fingerprint == self.settings.fingerprint:
            return
        at_start = {"gateway": {"scrape_s"}, "store": set[str]()}
        for section, but in at_start.items():
            if getattr(loaded, section).model_dump(exclude=but) != getattr(self.settings, section).model_dump(exclude=but):
                _log.warning("`%s` has changed: restart to apply it", section)
        if loaded.telemetry != self.settings.telemetry or _describe_recording(loaded) != _describe_recording(self.settings):
            _log.warning("`telemetry`, or `audit` in more than its keys, has changed: restart to apply it")
        if self.settings.gateway.xds is not None:
            if loaded.envoy != self.settings.envoy:
                _log.warning("`envoy` has changed: render Envoy's configuration again to apply changes of the listener")
        elif loaded.pools != self.settings.pools or loaded.envoy != self.settings.envoy:
            _log.warning("`pools` or `envoy` have changed: render Envoy's configuration again to apply them")
        if loaded.files != self.settings.files:
            self._mark = _mark(loaded)  # taken before the reload, which takes a while in which files may change again
        await self._use(loaded)
        self.settings = loaded
        _log.info("configuration %s is in use", loaded.fingerprint)

    async def follow(self, fingerprint: str = "") -> None:
        """Use the configuration that the accounting process uses; it has logged everything about it.

        Args:
            fingerprint: The fingerprint of that configuration; "" tries the last one again.
        """
        self._wanted = fingerprint or self._wanted
        async with self._following:
            mark = _mark(self.settings)
            if self._wanted in {"", self.settings.fingerprint} or not (fingerprint or mark != self._mark):
                return
            self._mark = mark
            loaded = await asyncio.get_running_loop().run_in_executor(None, self._read_again)
            if isinstance(loaded, ConfigRejected) or loaded.fingerprint != self._wanted:
                _log.warning("configuration %s is no longer in the files: %s stays in use", self._wanted, self.settings.fingerprint)
                return
            await self._use(loaded)
            self.settings = loaded

    def _read_again(self) -> Settings | ConfigRejected:
        if self.settings.catalog_url is not None:
            self._source.changed(self.settings.catalog_url)
        return load(Path(self.settings.file), os.environ, self._source)

    async def _check_catalogue(self) -> bool:
        """Check the catalogue if that is due, and return whether it has changed."""
        url, refresh_s = self.settings.catalog_url, self.settings.catalog_refresh_s
        now = SystemClock.monotonic()
        if url is None or refresh_s is None or now - self._fetched_at < refresh_s:
            return False
        self._fetched_at = now
        return await asyncio.get_running_loop().run_in_executor(None, self._source.changed, url)


def _describe_recording(settings: Settings) -> object:
    """The audit settings without the keys."""
    return None if settings.audit is None else settings.audit.section.model_copy(update={"keys": {}})


def _mark(settings: Settings) -> _Mark:
    return tuple(_read_mtime(file) for file in settings.files)


def _read_mtime(file: str) -> tuple[int, int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
