"""Reads a request's head and body into its intent.

Total: any bytes and headers give a parsed request or a refusal, never an exception, and no refusal quotes the input.
"""

import math
import re
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.price import UNITS
from din_extproc.domain.request import BUILT_IN, BodyKind, Estimate, Intent, Metering, Operation, OperationSpec, Priority, RequestHead
from din_extproc.domain.usage import AUDIO_TOKENS, Sensitive
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.intent import outline as outlines
from din_extproc.intent.encoding import decode_body
from din_extproc.intent.estimate import TokenCalibrator, estimate_tokens
from din_extproc.intent.form import estimate_seconds, outline_form
from din_extproc.intent.openai import Prompt, extract_prompt
from din_extproc.intent.outline import TOO_DEEP, Outline, build_outline
from din_extproc.intent.paths import find_endpoint_kind, is_valid_model_name

MAX_TOKENS = 10**12
"""A larger requested output is refused."""
_MAX_HEADER_DIGITS = 9
_DECIMALS = 9
_AMOUNT = re.compile(rf"(\d{{1,9}})(?:\.(\d{{1,{_DECIMALS}}}))?", re.ASCII).fullmatch
_EXACT_DIGITS = 13
_FLOAT_DIGITS = 32
_DIGITS = tuple(b"%d" % digit for digit in range(1, 10))

_PRIORITIES = {priority.value: priority for priority in Priority}
_ENGINE_LIMIT_FIELDS = ("max_completion_tokens", "n_predict", "num_predict", "max_new_tokens")
"""Fields that some engines prefer as the limit: llama.cpp reads the first two on every path. Other engines ignore them, so the largest
value is reserved and the smallest must fit; without a standard field there is no limit."""
_ANSWER_COUNT_FIELDS = ("n", "best_of", "n_cmpl")
"""Fields for the number of answers per prompt: the last is llama.cpp's, and TGI generates `best_of`."""
_MAX_ANSWERS = 1 << 20
_ONLY_MESSAGES = ("messages",)
_TRUE = (b"true", b"1")
_AUDIO_WINDOW_S = 30
"""Engines read so much audio at a time."""
_NO_PROMPT = Prompt(b"")
_NO_OUTLINE = Outline(0, {})

_decode_name = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode

_NO_MESSAGES = Refusal(RefusalCode.INVALID_REQUEST, "The body has no messages: a list is expected", param="messages")
_BACKGROUND = Refusal(
    RefusalCode.INVALID_REQUEST,
    "Background responses are not supported: the path that fetches their result is not served. Send background: false, with stream: true "
    "for long answers",
    param="background",
)
_BAD_OPTIONS = Refusal(RefusalCode.INVALID_REQUEST, "A key occurs more than once in stream_options", param="stream_options")
_BAD_TIMEOUT = Refusal(RefusalCode.INVALID_REQUEST, "x-din-timeout-ms is a positive number of milliseconds", param="x-din-timeout-ms")
_BAD_BUDGET = Refusal(RefusalCode.INVALID_REQUEST, "x-din-budget-tokens is a positive number of tokens", param="x-din-budget-tokens")
_BAD_COST = Refusal(RefusalCode.INVALID_REQUEST, "x-din-budget-cost is an amount of money such as 0.02", param="x-din-budget-cost")
_BAD_PRIORITY = Refusal(RefusalCode.INVALID_REQUEST, "x-din-priority is critical, standard or batch", param="x-din-priority")


class ParsedRequest(Struct, frozen=True, gc=False):
    """A parsed request with the data needed to edit it."""

    intent: Intent
    body: bytes
    """Plain JSON, or a form."""
    decoded: bool
    """`body` differs from the bytes sent: it replaces the body, and `content-encoding` is removed."""
    outline: Outline
    """The outline of `body`; of a form, its texts."""
    prompt: Prompt
    sensitive: Sensitive | None = None
    """Findings of the scan for sensitive data."""


