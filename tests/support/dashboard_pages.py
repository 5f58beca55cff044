"""The dashboard's page in a headless Chromium: `python -m tests.support.dashboard_pages [FOLDER] [--docs]`.

It checks with 10 and 1,000 nodes, dark and light: all nodes are shown, live, the keyboard suffices, nothing is fetched from elsewhere, and
text has enough contrast. Screenshots are left in the folder (`build/dashboard`); `--docs` replaces those of README and docs.
Rule: the page and its event stream are those of the admin port; only the data is invented.
"""

import asyncio
import math
import random
import sys
import time
from pathlib import Path
from typing import Self

from din_extproc.edge.http.dashboard import DashboardPages
from din_extproc.edge.http.port import HttpPort
from din_extproc.observe.dashboard_data import BreakerView, DashboardData, NodeRow, PoolRow, TenantRow
from din_extproc.observe.recent import RecentEvent, TrafficStats
from din_extproc.observe.timelines import STEPS, Series, TimelineData
from tests.support.chromium import Chromium, Page, find_chromium
from tests.support.pages import PAGES
from tests.support.servers import free_port

SIZES = (10, 1_000)
POOLS = {"cluster-fast-throughput-14b": 0.6, "cluster-long-context-32k": 0.63, "cluster-standard-reasoning": 1.0}
_STATES = ("ready", "loading", "draining", "quarantined", "dead")
_READABLE = 4.5
"""Minimum contrast of text, by WCAG's AA."""
_DOCUMENTED = {"10-light.png": "dashboard.png", "detail.png": "dashboard-node.png"}
"""Screenshots that the documentation shows, by their names there."""
_CONTRAST = """(() => {
  const lightness = (colour) => {
    const parts = colour.match(/[\\d.]+/g).map(Number);
    if (parts.length > 3 && parts[3] === 0) return null;
    const [r, g, b] = parts.map((part) => (part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = lightness(getComputedStyle(at).backgroundColor);
      if (found !== null) return found;
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? 0 : 1;
  };
  let worst = [99, ""];
  const words = "h1, h2, h3, th, td, dt, dd, li, label, #live, #legend span, .pool-head span, .state, button:not(.tile)";
  for (const node of document.querySelectorAll(words)) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility()) continue;
    const [text, ground] = [lightness(getComputedStyle(node).color), behind(node)];
    const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.tagName + " " + node.className + ": " + node.textContent.slice(0, 30)];
  }
  return worst;
})()"""


