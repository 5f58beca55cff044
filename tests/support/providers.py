"""Providers of hosted APIs: TLS servers that check the credential, record what reaches them and answer as the documentation says.

Words in a prompt choose the answer: `weather?` gets two tool calls; `too long`, `rate limit`, `overloaded` and `no credit` get errors
of the provider; `slow` gets its answer late, `cut` half of it, and `drop` half of it and a closed connection. Everything else gets a text.
"""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Self

from aiohttp import web

from tests.support.anthropic_answers import ANSWER, CALL_ANSWER, encode_events, stream_events

PIECES = ("Hello", " from", " afar")
CALLS = (("get_weather", '{"location": "Paris"}'), ("get_time", "{}"))
THEIRS = {"x-ratelimit-remaining-requests": "7", "openai-organization": "org-secret", "x-request-id": "theirs"}
SOUND = bytes(range(256)) * 40
PICTURE = {"total_tokens": 4170, "input_tokens": 10, "output_tokens": 4160, "input_tokens_details": {"text_tokens": 10, "image_tokens": 0}}
_LATE_S = 0.4
_USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}


def _openai_error(status: int, kind: str, code: str | None, message: str, **headers: str) -> Callable[[], web.Response]:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return lambda: web.json_response({"error": error}, status=status, headers={**THEIRS, **headers})


def _anthropic_error(status: int, kind: str, message: str, **headers: str) -> Callable[[], web.Response]:
    error = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_theirs"}
    limits = {"anthropic-ratelimit-requests-remaining": "7", "anthropic-organization-id": "org-secret"}
    return lambda: web.json_response(error, status=status, headers={**limits, **headers})


