"""From a request's head and body to its intent: what does it want, and how large is it?

Rule: total. Any bytes and any headers give a reading or a refusal, never an exception, and no refusal quotes what was sent.
"""

import math
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from din_extproc.domain.request import Estimate, Intent, Operation, Priority, RequestHead
from din_extproc.domain.usage import Sensitive
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.intent import outline as outlines
from din_extproc.intent.encoding import plain
from din_extproc.intent.estimate import TokenCalibrator, estimate
from din_extproc.intent.openai import Prompt, prompt
from din_extproc.intent.outline import TOO_DEEP, Outline, outline
from din_extproc.intent.paths import locate, sound

MAX_TOKENS = 10**12
"""A requested output over this is no number of tokens."""
_MAX_TIMEOUT_DIGITS = 9
_EXACT_DIGITS = 13
_FLOAT_DIGITS = 32
_DIGITS = tuple(b"%d" % digit for digit in range(1, 10))

_PRIORITIES = {priority.value: priority for priority in Priority}
_LIMITS = {
    Operation.CHAT: ("max_completion_tokens", "max_tokens"),
    Operation.COMPLETIONS: ("max_tokens",),
    Operation.MESSAGES: ("max_tokens",),
    Operation.RESPONSES: ("max_output_tokens",),
}
"""What limits an answer, by operation: the first of them that is a positive number, for every engine. OpenAI put the one in the other's
place."""
_OWN_LIMITS = ("max_completion_tokens", "n_predict", "num_predict", "max_new_tokens")
"""What some engines take for it besides, and before it: llama.cpp the first two, wherever they stand. Others pass them over, so that the
largest is what is reserved, the least what has to fit, and without a limit for every engine there is none."""
_CHOICES = ("n", "best_of", "n_cmpl")
"""Answers to each prompt. The last is llama.cpp's own word, and TGI generates `best_of`."""
_MOST_ANSWERS = 1 << 20
_WITH_MESSAGES = (Operation.CHAT, Operation.MESSAGES)
_NO_PROMPT = Prompt(b"")
_NOTHING = Outline(0, {})

_decode_name = msgspec.json.Decoder(str).decode

_NO_MODEL = Refusal(RefusalCode.INVALID_REQUEST, "The body names no model: a non-empty string is expected", param="model")
_BAD_MODEL = Refusal(RefusalCode.INVALID_REQUEST, "The model's name is too long or holds characters that no name has", param="model")
_NO_MESSAGES = Refusal(RefusalCode.INVALID_REQUEST, "The body has no messages: a list is expected", param="messages")
_BAD_OPTIONS = Refusal(RefusalCode.INVALID_REQUEST, "A key occurs more than once in stream_options", param="stream_options")
_BAD_TIMEOUT = Refusal(RefusalCode.INVALID_REQUEST, "x-din-timeout-ms is a positive number of milliseconds", param="x-din-timeout-ms")
_BAD_PRIORITY = Refusal(RefusalCode.INVALID_REQUEST, "x-din-priority is critical, standard or batch", param="x-din-priority")


class ParsedRequest(Struct, frozen=True, gc=False):
    """A request that was understood, with what is needed to send it on edited."""

    intent: Intent
    body: bytes
    """Plain JSON."""
    decoded: bool
    """`body` is not what was sent: it replaces the body, and `content-encoding` is removed."""
    outline: Outline
    """Of `body`."""
    prompt: Prompt
    sensitive: Sensitive | None = None
    """What the prompt held when it was looked at."""


class _Output(Struct, frozen=True, gc=False):
    """The three fields of the intent, see there."""

    tokens: int | None
    answers: int
    each: int | None


_NO_OUTPUT = _Output(0, 1, 0)


class _Wishes(Struct, frozen=True, gc=False):
    timeout_ms: int | None
    priority: Priority | None


def read(head: RequestHead, body: bytes, gauges: Callable[[str], TokenCalibrator], limit: int) -> ParsedRequest | Refusal:
    """Read a request.

    Args:
        head: Its pseudo headers and headers.
        body: The whole body as sent, b"" when there was none.
        gauges: The gauge of a model, by the name a client may use. Total.
        limit: The largest plain body, in bytes.

    Returns:
        A reading; or a refusal with status 400, 404, 405, 413 or 415.
    """
    place = locate(head.method, head.path)
    if isinstance(place, Refusal):
        return place
    wishes = _wishes(head.headers)
    if isinstance(wishes, Refusal):
        return wishes
    if place.operation is Operation.MODELS:
        intent = _intent(
            headers=head.headers, operation=place.operation, model=place.model, wishes=wishes, size=Estimate(0), output=_NO_OUTPUT
        )
        return ParsedRequest(intent, b"", False, _NOTHING, _NO_PROMPT)
    sent = plain(head.headers, body, limit)
    if isinstance(sent, Refusal):
        return sent
    try:
        return _read_json(head.headers, place.operation, sent, wishes, gauges)
    except RecursionError:
        return TOO_DEEP


def read_again(head: RequestHead, reading: ParsedRequest, body: bytes, gauges: Callable[[str], TokenCalibrator]) -> ParsedRequest | Refusal:
    """Read a request whose body is another than the client sent: it replaces that. Else as `read`."""
    intent = reading.intent
    return _read_json(head.headers, intent.operation, (body, True), _Wishes(intent.timeout_ms, intent.priority), gauges)


