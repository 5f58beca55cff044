"""Any bytes and any headers give a reading or a refusal; any JSON object in any spelling is spliced byte for byte."""

import gzip
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from din_extproc.domain.request import Operation, RequestHead
from din_extproc.domain.verdict import Refusal, error_body
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.outline import build_outline
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.intent.splice import add_include_usage, splice_values
from tests.support.odd_json import KEYS, Speller

GAUGE = TokenCalibrator()
LIMIT = 1 << 20
seeds = st.integers(0, 2**64)
values = seeds.map(lambda seed: Speller(seed).value())
bodies = seeds.map(lambda seed: f"{Speller(seed).gap()}{Speller(seed).object()}".encode())
wild = seeds.map(lambda seed: Speller(seed, lone=True).object().encode())
chatty = seeds.map(lambda seed: Speller(seed, lone=True).chat().encode())
posted = st.sampled_from([operation.value for operation in Operation if operation is not Operation.MODELS])


def checked(head, body):
    found = parse_request(head, body, lambda _model: GAUGE, LIMIT)
    if isinstance(found, Refusal):
        assert 400 <= found.code.status < 500
        assert len(error_body(found.code, found.message, trace_id="t", param=found.param)) < 2000
        return found
    assert isinstance(found, ParsedRequest)
    assert found.decoded or head.method != "POST" or found.body == body
    assert found.intent.prompt_tokens >= 0
    found.intent.model.encode()
    found.prompt.texts()
    return found


@settings(max_examples=300)
@given(
    body=st.one_of(st.binary(max_size=200), wild, chatty, bodies, wild.map(gzip.compress), chatty.map(lambda body: body[:-1])), path=posted
)
def test_any_body_is_read_or_refused(body, path):
    assert checked(RequestHead("POST", path, {}), body)
    assert checked(RequestHead("POST", path, {"content-encoding": "gzip"}), body)


@settings(max_examples=300)
@given(literal=st.one_of(st.text("0123456789eE+-._ \u0663infx", max_size=40), st.text()), escaped=st.booleans(), path=posted)
@example(literal="1-1", escaped=False, path=Operation.CHAT.value)
def test_any_limit_in_quotes_is_read_or_refused(literal, escaped, path):
    quoted = "".join(f"\\u{ord(each):04x}" for each in literal if ord(each) < 0xD800) if escaped else json.dumps(literal)[1:-1]
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
        assert checked(RequestHead("POST", path, {}), f'{{"model":"m","messages":[],"max_tokens":5,"{key}":"{quoted}"}}'.encode())
        assert checked(RequestHead("POST", path, {}), f'{{"model":"m","messages":[],"{key}":"{quoted}"}}'.encode())


@settings(max_examples=300)
@given(
    method=st.one_of(st.sampled_from(["POST", "GET", "HEAD", "OPTIONS"]), st.text()),
    path=st.one_of(posted, st.text(), st.text().map("/v1/models/".__add__), st.sampled_from(["/v1/models/%ff", "/v1/models/%ED%A0%80"])),
    headers=st.dictionaries(
        st.sampled_from(["content-type", "content-encoding", "x-din-timeout-ms", "x-din-priority", "x-task-tier", "x-din-model-version"]),
        st.one_of(st.text(), st.sampled_from(["gzip", "12", "batch", "application/json"])),
    ),
    body=chatty,
)
def test_any_head_is_read_or_refused(method, path, headers, body):
    assert checked(RequestHead(method, path, headers), body)


@pytest.mark.parametrize("path", [operation.value for operation in Operation])
@pytest.mark.parametrize(
    "opening", [b"[", b"{", b'{"a":', b'"', b"[{", b"\\", b"\\u", b'"\\ud83d', b"1", b"-", b"\x00", b"\xff", b"[[1],", b'{"messages":[']
)
@pytest.mark.parametrize(
    "place", [b"%b", b'{"model":"m","messages":[%b', b'{"model":"m","messages":[{"content":%b}],"input":%b,"prompt":%b,"tools":%b}']
)
def test_nasty_repetitions_are_read_or_refused(path, opening, place):
    many = opening * 3000
    assert checked(RequestHead("POST", path, {}), place.replace(b"%b", many))


@settings(max_examples=300)
@given(body=bodies, value=values, keys=st.lists(st.sampled_from([*KEYS, "new", "other"]), min_size=1, max_size=3, unique=True))
@example(body=b"{}", value="1", keys=["new", "other"])
def test_a_splice_changes_these_values_and_no_other_byte(body, value, keys):
    found = build_outline(body)
    expected = json.loads(body)
    result = splice_values(body, found, dict.fromkeys(keys, value.encode()))
    expected.update(dict.fromkeys(keys, json.loads(value)))
    assert json.loads(result) == expected
    after = build_outline(result)
    assert list(after.spans)[-len(found.spans) or len(after.spans) :] == list(found.spans)
    back = result
    for key in (key for key in keys if key in found.spans):
        back = splice_values(back, build_outline(back), {key: found.value(body, key)})
    for key in reversed([key for key in keys if key not in found.spans]):
        inserted = b'"%b":%b' % (key.encode(), value.encode())
        at = back.index(inserted)
        rest = back[at + len(inserted) :]
        back = back[:at].removesuffix(b",") + (rest if back[:at].endswith(b",") else rest.removeprefix(b","))
    assert back == body


@settings(max_examples=300)
@given(options=bodies)
def test_usage_is_asked_for_with_every_other_option_kept(options):
    result = add_include_usage(options)
    assert json.loads(result) == {**json.loads(options), "include_usage": True}


@settings(max_examples=300)
@given(body=bodies)
def test_spans_are_the_values(body):
    found = build_outline(body)
    whole = json.loads(body)
    assert list(found.spans) == list(whole)
    for key, (start, end) in found.spans.items():
        assert json.loads(body[start:end]) == whole[key]


@settings(max_examples=300)
@given(body=bodies, data=st.data())
def test_a_duplicate_key_is_refused(body, data):
    spans = build_outline(body).spans
    if spans:
        key = data.draw(st.sampled_from(list(spans)))
        twice = body.rstrip()[:-1] + b"," + json.dumps(key).encode() + b":" + data.draw(st.sampled_from([b"1", b"null", b'"x"'])) + b"}"
        assert isinstance(build_outline(twice), Refusal)