class Provider:
    """A server of OpenAI's chat completions on loopback. A context manager.

    Args:
        tls: What it shows.
        credential: What it asks for in `header`.
        header: The header of the credential, with what precedes it.
    """

    ERRORS: ClassVar = {
        "too long": _openai_error(
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 210000 tokens.",
        ),
        "rate limit": _openai_error(
            429, "requests", "rate_limit_exceeded", "Rate limit reached for gpt in organization org-secret", **{"retry-after": "1"}
        ),
        "overloaded": _openai_error(503, "server_error", None, "The engine is currently overloaded, please try again later"),
        "no credit": _openai_error(
            429, "insufficient_quota", "insufficient_quota", "You exceeded your current quota, please check your plan and billing details."
        ),
    }

    OTHER: ClassVar[dict[str, Callable[[], web.Response]]] = {
        "audio/speech": lambda: web.Response(body=SOUND, content_type="audio/mpeg"),
        "images/generations": lambda: web.json_response({"created": 1, "data": [{"b64_json": "iVBORw0K" * 1000}], "usage": PICTURE}),
        "responses/input_tokens": lambda: web.json_response({"object": "response.input_tokens", "input_tokens": 11}),
    }
    """Answers of other operations, by the path behind `/v1/`."""

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

    def whole(self, body: dict[str, Any], *, calls: bool) -> dict[str, Any]:
        """Return a complete answer."""
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else "".join(PIECES), "refusal": None}
        if calls:
            message["tool_calls"] = [_call(index) for index in range(len(CALLS))]
        choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls" if calls else "stop"}]
        return {"id": "chatcmpl-1", "created": 1, "model": body["model"], "object": "chat.completion", "choices": choices, "usage": _USAGE}

    def stream(self, body: dict[str, Any], *, calls: bool) -> list[bytes]:
        """Return the events of a streamed answer."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "" if not calls else None}]
        deltas += [{"content": piece} for piece in (() if calls else PIECES)]
        for index, (_, arguments) in enumerate(CALLS if calls else ()):
            opened = {**_call(index), "index": index}
            opened["function"] = {**opened["function"], "arguments": ""}
            pieces = [{"index": index, "function": {"arguments": piece}} for piece in (arguments[:5], arguments[5:]) if piece]
            deltas += [{"tool_calls": [each]} for each in (opened, *pieces)]
        common = {"id": "chatcmpl-1", "created": 1, "model": body["model"], "object": "chat.completion.chunk"}
        choices: list[list[dict[str, Any]]] = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
        choices.append([{"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"}])
        contents: list[dict[str, Any]] = [{**common, "choices": each} for each in choices]
        if (body.get("stream_options") or {}).get("include_usage"):
            contents.append({**common, "choices": [], "usage": _USAGE})
        return [*(f"data: {json.dumps(each)}\n\n".encode() for each in contents), b"data: [DONE]\n\n"]

    def unauthorized(self, sent_credential: str) -> web.Response:
        """Return the refusal of a credential, which repeats it as providers do."""
        return _openai_error(401, "invalid_request_error", "invalid_api_key", f"Incorrect API key provided: {sent_credential}.")()

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
        name, prefix = self._header
        sent_credential = request.headers.get(name, "")
        if sent_credential.removeprefix(prefix) not in self.credentials:
            return self.unauthorized(sent_credential)
        if (failure := self.fail()) is not None:
            return failure
        other = self.OTHER.get(request.path.rpartition("/v1/")[2])
        if other is not None:
            return other()
        prompt = json.dumps(body["messages"])
        for words, error in self.ERRORS.items():
            if words in prompt:
                return error()
        if "slow" in prompt:
            await asyncio.sleep(_LATE_S)
        return await self._good_answer(request, body, prompt)

    async def _good_answer(self, request: web.Request, body: dict[str, Any], prompt: str) -> web.StreamResponse:
        calls, cut = "weather?" in prompt, "cut" in prompt or "drop" in prompt
        if not body.get("stream"):
            return web.json_response(self.whole(body, calls=calls), headers=THEIRS)
        reply = web.StreamResponse(headers={**THEIRS, "content-type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        events = self.stream(body, calls=calls)
        for event in events[: len(events) // 2] if cut else events:
            await reply.write(event)
        if "drop" in prompt and request.transport is not None:
            request.transport.close()
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


class AnthropicProvider(Provider):
    """A server of Anthropic's Messages API."""

    ERRORS: ClassVar = {
        "too long": _anthropic_error(400, "invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum"),
        "rate limit": _anthropic_error(
            429, "rate_limit_error", "This request would exceed org-secret's rate limit", **{"retry-after": "1"}
        ),
        "overloaded": _anthropic_error(529, "overloaded_error", "Overloaded"),
        "no credit": _anthropic_error(402, "billing_error", "There is an issue with your billing or payment information."),
    }

    OTHER: ClassVar = {"messages/count_tokens": lambda: web.json_response({"input_tokens": 14})}

    def __init__(self, tls: ssl.SSLContext, credential: str) -> None:
        super().__init__(tls, credential, ("x-api-key", ""))

    def whole(self, body: dict[str, Any], *, calls: bool) -> dict[str, Any]:
        """Return a complete answer."""
        return {**(CALL_ANSWER if calls else ANSWER), "model": body["model"]}

    def stream(self, body: dict[str, Any], *, calls: bool) -> list[bytes]:
        """Return the events of a streamed answer."""
        return [encode_events([event]) for event in stream_events(self.whole(body, calls=calls))]

    def unauthorized(self, sent_credential: str) -> web.Response:
        """Return the refusal of a credential."""
        return _anthropic_error(401, "authentication_error", f"invalid x-api-key {sent_credential}")()

    async def _good_answer(self, request: web.Request, body: dict[str, Any], prompt: str) -> web.StreamResponse:
        if request.path != "/v1/messages" or "anthropic-version" not in request.headers or "max_tokens" not in body:
            return _anthropic_error(400, "invalid_request_error", "not a request of the Messages API")()
        return await super()._good_answer(request, body, prompt)


def _call(index: int) -> dict[str, Any]:
    name, arguments = CALLS[index]
    return {"id": f"call_{index + 1}", "type": "function", "function": {"name": name, "arguments": arguments}}