class Site:
    """The pages with invented data of `nodes` nodes, on a port of its own."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._chosen = random.Random(3)
        self._began = time.time()
        self._port = free_port()
        self._pages = DashboardPages(lambda authorization: "ops" if authorization == "Bearer k" else None, self._make_data)
        self._http = HttpPort(self._pages.routes)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/dashboard"

    async def __aenter__(self) -> Self:
        await self._http.start(f"127.0.0.1:{self._port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pages.close()
        await self._http.stop()

    async def _make_data(self) -> DashboardData:
        now, second = time.time(), int(time.time() - self._began)
        return DashboardData(
            at=now, step_s=10, window_s=60, network="realtime", configuration="2bc7deab7188",
            problems=("Redis can't be reached: limits follow `on_error`",) if self.nodes > SIZES[0] else (),
            open=400 + second, decisions={"sent": 182_311, "refused": 2_210},
            pools=tuple(PoolRow(name, "qwen2.5-14b-instruct", "vllm", "predicted_time") for name in POOLS),
            nodes=tuple(self._node(at, second) for at in range(self.nodes)),
            rules={"ultra-long-context-router": _traffic(211), "lightweight-intent-classifier": _traffic(8_121), "": _traffic(12)},
            aliases={"bx-fast-chat": _traffic(8_000), "bx-reasoning-pro": _traffic(911)},
            tenants=tuple(
                TenantRow(name, _traffic(used), requests=used, rpm=rpm, tokens=used * 9, tpm=100_000, streams=9, max_streams=20)
                for name, used, rpm in (("finance", 4_800, 6_000), ("support", 59, 60), ("research-and-development", 1_400, None))
            ),
            events=tuple(self._event(now, at) for at in range(40)),
            timelines=TimelineData(0, {name: _series(7) for name in POOLS}, {"finance": _series(8), "support": _series(9)}),
        )  # fmt: skip

    def _node(self, at: int, second: int) -> NodeRow:
        chosen = random.Random(at * 7919 + (second // 4) * (at % 7 == 0))
        pool = next(name for name, end in POOLS.items() if at < self.nodes * end)
        state = chosen.choices(_STATES, (95, 1, 1.5, 1, 1.5))[0] if at else "ready"
        breaker = chosen.choices((None, BreakerView("open", 0.0, "5 of 20 failed"), BreakerView("ramping", 0.4)), (95, 1, 2))[0]
        base, running = chosen.randrange(80, 900), chosen.randrange(64)
        return NodeRow(
            f"gpu-{at:04d}", (pool,), state, 0.4 if at % 40 == 1 else 1.0, "qwen2.5-14b-instruct", "2025.3.1", "bf16", "vllm", 64,
            waiting=chosen.randrange(9) if running > 50 else 0, running=running, kv=round(chosen.random(), 2),
            silence_s=14 if state == "dead" else 0, reason="no heartbeat for 14 s" if state == "dead" else "",
            breaker=breaker if state == "ready" and at else None,
            ttft=tuple(None if chosen.random() < 0.05 else base + chosen.randrange(base) for _ in range(30)),
        )  # fmt: skip

    def _event(self, now: float, at: int) -> RecentEvent:
        what, code = self._chosen.choice((("refused", "rate_limit_exceeded"), ("degraded", ""), ("upstream_timeout", "504")))
        trace = f"019abc{at:04d}ffee00112233445566778899"
        return RecentEvent(
            now - at * 3.1, what, code, trace_id=trace, tenant="finance", model="bx-fast-chat", rule="light", node="gpu-0012"
        )


def _traffic(requests: int) -> TrafficStats:
    return TrafficStats(requests, requests * 431, requests // 97, requests // 50, requests // 80)


def _series(seed: int) -> Series:
    chosen = random.Random(seed)
    requests = tuple(max(0, int(40 + 25 * math.sin(at / 9) + chosen.randrange(12))) for at in range(STEPS))
    ttft = tuple(None if 30 <= at < 36 else 90 + chosen.randrange(40) for at in range(STEPS))
    return Series(
        requests=requests,
        refused=tuple(chosen.randrange(3) for _ in requests),
        tokens_per_s=tuple(each * 43.1 for each in requests),
        ttft_p50_ms=ttft,
        ttft_p99_ms=tuple(None if each is None else 3 * each for each in ttft),
    )


def keep(file: Path, photograph: bytes) -> None:
    """Write a screenshot to a file."""
    file.write_bytes(photograph)


class Checks:
    """The checks and their results."""

    def __init__(self) -> None:
        self.failed = 0

    def say(self, what: str, good: object, seen: object = "") -> None:
        """Record and print the result of a check."""
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {what}" + (f" ({seen})" if seen != "" else ""), flush=True)


async def opened(browser: Chromium, site: Site, width: int, height: int, *, dark: bool) -> Page:
    """Open the page with a key and wait for its nodes."""
    page = await browser.page(f"{site.url}#key=k", width, height, dark=dark)
    await page.until("document.querySelectorAll('#pools .tile, #pools tbody tr').length > 0")
    return page


async def look(browser: Chromium, site: Site, folder: Path, checks: Checks, *, dark: bool) -> None:
    """Check that everything is shown, is readable and updates."""
    name = f"{site.nodes} nodes, {'dark' if dark else 'light'}"
    page = await opened(browser, site, 1500, 1100, dark=dark)
    tiles, rows = [await page.value(f"document.querySelectorAll('{what}').length") for what in ("#pools .tile", "#pools tbody tr")]
    checks.say(f"{name}: every node is there", tiles + rows >= site.nodes, f"{tiles} tiles, {rows} rows")
    before = await page.value("document.getElementById('summary').textContent")
    await page.until(f"document.getElementById('summary').textContent !== {before!r}")
    checks.say(f"{name}: it moves by itself", True)
    ratio, where = await page.value(_CONTRAST)
    checks.say(f"{name}: its words can be read", ratio >= _READABLE, f"contrast at least {ratio:.1f}: {where}")
    wide = await page.value("document.documentElement.scrollWidth - innerWidth")
    checks.say(f"{name}: nothing stands out to the side", wide <= 0, f"{wide} px")
    spent = await page.value("(() => { const began = performance.now(); draw(); return performance.now() - began; })()")
    checks.say(f"{name}: a turn is drawn at once", spent < 500, f"{spent:.0f} ms")
    own = site.url.rpartition("/")[0]
    foreign = [url for url in page.asked if not url.startswith((own, "data:"))]
    checks.say(f"{name}: nothing comes from elsewhere", not foreign and len(page.asked) >= 4, foreign or f"{len(page.asked)} requests")
    checks.say(f"{name}: no error", not page.errors, page.errors or "")
    keep(folder / f"{site.nodes}-{'dark' if dark else 'light'}.png", await page.photograph())


async def door(browser: Chromium, site: Site, checks: Checks) -> None:
    """Check the login: nothing is shown without a key, a wrong one is refused, the right one opens; all by keyboard."""
    page = await browser.page(site.url, 1200, 800, dark=False)
    await page.until("document.activeElement.id === 'key'")
    checks.say("without a key: nothing is shown", await page.value("document.querySelector('main').hidden"))
    await page.write("wrong")
    await page.press("Enter")
    await page.until("document.getElementById('door-said').textContent")
    checks.say("a wrong key is refused in words", True, await page.value("document.getElementById('door-said').textContent"))
    await page.write("k")
    await page.press("Enter")
    await page.until("!document.querySelector('main').hidden")
    checks.say("the right key opens", await page.value("document.getElementById('door').hidden"))
    checks.say("the key is in no address", "k" not in await page.value("location.hash"))


async def keyboard(browser: Chromium, site: Site, folder: Path, checks: Checks) -> None:
    """Check tiles, dialog and search without a mouse."""
    page = await opened(browser, site, 1500, 1100, dark=True)
    where = "document.activeElement.className"
    presses = 0
    while await page.value(where) != "tile" and presses < 30:
        await page.press("Tab")
        presses += 1
    checks.say("Tab reaches the tiles", await page.value(where) == "tile", f"{presses} times")
    first = await page.value("document.activeElement.title")
    await page.press("ArrowRight", "ArrowDown", "ArrowRight")
    there = await page.value("document.activeElement.title")
    checks.say("arrow keys walk them", first != there, f"{first[:8]} to {there[:8]}")
    await asyncio.sleep(4.5)
    stayed = await page.value("document.activeElement.title")
    checks.say("the focus stays while the page is drawn anew", stayed[:8] == there[:8])
    await page.press("Enter")
    await page.until("document.getElementById('detail').open")
    checks.say("Enter shows the node", await page.value("document.getElementById('detail-name').textContent") == there[:8])
    keep(folder / "detail.png", await page.photograph())
    await page.press("Escape")
    closed = not await page.value("document.getElementById('detail').open")
    checks.say("Escape closes it, and the focus is back", closed and await page.value(where) == "tile")
    await page.press("/")
    await page.write("dead")
    await page.until("document.querySelectorAll('#pools tbody tr').length > 0")
    found_rows = await page.value("[...document.querySelectorAll('#pools section:not([hidden]) tbody tr')].map((row) => row.textContent)")
    checks.say("/ finds", bool(found_rows) and all("dead" in row for row in found_rows), f"{len(found_rows)} rows")
    keep(folder / "found.png", await page.photograph())
    checks.say("no error by keyboard", not page.errors, page.errors or "")


async def phone(browser: Chromium, site: Site, folder: Path, checks: Checks) -> None:
    """Check a narrow page."""
    page = await opened(browser, site, 420, 900, dark=False)
    wide = await page.value("document.documentElement.scrollWidth - innerWidth")
    checks.say("narrow: nothing stands out to the side", wide <= 0, f"{wide} px")
    keep(folder / "narrow.png", await page.photograph())


async def check(binary: str, folder: Path) -> int:
    """Run all checks. Return the number of failures."""
    checks = Checks()
    async with Chromium(binary) as browser, Site(SIZES[0]) as small, Site(SIZES[1]) as large:
        await door(browser, small, checks)
        for site in (small, large):
            for dark in (False, True):
                await look(browser, site, folder, checks, dark=dark)
        await keyboard(browser, large, folder, checks)
        await phone(browser, small, folder, checks)
    return checks.failed


def main() -> int:
    """Run all checks from the command line."""
    binary = find_chromium()
    if binary is None:
        print("no Chromium here: install one (Debian: apt-get install chromium), or name it: CHROMIUM=/path make test-dashboard")
        return 2
    folder = Path(next((word for word in sys.argv[1:] if word != "--docs"), "build/dashboard"))
    folder.mkdir(parents=True, exist_ok=True)
    failed = asyncio.run(check(binary, folder))
    if "--docs" in sys.argv and not failed:
        for name, found_rows in _DOCUMENTED.items():
            keep(PAGES / "images" / found_rows, (folder / name).read_bytes())
    print(f"photographs: {folder}\n{failed} failed" if failed else f"photographs: {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
