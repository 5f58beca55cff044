"""A prompt against its tenant's policy for sensitive data: it passes as it is, passes without the data, or is refused.

Rule: nobody is told what was found, only of which kinds it was; the tokens are counted of what is sent on.
"""

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from din_extproc.domain.request import Head
from din_extproc.domain.tenant import OnSensitive
from din_extproc.domain.usage import Sensitive
from din_extproc.domain.verdict import Code, Refusal
from din_extproc.flow.view import Screening
from din_extproc.intent.estimate import Gauge
from din_extproc.intent.openai import PROMPT_KEYS
from din_extproc.intent.outline import without_lone_surrogates
from din_extproc.intent.read import Reading, read_again
from din_extproc.intent.splice import with_values
from din_extproc.screen.find import Found
from din_extproc.screen.texts import Edit, decoded, edited, literals

_as_json = msgspec.json.Encoder().encode


def screened(reading: Reading, screening: Screening, head: Head, gauges: Callable[[str], Gauge]) -> Reading | Refusal:
    """Apply the policy. A prompt with more findings than are looked at is refused where it would have to be masked.

    Args:
        reading: The request as it was read.
        screening: The tenant's policy.
        head: For reading an edited body again.
        gauges: Likewise.
    """
    prompt = reading.prompt
    objects = b",".join(literals(prompt.objects)) if prompt.objects else b""
    strings = b",".join([part for part in (prompt.strings, objects) if part])
    found = screening.screen.find(decoded(strings))
    if not found.places and found.whole:
        return reading
    sensitive = Sensitive(screening.policy.value, found.counts(), found.whole)
    if screening.policy is OnSensitive.FLAG:
        return replace(reading, sensitive=sensitive)
    if screening.policy is OnSensitive.BLOCK or not found.whole:
        return _refused(sensitive)
    again = read_again(head, reading, _masked(reading, literals(strings), found), gauges)
    return again if isinstance(again, Refusal) else replace(again, sensitive=sensitive)


def _masked(reading: Reading, strings: list[bytes], found: Found) -> bytes:
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
    readable = without_lone_surrogates(body)
    values = {key: edited(outline.value(body, key), outline.value(readable, key), edits) for key in PROMPT_KEYS if key in outline.spans}
    return with_values(body, outline, values)


def _refused(sensitive: Sensitive) -> Refusal:
    kinds = ", ".join(sorted(sensitive.kinds)) or "unknown"
    message = f"The prompt holds sensitive data that may not be sent on: {kinds}."
    if not sensitive.whole:
        message += " It has more places that look so than are looked at in one request."
    sensitive = replace(sensitive, policy=OnSensitive.BLOCK.value)
    return Refusal(Code.SENSITIVE_DATA_BLOCKED, message, labels={"sensitive": _as_json(sensitive).decode()})
