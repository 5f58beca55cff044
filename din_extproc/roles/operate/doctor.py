"""The role `doctor`: asks Redis, Envoy and the sidecar how they do, and says what to change.

Rule: it only asks; a part that does not answer is a finding like any other, and the rest is looked at all the same.
"""

import asyncio
import resource
import time
from collections.abc import Iterator

from din_extproc import __version__
from din_extproc.edge.probe.envoy_admin import EnvoyAdmin, EnvoyAdminUnreachable
from din_extproc.edge.redis.connection import LuaScript, bulks
from din_extproc.edge.redis.link import Link
from din_extproc.edge.redis.topology import locator
from din_extproc.roles.operate.diagnosis import Diagnosis, of_envoy, of_exchanges, of_machine, of_redis, of_sidecar, of_timeouts
from din_extproc.roles.operate.nodes import SidecarUnreachable, ask
from din_extproc.settings.settings import Settings

_PATIENCE_MS = 2_000
_STATS = r"ext_proc|logs_dropped"
_SCRIPT = LuaScript(b"return 1")
_MARKS = {"fine": "✓", "doubtful": "?", "wrong": "✗"}


def examine(settings: Settings) -> list[Diagnosis]:
    """Everything that there is to say, in the order in which a request meets it."""
    return [*_configuration(settings), *_envoy(settings), *_sidecar(settings), *asyncio.run(_redis(settings)), *_machine()]


def lines(findings: list[Diagnosis]) -> Iterator[str]:
    """For a person."""
    for each in findings:
        yield f"{_MARKS[each.verdict]} {each.what}: {each.said}"
        if each.change:
            yield f"    {each.change}"
    wrong, doubtful = (sum(each.verdict == verdict for each in findings) for verdict in ("wrong", "doubtful"))
    yield f"{wrong} wrong, {doubtful} doubtful, {len(findings) - wrong - doubtful} fine"


def _configuration(settings: Settings) -> Iterator[Diagnosis]:
    yield Diagnosis("din-extproc version", "fine", __version__)
    for warning in settings.warnings:
        yield Diagnosis("configuration", "doubtful", str(warning), "`din-extproc check` says more")
    yield from of_timeouts(settings)


def _envoy(settings: Settings) -> Iterator[Diagnosis]:
    admin = EnvoyAdmin(settings.envoy.admin)
    try:
        yield from of_envoy(admin.server_info(), admin.configuration(), settings)
        yield from of_exchanges(admin.stats(_STATS))
    except EnvoyAdminUnreachable as error:
        yield Diagnosis("envoy", "wrong", str(error), "start it: `din-extproc envoy`; or ask on its own machine")


def _sidecar(settings: Settings) -> Iterator[Diagnosis]:
    try:
        yield from of_sidecar(ask(settings, "status"), settings)
    except SidecarUnreachable as error:
        yield Diagnosis("sidecar", "wrong", str(error), "start it: `din-extproc serve`; its log says why it ended")


async def _redis(settings: Settings) -> list[Diagnosis]:
    link = Link(locator(settings.store.url.get_secret_value()), (_SCRIPT,), timeout_ms=_PATIENCE_MS)
    try:
        if not await link.start():
            return [Diagnosis("redis", "wrong", link.state.reason, "start it, or correct store.url; limits follow `on_error` until then")]
        began = time.monotonic()
        await link.call(b"PING")
        took_ms = (time.monotonic() - began) * 1000
        seconds, micros = await link.call(b"TIME")
        skew_s = int(seconds) + int(micros) / 1e6 - time.time()
        text = await link.call(b"INFO")
        await link.run(_SCRIPT, *bulks(0))
        warning = link.state.warning
    finally:
        await link.close()
    info = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
    refused = [Diagnosis("redis scripts", "doubtful", warning, "allow the user +script and +evalsha")] if warning else []
    return [*of_redis(info, took_ms, skew_s, settings), *refused]


def _machine() -> Iterator[Diagnosis]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the sidecar takes as many as it is allowed
    yield from of_machine(None if files == resource.RLIM_INFINITY else files)