class _Output(Struct, frozen=True, gc=False):
    """The intent's fields about its output, see `Intent`."""

    tokens: int | None
    answers: int
    each: int | None


_NO_OUTPUT = _Output(0, 1, 0)
_Calibrators = Callable[[str], TokenCalibrator]


class _HeaderOptions(Struct, frozen=True, gc=False):
    timeout_ms: int | None
    priority: Priority | None
    budget_tokens: int | None = None
    budget_cost: int | None = None


def parse_request(
    head: RequestHead, body: bytes, calibrators: _Calibrators, limit: int, operations: Mapping[str, Operation] = BUILT_IN
) -> ParsedRequest | Refusal:
    """Read a request.

    Args:
        head: Its pseudo headers and headers.
        body: The whole body as sent, b"" when there was none.
        calibrators: Returns the calibrator of a model by any name that a client may use.
        limit: The largest plain body, in bytes.
        operations: Every operation that is served, by path.

    Returns:
        The parsed request, or a refusal with status 400, 404, 405, 413 or 415.
    """
    place = find_endpoint_kind(head.method, head.path, operations)
    if isinstance(place, Refusal):
        return place
    options = _read_options(head.headers)
    if isinstance(options, Refusal):
        return options
    spec = place.operation.spec
    if spec.body is BodyKind.NONE:
        intent = _build_intent(
            headers=head.headers, operation=place.operation, model=place.model, options=options, size=Estimate(0), output=_NO_OUTPUT
        )
        return ParsedRequest(intent, b"", False, _NO_OUTLINE, _NO_PROMPT)
    sent = decode_body(head.headers, spec.body, body, limit if spec.body_limit is None else min(limit, spec.body_limit))
    return sent if isinstance(sent, Refusal) else _parse_body(head.headers, place.operation, sent, options, calibrators)


def reparse_body(head: RequestHead, reading: ParsedRequest, body: bytes, calibrators: _Calibrators) -> ParsedRequest | Refusal:
    """Read a request again with a replaced body. Errors as with `parse_request`."""
    intent = reading.intent
    return _parse_body(head.headers, intent.operation, (body, True), _options_of(intent), calibrators)


def _options_of(intent: Intent) -> _HeaderOptions:
    return _HeaderOptions(intent.timeout_ms, intent.priority, intent.budget_tokens, intent.budget_cost)


def _parse_body(
    headers: Mapping[str, str], operation: Operation, sent: tuple[bytes, bool], options: _HeaderOptions, calibrators: _Calibrators
) -> ParsedRequest | Refusal:
    parse = _parse_form if operation.spec.body is BodyKind.MULTIPART else _parse_json
    try:
        return parse(headers, operation, sent, options, calibrators)
    except RecursionError:
        return TOO_DEEP


