"""A prompt against its tenant's policy for sensitive data: it passes as it is, passes without the data, or is refused.

Rule: every text that is sent on is checked, in whichever field. No output says what was found, only of which kinds it was; the
tokens are counted of what is sent on.
"""

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from din_extproc.domain.request import BodyKind, RequestHead
from din_extproc.domain.tenant import OnSensitive
from din_extproc.domain.usage import Sensitive
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.decision import DecisionContext, PendingRequest
from din_extproc.flow.view import ScreeningPolicy
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.outline import replace_lone_surrogates
from din_extproc.intent.read import ParsedRequest, reparse_body
from din_extproc.intent.splice import splice_values
from din_extproc.screen.find import Findings
from din_extproc.screen.texts import Edit, decoded, edited, literals

_IDS = frozenset(("model", "user", "safety_identifier", "previous_response_id", "prompt_cache_key", "cache_salt", "request_id"))
"""Fields that are never looked at: who asks, and for what."""
_TEXTUAL = (b'"', b"[", b"{")

_as_json = msgspec.json.Encoder().encode


def screen_prompt(
    reading: ParsedRequest, screening: ScreeningPolicy, head: RequestHead, calibrators: Callable[[str], TokenCalibrator]
) -> ParsedRequest | Refusal:
    """Apply the policy. A prompt with more findings than are looked at, and a form, are refused where they would have to be masked.

    Args:
        reading: The request as it was read.
        screening: The tenant's policy.
        head: For reading an edited body again.
        calibrators: Likewise.
    """
    values = _get_values(reading)
    joined = b",".join(values.values())
    texts = decoded(joined)
    if screening.screen.clean("\n".join(texts).encode()):
        return reading
    found = screening.screen.find([text.encode() for text in texts])
    if not found.places and found.whole:
        return reading
    sensitive = Sensitive(screening.policy.value, found.counts(), found.whole)
    if screening.policy is OnSensitive.FLAG:
        return replace(reading, sensitive=sensitive)
    if screening.policy is OnSensitive.BLOCK or not found.whole or _is_form(reading):
        return _refuse_sensitive(sensitive)
    again = reparse_body(head, reading, _mask_values(reading, values, literals(joined), found), calibrators)
    return again if isinstance(again, Refusal) else replace(again, sensitive=sensitive)


def screen_request(
    context: DecisionContext, request: PendingRequest, parsed: ParsedRequest, screening: ScreeningPolicy
) -> ParsedRequest | Refusal:
    """Apply a policy to a request. What can't be edited is refused where it would have to be masked."""
    request.inspected = True
    if screening.policy is OnSensitive.MASK and not request.edits_body:
        screening = ScreeningPolicy(OnSensitive.BLOCK, screening.screen)
    return screen_prompt(parsed, screening, request.head, context.calibrators.for_name)


def _is_form(reading: ParsedRequest) -> bool:
    return reading.intent.operation.spec.body is BodyKind.MULTIPART


def _get_values(reading: ParsedRequest) -> dict[str, bytes]:
    """Return the members that hold text, by top-level key, as JSON that every decoder accepts. Of a form: without its files."""
    if _is_form(reading):
        spans = reading.outline.spans
        return {key: _as_json(reading.outline.value(reading.body, key).decode(errors="replace")) for key in spans if key not in _IDS}
    body = replace_lone_surrogates(reading.body)
    values = {key: body[start:end] for key, (start, end) in reading.outline.spans.items() if key not in _IDS}
    return {key: value for key, value in values.items() if value[:1] in _TEXTUAL}


def _mask_values(reading: ParsedRequest, values: dict[str, bytes], strings: list[bytes], found: Findings) -> bytes:
    """The body with a mark in the place of each finding, wherever the prompt repeats that string."""
    edits: dict[bytes, list[Edit]] = {}
    done: set[int] = set()
    for place in found.places:
        own = edits.setdefault(strings[place.text], [])
        if not own:
            done.add(place.text)
        if place.text in done:
            own.append((place.start, place.end, place.kind.mark))
    body, outline = reading.body, reading.outline
    return splice_values(body, outline, {key: edited(outline.value(body, key), value, edits) for key, value in values.items()})


def _refuse_sensitive(sensitive: Sensitive) -> Refusal:
    kinds = ", ".join(sorted(sensitive.kinds)) or "unknown"
    message = f"The prompt holds sensitive data that may not be sent on: {kinds}."
    if not sensitive.whole:
        message += " It has more places that look so than are looked at in one request."
    sensitive = replace(sensitive, policy=OnSensitive.BLOCK.value)
    return Refusal(RefusalCode.SENSITIVE_DATA_BLOCKED, message, labels={"sensitive": _as_json(sensitive).decode()})