def _read_json(
    headers: Mapping[str, str], operation: Operation, sent: tuple[bytes, bool], wishes: _Wishes, gauges: Callable[[str], TokenCalibrator]
) -> ParsedRequest | Refusal:
    body, decoded = sent
    readable = body
    found = outline(body)
    if isinstance(found, Refusal):
        readable = outlines.without_lone_surrogates(body)
        again = outline(readable) if readable != body else found
        if isinstance(again, Refusal):
            return found
        found = again
    model = _model(found.value(body, "model"))
    if isinstance(model, Refusal):
        return model
    if operation in _WITH_MESSAGES and not found.value(body, "messages").startswith(b"["):
        return _NO_MESSAGES
    wants_usage = _wants_usage(found.value(readable, "stream_options"))
    if isinstance(wants_usage, Refusal):
        return wants_usage
    asked = prompt(operation, readable, found)
    if outlines.too_deep(readable, asked.strings):
        return TOO_DEEP
    output = _output(operation, readable, found, asked.inputs)
    if isinstance(output, Refusal):
        return output
    intent = _intent(
        headers=headers,
        operation=operation,
        model=model,
        wishes=wishes,
        size=estimate(asked, gauges(model)),
        output=output,
        stream=found.value(body, "stream") == b"true",
        wants_usage=wants_usage,
    )
    return ParsedRequest(intent, body, decoded, found, asked)


def _intent(
    headers: Mapping[str, str],
    operation: Operation,
    model: str,
    wishes: _Wishes,
    size: Estimate,
    output: _Output,
    *,
    stream: bool = False,
    wants_usage: bool = False,
) -> Intent:
    return Intent(
        operation=operation,
        model=model,
        estimate=size,
        output_tokens=output.tokens,
        stream=stream,
        wants_usage=wants_usage,
        timeout_ms=wishes.timeout_ms,
        task_tier=headers.get("x-task-tier", "").strip(),
        version=headers.get("x-din-model-version", "").strip(),
        priority=wishes.priority,
        answers=output.answers,
        output_each=output.each,
    )


def _wishes(headers: Mapping[str, str]) -> _Wishes | Refusal:
    timeout = headers.get("x-din-timeout-ms")
    timeout_ms = None
    if timeout is not None:
        timeout = timeout.strip()
        if not (timeout.isascii() and timeout.isdigit() and len(timeout) <= _MAX_TIMEOUT_DIGITS and int(timeout)):
            return _BAD_TIMEOUT
        timeout_ms = int(timeout)
    named = headers.get("x-din-priority")
    priority = None
    if named is not None:
        priority = _PRIORITIES.get(named.strip())
        if priority is None:
            return _BAD_PRIORITY
    return _Wishes(timeout_ms, priority)


def _model(raw: bytes) -> str | Refusal:
    if not raw.startswith(b'"'):
        return _NO_MODEL
    try:
        name = _decode_name(raw)
    except msgspec.DecodeError:
        return _BAD_MODEL
    if not name:
        return _NO_MODEL
    return name if sound(name) else _BAD_MODEL


def _wants_usage(options: bytes) -> bool | Refusal:
    if not options.startswith(b"{"):
        return False
    inner = outline(options)
    return _BAD_OPTIONS if isinstance(inner, Refusal) else inner.value(options, "include_usage") == b"true"


def _output(operation: Operation, body: bytes, found: Outline, prompts: int) -> _Output | Refusal:
    """How much may be answered to so many prompts."""
    keys, spans = _LIMITS.get(operation), found.spans
    if keys is None:
        return _NO_OUTPUT
    limit = 0
    for key in keys:
        if key in spans:
            tokens = _count(found.value(body, key))
            if tokens is None:
                return _no_tokens(key)
            limit = limit or tokens
    answers = min(_MOST_ANSWERS, prompts * max([_count(found.value(body, key)) or 1 for key in _CHOICES if key in spans], default=1))
    if not limit:
        return _Output(None, answers, None)
    most = least = limit
    for key in _OWN_LIMITS:
        if key in spans and key not in keys:
            tokens = _count(found.value(body, key))
            if tokens is None:
                return _no_tokens(key)
            most, least = max(most, tokens), min(least, tokens or least)
    return _Output(min(MAX_TOKENS, most * answers), answers, least)


def _no_tokens(key: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, f"{key} is no number of tokens", param=key)


def _count(raw: bytes) -> int | None:
    """A positive whole number, 0 for what is none and for the engine to judge, None for one that can't be meant.

    A number in quotes counts, however it is spelled: engines read it as one.
    """
    if raw.isdigit() and len(raw) < _EXACT_DIGITS:
        return int(raw)
    if raw.startswith(b'"'):
        raw = _unquoted(raw)
    if raw[:1] not in _DIGITS:
        return 0
    try:
        number = float(raw) if len(raw) < _FLOAT_DIGITS else math.inf
    except ValueError:
        return 0
    if number > MAX_TOKENS:
        return None
    return int(number) if number.is_integer() else 0


def _unquoted(raw: bytes) -> bytes:
    """What a string says, without the blanks, the sign and the zeros that may stand before a number."""
    try:
        return _decode_name(raw).strip().lstrip("+0").encode()
    except msgspec.DecodeError:
        return b""
