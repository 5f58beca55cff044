"""A headless Chromium, driven over its debugging protocol: it opens pages, types, reads and takes screenshots.

Rule: it needs no driver and no package; it ends what it started and deletes its profile.
"""

import asyncio
import base64
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
_BOOT_S = 30.0
_KEYS = {"Enter": ("\r", 13), "Tab": ("", 9), "Escape": ("", 27), "ArrowRight": ("", 39), "ArrowDown": ("", 40)}
"""Text and code of each key."""


def find_chromium() -> str | None:
    """Return the browser: `$CHROMIUM`, or one of the usual names."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


class Chromium:
    """One browser process. An async context manager."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._profile = Path(tempfile.mkdtemp(prefix="din-chromium-"))
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    def _start(self) -> None:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage"]
        command = [self._binary, *options, "--remote-debugging-port=0", f"--user-data-dir={self._profile}", "about:blank"]
        with (self._profile / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)

    def _address(self) -> str | None:
        found = re.search(r"listening on (ws://\S+)", (self._profile / "log").read_text())
        return None if found is None else found[1]

    async def __aenter__(self) -> Self:
        self._start()
        async with asyncio.timeout(_BOOT_S):
            while (address := self._address()) is None:  # noqa: ASYNC110 - the process signals by a file
                await asyncio.sleep(0.05)
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(address, max_msg_size=0)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await self._session.close()
        self._process.terminate()
        self._process.wait(10)
        shutil.rmtree(self._profile, ignore_errors=True)

    async def say(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message if session is None else message | {"sessionId": session})
        async with asyncio.timeout(_BOOT_S):
            return await reply

    async def page(self, url: str, width: int, height: int, *, dark: bool) -> "Page":
        """Open a page of this size, with a dark or light colour scheme."""
        context = (await self.say("Target.createBrowserContext"))["browserContextId"]
        target = (await self.say("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.say("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.say(f"{domain}.enable")
        await page.say("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.say("Emulation.setEmulatedMedia", features=[feature])
        await page.say("Page.navigate", url=url)
        await page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page

    async def _read(self) -> None:
        async for message in self._socket:
            payload = message.json()
            if "id" in payload:
                reply = self._replies.pop(payload["id"])
                if "error" in payload:
                    reply.set_exception(RuntimeError(payload["error"]["message"]))
                else:
                    reply.set_result(payload["result"])
            elif (page := self._pages.get(payload.get("sessionId", ""))) is not None:
                page.on_event(payload["method"], payload["params"])


class Page:
    """One page. `errors`: uncaught exceptions and error messages; `asked`: the addresses that it fetched."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.asked: list[str] = []

    async def say(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command for this page."""
        return await self._browser.say(method, self._session, **params)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        """Handle an event of the browser."""
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    async def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        found = await self.say("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(_BOOT_S):
            while not await self.value(f"Boolean({expression})"):  # noqa: ASYNC110 - the page sends no event
                await asyncio.sleep(0.05)

    async def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            text, code = _KEYS.get(key, (key, 0))
            pressed = {"key": key, "windowsVirtualKeyCode": code, **({"code": key} if code else {})}
            await self.say("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": text} if text else {}))
            await self.say("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def write(self, text: str) -> None:
        """Type a text into the focused element."""
        await self.press(*text)

    async def photograph(self) -> bytes:
        """Take a screenshot as PNG."""
        return base64.b64decode((await self.say("Page.captureScreenshot", format="png"))["data"])
