"""The role of `doctor`: fetches the reports of Redis, Envoy and the sidecar, and judges them.

Rule: it changes nothing; a part that does not answer is a finding, and the others are still checked.
"""

import asyncio
import resource
import time
from collections.abc import Iterator

from din_extproc import __version__
from din_extproc.edge.probe.envoy_admin import EnvoyAdmin, EnvoyAdminUnreachable
from din_extproc.edge.redis.connection import LuaScript, bulks
from din_extproc.edge.redis.link import Link
from din_extproc.edge.redis.topology import make_locator
from din_extproc.roles.operate.diagnosis import (
    Diagnosis,
    of_endpoints,
    of_envoy,
    of_exchanges,
    of_machine,
    of_redis,
    of_sidecar,
    of_timeouts,
)
from din_extproc.roles.operate.nodes import SidecarUnreachable, fetch_page
from din_extproc.roles.serve.envoy_nodes import find_unknown_nodes
from din_extproc.settings.settings import Settings

_TIMEOUT_MS = 2_000
_STATS = r"ext_proc|logs_dropped"
_SCRIPT = LuaScript(b"return 1")
_PINGS = 3
"""Round trips to Redis; the shortest counts: others may have waited for this machine's CPU."""
_MARKS = {"ok": "✓", "warn": "?", "fail": "✗"}


def examine(settings: Settings) -> list[Diagnosis]:
    """Return all findings, in the order in which a request meets the parts."""
    return [
        *_examine_configuration(settings),
        *_examine_envoy(settings),
        *_examine_sidecar(settings),
        *asyncio.run(_examine_redis(settings)),
        *_examine_machine(),
    ]


def report_lines(findings: list[Diagnosis]) -> Iterator[str]:
    """Return the findings as text."""
    for each in findings:
        yield f"{_MARKS[each.verdict]} {each.what}: {each.finding}"
        if each.change:
            yield f"    {each.change}"
    failed, warned = (sum(each.verdict == verdict for each in findings) for verdict in ("fail", "warn"))
    yield f"{failed} fail, {warned} warn, {len(findings) - failed - warned} ok"


def _examine_configuration(settings: Settings) -> Iterator[Diagnosis]:
    yield Diagnosis("din-extproc version", "ok", __version__)
    for warning in settings.warnings:
        yield Diagnosis("configuration", "warn", str(warning), "see `din-extproc check`")
    yield from of_timeouts(settings)


def _examine_envoy(settings: Settings) -> Iterator[Diagnosis]:
    admin = EnvoyAdmin(settings.envoy.admin)
    try:
        yield from of_envoy(admin.fetch_server_info(), admin.fetch_configuration(), settings)
        yield of_endpoints(find_unknown_nodes(settings, admin.fetch_endpoints()))
        yield from of_exchanges(admin.fetch_stats(_STATS))
    except EnvoyAdminUnreachable as error:
        yield Diagnosis("envoy", "fail", str(error), "start it (`din-extproc envoy`), or run the doctor on its machine")


def _examine_sidecar(settings: Settings) -> Iterator[Diagnosis]:
    try:
        yield from of_sidecar(fetch_page(settings, "status"), settings)
    except SidecarUnreachable as error:
        yield Diagnosis("sidecar", "fail", str(error), "start it (`din-extproc serve`); its log says why it ended")


async def _ping(link: Link) -> float:
    """Return the milliseconds until Redis answers."""
    began = time.monotonic()
    await link.call(b"PING")
    return (time.monotonic() - began) * 1000


async def _examine_redis(settings: Settings) -> list[Diagnosis]:
    link = Link(make_locator(settings.store.url.get_secret_value()), (_SCRIPT,), timeout_ms=_TIMEOUT_MS)
    try:
        if not await link.start():
            return [Diagnosis("redis", "fail", link.state.reason, "start it, or correct store.url; until then limits follow `on_error`")]
        took_ms = min([await _ping(link) for _ in range(_PINGS)])
        seconds, micros = await link.call(b"TIME")
        skew_s = int(seconds) + int(micros) / 1e6 - time.time()
        text = await link.call(b"INFO")
        await link.run(_SCRIPT, *bulks(0))
        warning = link.state.warning
    finally:
        await link.close()
    info = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
    refused = [Diagnosis("redis scripts", "warn", warning, "allow the user +script and +evalsha")] if warning else []
    return [*of_redis(info, took_ms, skew_s, settings), *refused]


def _examine_machine() -> Iterator[Diagnosis]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the sidecar raises its soft limit to the hard limit
    yield from of_machine(None if files == resource.RLIM_INFINITY else files)
