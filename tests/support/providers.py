"""A provider of a hosted API: a TLS server with OpenAI's interface that checks the credential and records what reaches it."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from aiohttp import web

PIECES = ("Hello", " from", " afar")


class Provider:
    """One server on loopback. A context manager.

    Args:
        tls: What it shows.
        credential: What it asks for in `header`.
        header: The header of the credential, with what precedes it.
    """

    def __init__(self, tls: ssl.SSLContext, credential: str, header: tuple[str, str] = ("authorization", "Bearer ")) -> None:
        self.credentials = {credential}
        """Those that are valid."""
        self.fail: Callable[[], web.Response | None] = lambda: None
        """Returns an answer to give instead; None: none."""
        self.seen: list[tuple[str, dict[str, str], dict]] = []
        """Path with query, headers and body of every request."""
        self.port = 0
        self._header = header
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls).start()
        self.port = int(self._runner.addresses[0][1])

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.path_qs, {name.lower(): value for name, value in request.headers.items()}, body))
        theirs = {"x-ratelimit-remaining-requests": "7", "openai-organization": "org-secret", "x-request-id": "theirs"}
        name, prefix = self._header
        if request.headers.get(name, "").removeprefix(prefix) not in self.credentials:
            shown = request.headers.get(name, "")
            error = {"message": f"Incorrect API key provided: {shown}", "type": "invalid_request_error", "code": "invalid_api_key"}
            return web.json_response({"error": error}, status=401, headers=theirs)
        if (failure := self.fail()) is not None:
            return failure
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
        common = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(PIECES)}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            return web.json_response({**common, "object": "chat.completion", "choices": choices, "usage": usage}, headers=theirs)
        reply = web.StreamResponse(headers={**theirs, "content-type": "text/event-stream"})
        await reply.prepare(request)
        for piece in (*PIECES, ""):
            delta = {"index": 0, "delta": {"content": piece} if piece else {}, "finish_reason": None if piece else "stop"}
            await reply.write(_event({**common, "object": "chat.completion.chunk", "choices": [delta]}))
        await reply.write(_event({**common, "object": "chat.completion.chunk", "choices": [], "usage": usage}))
        await reply.write(b"data: [DONE]\n\n")
        return reply

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _event(content: dict) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()
