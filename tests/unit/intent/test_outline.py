import json

import pytest

from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.intent.outline import MAX_DEPTH, MAX_KEYS, Outline, build_outline, is_too_deep, replace_lone_surrogates
from tests.support.steps import lines_run


def test_spans_hold_the_values_exactly():
    body = b' {"a" : "x\\"y" ,\n"b":[1, {"c":"}"}],"":{},"n":-1.50e+3\t, "\xe4\xb8\xad":null}\r\n'
    found = build_outline(body)
    assert {key: body[start:end] for key, (start, end) in found.spans.items()} == {
        "a": b'"x\\"y"',
        "b": b'[1, {"c":"}"}]',
        "": b"{}",
        "n": b"-1.50e+3",
        "中": b"null",
    }
    assert found.value(body, "missing") == b""
    assert bytes(found.view(body, "b")) == b'[1, {"c":"}"}]'


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"model":"a","model":"b"}', "model"),
        (b'{"model":"a","model":"a"}', "model"),
        (b'{"model":"a","x":1,"mod\\u0065l":"b"}', "model"),
        (b'{"mod\\u0065l":"a","x":1,"model":"b"}', "model"),
        (b'{"a":1,"b":2,"a":3,"c":4}', "a"),
        (b'{"a":1,"b":2,"b":2,"c":4}', "b"),
        (b'{"a":1,"a":11}', "a"),
        (b'{"a":11,"a":1}', "a"),
        (b'{"a":"x","b":1,"a":"x\\",\\"b\\":1"}', "a"),
    ],
)
def test_a_key_that_occurs_twice_is_refused_by_name(body, key):
    refusal = build_outline(body)
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.INVALID_REQUEST
    assert refusal.param == key


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"[]",
        b'"hello"',
        b"1",
        b"null",
        b"{",
        b"{}{}",
        b"{} x",
        b'{"a":1,}',
        b'{"a" 1}',
        b"{'a':1}",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":01}',
        b'{"a":+1}',
        b'{"a":.5}',
        b'{"a":"\n"}',
        b'{"a":"\xff"}',
        b'{"\xff":1}',
        b'{"a":["\xc3\x28"]}',
        b'{"a":"\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-be"),
        b"{/*c*/}",
        b'{"a":tru}',
        b'{"a":"\\x"}',
        b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b"{" + b",".join(b'"%d":1' % index for index in range(MAX_KEYS + 1)) + b"}",
    ],
)
def test_what_is_no_json_object_is_refused_shortly(body):
    refusal = build_outline(body)
    assert isinstance(refusal, Refusal)
    assert refusal.code.status == 400
    assert len(refusal.message) < 200


def test_depth_is_counted_outside_strings_only():
    brackets = b'"' + b"[{" * 2000 + b'"'
    assert not is_too_deep(b'{"a":' + brackets + b"}", brackets)
    assert not is_too_deep(b'{"a":' + brackets + b"}")
    assert not is_too_deep(b'{"a":["\\"' + b"[" * 2000 + b'"]}')


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_depth_is_exact_at_the_limit(opening):
    closing = b"]" if opening == b"[" else b"}"
    for depth in (MAX_DEPTH, MAX_DEPTH + 1):
        body = opening * depth + b"1" + closing * depth
        assert is_too_deep(body) is (depth > MAX_DEPTH)
    wide = b"[" + b",".join([b"[[{}]]"] * 3000) + b"]"
    assert not is_too_deep(wide)


@pytest.mark.parametrize(
    "lone", ["\\ud83d", "\\uDE00", "\\ude00x", "\\ud83d\\ud83d\\ude00", "\\ud83d\\n", "\\\\\\ud83d", "\\ud83d\\ude00\\ude00"]
)
def test_half_a_surrogate_pair_is_replaced_in_place(lone):
    body = f'{{"a":"x{lone}","b":1}}'.encode()
    replaced = replace_lone_surrogates(body)
    assert len(replaced) == len(body)
    assert isinstance(build_outline(replaced), Outline)
    assert json.loads(replaced)["a"] == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in json.loads(body)["a"])


@pytest.mark.parametrize("whole", ["\\ud83d\\ude00", "\\\\ud83d", "\\u00e9", "plain"])
def test_whole_pairs_and_escaped_backslashes_stay(whole):
    body = f'{{"a":"{whole}"}}'.encode()
    assert replace_lone_surrogates(body) == body


def test_an_object_of_half_a_million_keys_is_refused_before_anybody_makes_them():
    crowded = b'{"model":"m",' + b",".join(b'"k%d":1' % number for number in range(500_000)) + b"}"
    assert "more than 1024 keys" in build_outline(crowded).message
    assert lines_run(lambda: build_outline(crowded)) < 5_000


def test_a_broken_body_full_of_keys_is_rejected_as_a_broken_body():
    broken = b'{"model":"m",' + b",".join(b'"k%d":1' % number for number in range(500)) + b',"x":{' + b'"a":1,' * 20_000 + b"!}"
    assert "not valid JSON" in build_outline(broken).message


_MIB = 1 << 20


@pytest.mark.parametrize(
    "unit",
    [
        b"[" * 500 + b"]" * 500,
        b'["x"]',
        b'""',
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b'{ "a" : 1 }',
        b"[ [ ] ]",
    ],
)
def test_a_body_of_millions_of_small_values_is_refused_before_they_are_looked_at(unit):
    body = b'{"model":"m","x":[' + b",".join([unit] * (16 * _MIB // (len(unit) + 1))) + b"]}"
    refused = build_outline(body)
    assert isinstance(refused, Refusal)
    assert "The JSON holds more than" in refused.message
    assert lines_run(lambda: build_outline(body)) < 500


def test_a_long_prompt_of_json_is_one_text():
    text = json.dumps([{"a": [1, 2, "x"], "b": {"c": []}}] * 150_000)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    assert isinstance(build_outline(body), Outline)
