"""A masked body is the client's own but for what was masked, however its strings are escaped."""

import json

from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.request import RequestHead
from din_extproc.domain.tenant import OnSensitive
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.screening import screen_prompt
from din_extproc.flow.view import ScreeningPolicy
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.screen.find import Screen
from din_extproc.screen.kinds import BUILT_IN

GAUGES = TokenCalibrators(lambda _: None)
SCREENING = ScreeningPolicy(OnSensitive.MASK, Screen(BUILT_IN.values()))
HEAD = RequestHead("POST", "/v1/chat/completions", {})
DATA = {"a.b@example.com": "[EMAIL]", "13800138000": "[PHONE]", "4111111111111111": "[BANK_CARD]", "AKIAIOSFODNN7EXAMPLE": "[SECRET]"}
WORDS = st.text(st.sampled_from('aZ.,é你😀"\\/\n\t<>-'), max_size=6)
PIECES = st.lists(st.tuples(WORDS, st.sampled_from([*DATA, ""])), max_size=5)


def written(text: str, draw) -> str:
    """As JSON, each character escaped or not."""
    out = []
    for character in text:
        way = draw(st.integers(0, 3))
        if way == 0 or ord(character) < 32:
            units = character.encode("utf-16-be")
            out += [f"\\u{units[at]:02x}{units[at + 1]:02X}" for at in range(0, len(units), 2)]
        elif character in '"\\' or (character == "/" and way == 1):
            out.append("\\" + character)
        else:
            out.append(character)
    return '"' + "".join(out) + '"'


@given(st.lists(PIECES, min_size=1, max_size=4), st.data())
def test_only_findings_change(messages, data):
    texts = ["".join(f"{words} {found} " for words, found in pieces) for pieces in messages]
    masked = ["".join(f"{words} {DATA.get(found, '')} " for words, found in pieces) for pieces in messages]
    sent = [written(text, data.draw) for text in texts]
    shape = '{{ "model":"m" ,"user": "a.b@example.com", "messages" : [{}], "seed":1.50 }}'
    body = shape.format(", ".join(f'{{"role":"user","content" : {text}}}' for text in sent)).encode()
    reading = parse_request(HEAD, body, GAUGES.for_name, 1 << 20)
    assert isinstance(reading, ParsedRequest)
    seen = screen_prompt(reading, SCREENING, HEAD, GAUGES.for_name)
    assert isinstance(seen, ParsedRequest)
    after = json.loads(seen.body)
    assert [message["content"] for message in after["messages"]] == masked
    if texts == masked:
        assert seen is reading
        return
    frame = shape.format("\0").encode().partition(b"\0")
    assert seen.body.startswith(frame[0])
    assert seen.body.endswith(frame[2])
    for text, changed in zip(sent, masked, strict=True):
        if text == changed:
            assert text.encode() in seen.body
