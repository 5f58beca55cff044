import json

import pytest

from din_extproc.intent.outline import Outline, build_outline
from din_extproc.intent.splice import add_include_usage, offset_after_splice, splice_values

BODY = (
    b'{"model":"alias","chat_template_kwargs":{"enable_thinking":false},"stream":true,'
    b'"stream_options":{"step_usage_chunks":true},"seed":9007199254740993,"temperature":0.10,"messages":[{"role":"user","content":"\\u00e9"}]}'
)


def spliced(body, values):
    found = build_outline(body)
    assert isinstance(found, Outline)
    return splice_values(body, found, values)


def test_only_the_model_and_our_flag_differ():
    options = add_include_usage(build_outline(BODY).value(BODY, "stream_options"))
    assert spliced(BODY, {"model": b'"physical-name"', "stream_options": options}) == BODY.replace(b'"alias"', b'"physical-name"').replace(
        b'{"step_usage_chunks":true}', b'{"include_usage":true,"step_usage_chunks":true}'
    )


def test_several_missing_keys_are_inserted_in_front():
    assert spliced(b'{ "a" : 1 }', {"x": b"1", "y": b"2"}) == b'{"x":1,"y":2, "a" : 1 }'


def test_an_empty_object_takes_several_keys():
    assert json.loads(spliced(b" { } ", {"x": b"1", "y": b"[2]"})) == {"x": 1, "y": [2]}


def test_white_space_around_a_replaced_value_stays():
    assert spliced(b'\t{"a" :\n 1.50 , "b":\r[ ] }\n', {"a": b"2"}) == b'\t{"a" :\n 2 , "b":\r[ ] }\n'


def test_a_key_is_not_confused_with_the_same_word_inside_values():
    body = b'{"messages":[{"role":"user","content":"{\\"model\\":\\"no\\"}","model":"no"}],"model":"yes"}'
    assert spliced(body, {"model": b'"new"'}) == body.replace(b'"yes"', b'"new"')


def test_a_key_written_with_escapes_is_the_same_key():
    assert spliced(b'{"mod\\u0065l":"a"}', {"model": b'"b"'}) == b'{"mod\\u0065l":"b"}'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (b"", b'{"include_usage":true}'),
        (b"null", b'{"include_usage":true}'),
        (b"{}", b'{"include_usage":true}'),
        (b"{ }", b'{"include_usage":true }'),
        (b'{"include_usage":true}', b'{"include_usage":true}'),
        (b'{"include_usage": false}', b'{"include_usage": true}'),
        (b'{"include_usage":null,"x":1}', b'{"include_usage":true,"x":1}'),
        (b'{"x":{"include_usage":false}}', b'{"include_usage":true,"x":{"include_usage":false}}'),
        (b'{"x":"\\ud83d"}', b'{"include_usage":true,"x":"\\ud83d"}'),
        (b'"yes"', b'"yes"'),
        (b"[1]", b"[1]"),
    ],
)
def test_usage_is_asked_for_and_the_other_options_stay(options, expected):
    assert add_include_usage(options) == expected


@pytest.mark.parametrize(
    ("body", "values"),
    [
        (b'{"model":"a","stream":true}', {"model": b'"long-name"'}),
        (
            b'{"stream_options":null,"x":{"model":"no"}, "model" : "a" ,"n":1}',
            {"stream_options": b'{"include_usage":true}', "model": b'"b"'},
        ),
        (b'{ "n":1,"model":"a","stream_options":{}}', {"stream_options": b'{"include_usage":true}'}),
        (b'{"model":"\xc3\xa9","messages":[]}', {"stream_options": b"{}", "model": b'"served"', "user": b'"u"'}),
    ],
)
def test_the_place_of_a_value_after_the_edits_is_where_it_stands(body, values):
    at = build_outline(body)
    edited = splice_values(body, at, values)
    value = values.get("model", at.value(body, "model"))
    place = offset_after_splice(at, values, "model")
    assert edited[place : place + len(value)] == value
    assert build_outline(edited).spans["model"][0] == place