def _parse_form(
    headers: Mapping[str, str], operation: Operation, sent: tuple[bytes, bool], options: _HeaderOptions, calibrators: _Calibrators
) -> ParsedRequest | Refusal:
    """Read a form. Its audio counts by its length, in the pieces in which engines read it."""
    body, decoded = sent
    spec = operation.spec
    form = outline_form(body, headers.get("content-type", ""))
    if isinstance(form, Refusal):
        return form
    found = form.outline
    model = _check_model(found.value(body, spec.model).decode(errors="replace"), spec.model)
    if isinstance(model, Refusal):
        return model
    seconds = estimate_seconds(body, form.file) if spec.metering is Metering.SECONDS else 0
    texts = [_encode(found.value(body, key).decode(errors="replace")) for key in spec.prompt if key in found.spans]
    prompt = Prompt(b",".join(texts), messages=len(texts), token_ids=seconds * AUDIO_TOKENS, inputs=max(1, -(-seconds // _AUDIO_WINDOW_S)))
    size = estimate_tokens(prompt, calibrators(model))
    intent = _build_intent(
        headers=headers,
        operation=operation,
        model=model,
        options=options,
        size=replace(size, features=()) if seconds else size,
        output=_NO_OUTPUT,
        stream=found.value(body, "stream").lower() in _TRUE,
        truncates=spec.metering in (Metering.SECONDS, Metering.REQUEST),
        audio_seconds=seconds,
    )
    return ParsedRequest(intent, body, decoded, found, prompt)


def _parse_json(
    headers: Mapping[str, str], operation: Operation, sent: tuple[bytes, bool], options: _HeaderOptions, calibrators: _Calibrators
) -> ParsedRequest | Refusal:
    body, decoded = sent
    readable = body
    found = build_outline(body)
    if isinstance(found, Refusal):
        readable = outlines.replace_lone_surrogates(body)
        again = build_outline(readable) if readable != body else found
        if isinstance(again, Refusal):
            return found
        found = again
    spec = operation.spec
    model = _read_model(found.value(body, spec.model), spec.model)
    if isinstance(model, Refusal):
        return model
    if spec.prompt == _ONLY_MESSAGES and not found.value(body, "messages").startswith(b"["):
        return _NO_MESSAGES
    if operation is Operation.RESPONSES and found.value(body, "background") == b"true":
        return _BACKGROUND
    wants_usage = _wants_usage(found.value(readable, "stream_options"))
    if isinstance(wants_usage, Refusal):
        return wants_usage
    prompt = extract_prompt(operation, readable, found)
    if outlines.is_too_deep(readable, prompt.strings):
        return TOO_DEEP
    limit = _truncation(operation, body, found)
    if limit > 0:
        prompt = replace(prompt, limit=limit)
    output = _read_output(spec, readable, found, prompt.inputs)
    if isinstance(output, Refusal):
        return output
    intent = _build_intent(
        headers=headers,
        operation=operation,
        model=model,
        options=options,
        size=estimate_tokens(prompt, calibrators(model)),
        output=output,
        stream=found.value(body, "stream") == b"true",
        wants_usage=wants_usage,
        truncates=limit < 0 or spec.metering is Metering.REQUEST,
        images=min(_MAX_ANSWERS, _read_count(found.value(body, "n")) or 1) if spec.metering is Metering.IMAGES else 0,
    )
    return ParsedRequest(intent, body, decoded, found, prompt)


def _truncation(operation: Operation, body: bytes, found: Outline) -> int:
    """Return the number of tokens to which the engine is asked to cut each input; -1: to what its context holds; 0: it is not asked."""
    if "truncate_prompt_tokens" in found.spans:
        value = found.value(body, "truncate_prompt_tokens")
        return -1 if value == b"-1" else _read_count(value) or 0
    return -1 if operation is Operation.RESPONSES and found.value(body, "truncation") == b'"auto"' else 0


def _build_intent(
    headers: Mapping[str, str],
    operation: Operation,
    model: str,
    options: _HeaderOptions,
    size: Estimate,
    output: _Output,
    *,
    stream: bool = False,
    wants_usage: bool = False,
    truncates: bool = False,
    images: int = 0,
    audio_seconds: int = 0,
) -> Intent:
    return Intent(
        operation=operation,
        model=model,
        estimate=size,
        output_tokens=output.tokens,
        stream=stream,
        wants_usage=wants_usage,
        timeout_ms=options.timeout_ms,
        task_tier=headers.get("x-task-tier", "").strip(),
        version=headers.get("x-din-model-version", "").strip(),
        priority=options.priority,
        answers=output.answers,
        output_each=output.each,
        budget_tokens=options.budget_tokens,
        budget_cost=options.budget_cost,
        truncates=truncates,
        images=images,
        audio_seconds=audio_seconds,
    )


def _read_options(headers: Mapping[str, str]) -> _HeaderOptions | Refusal:
    timeout_ms = _read_number(headers.get("x-din-timeout-ms"))
    if timeout_ms == 0:
        return _BAD_TIMEOUT
    budget_tokens = _read_number(headers.get("x-din-budget-tokens"))
    if budget_tokens == 0:
        return _BAD_BUDGET
    budget_cost = None
    cost = headers.get("x-din-budget-cost")
    if cost is not None:
        amount = _AMOUNT(cost.strip())
        if amount is None:
            return _BAD_COST
        budget_cost = int(amount[1]) * UNITS + int((amount[2] or "").ljust(_DECIMALS, "0"))
    named = headers.get("x-din-priority")
    priority = None
    if named is not None:
        priority = _PRIORITIES.get(named.strip())
        if priority is None:
            return _BAD_PRIORITY
    return _HeaderOptions(timeout_ms, priority, budget_tokens, budget_cost)


def _read_number(text: str | None) -> int | None:
    """Return the positive number of a header; None: it is not there; 0: it holds something else."""
    if text is None:
        return None
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_HEADER_DIGITS else 0


def _read_model(raw: bytes, key: str) -> str | Refusal:
    try:
        return _check_model(_decode_name(raw) if raw.startswith(b'"') else "", key)
    except msgspec.DecodeError:
        return _refuse_name(key)


def _check_model(name: str, key: str) -> str | Refusal:
    if not name:
        return Refusal(RefusalCode.INVALID_REQUEST, f"The body names no {key}: a non-empty string is expected", param=key)
    return name if is_valid_model_name(name) else _refuse_name(key)


def _refuse_name(key: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, "The model's name is too long or holds characters that no name has", param=key)


def _wants_usage(options: bytes) -> bool | Refusal:
    if not options.startswith(b"{"):
        return False
    inner = build_outline(options)
    return _BAD_OPTIONS if isinstance(inner, Refusal) else inner.value(options, "include_usage") == b"true"


def _read_output(spec: OperationSpec, body: bytes, found: Outline, prompts: int) -> _Output | Refusal:
    """Read the output limits for so many prompts."""
    keys, spans = spec.limits, found.spans
    if spec.metering is not Metering.TOKENS:
        return _NO_OUTPUT
    limit = 0
    for key in keys:
        if key in spans:
            tokens = _read_count(found.value(body, key))
            if tokens is None:
                return _refuse_limit(key)
            limit = limit or tokens
    answers = min(
        _MAX_ANSWERS, prompts * max([_read_count(found.value(body, key)) or 1 for key in _ANSWER_COUNT_FIELDS if key in spans], default=1)
    )
    if not limit:
        return _Output(None, answers, None)
    most = least = limit
    for key in _ENGINE_LIMIT_FIELDS:
        if key in spans and key not in keys:
            tokens = _read_count(found.value(body, key))
            if tokens is None:
                return _refuse_limit(key)
            most, least = max(most, tokens), min(least, tokens or least)
    return _Output(min(MAX_TOKENS, most * answers), answers, least)


def _refuse_limit(key: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, f"{key} is no number of tokens", param=key)


def _read_count(raw: bytes) -> int | None:
    """Return a positive integer, 0 for a value that the engine must judge, or None for one that is out of range.

    A number in quotes counts, because engines accept it.
    """
    if raw.isdigit() and len(raw) < _EXACT_DIGITS:
        return int(raw)
    if raw.startswith(b'"'):
        raw = _unquote(raw)
    if raw[:1] not in _DIGITS:
        return 0
    try:
        number = float(raw) if len(raw) < _FLOAT_DIGITS else math.inf
    except ValueError:
        return 0
    if number > MAX_TOKENS:
        return None
    return int(number) if number.is_integer() else 0


def _unquote(raw: bytes) -> bytes:
    """Decode a string and strip blanks, sign and zeros in front of a number."""
    try:
        return _decode_name(raw).strip().lstrip("+0").encode()
    except msgspec.DecodeError:
        return b""
