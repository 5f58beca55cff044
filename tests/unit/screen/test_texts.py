r"""JSON strings edited at byte offsets: escapes, pairs of surrogates and halves of them."""

import json

from din_extproc.screen.texts import decoded, edited, literals


def test_strings_are_found_and_decoded_in_order():
    value = rb'[{"a\"b": "x\\"}, "\u0040", 1, "", "\ud83d\ude00"]'
    assert literals(value) == [rb'"a\"b"', rb'"x\\"', rb'"\u0040"', b'""', rb'"\ud83d\ude00"']
    assert decoded(value) == ['a"b', "x\\", "@", "", "😀"]
    assert decoded(b"") == []


def test_the_interface_s_own_words_ids_and_media_are_no_texts():
    value = rb'[{"role" : "user","content":"role", "id":"call_1","type":"my own","image_url":{"url":"data:image\/png;base64,AA\/="}}]'
    assert literals(value) == [b'"role"', b'"my own"']
    assert edited(value, value, {b'"role"': [(0, 4, b"-")]}) == value.replace(b':"role"', b':"-"')


def test_an_edit_counts_in_decoded_bytes_and_changes_nothing_else():
    value = rb'{"t" : "\u4f60\n\ud83d\ude00ab\u0040cd\/\t", "u": 1.0}'
    text = json.loads(value)["t"].encode()
    start = text.index(b"ab@cd")
    new = edited(value, value, {literals(value)[1]: [(start, start + 5, b"[X]")]})
    assert new == rb'{"t" : "\u4f60\n\ud83d\ude00[X]\/\t", "u": 1.0}'


def test_edits_at_both_ends_and_next_to_each_other():
    value = rb'"\u0061b\n\u0063"'
    assert edited(value, value, {value: [(0, 1, b"[A]"), (1, 2, b"[B]"), (3, 4, b"[C]")]}) == rb'"[A][B]\n[C]"'


def test_the_same_string_is_edited_wherever_it_stands():
    value = b'["ab","cd","ab"]'
    assert edited(value, value, {b'"ab"': [(0, 1, b"-")]}) == b'["-b","cd","-b"]'


def test_half_a_surrogate_pair_stays_as_it_was_sent():
    sent, readable = rb'"\ud83d a@b"', rb'"\ufffd a@b"'
    text = decoded(readable)[0].encode()
    start = text.index(b"a@b")
    assert edited(sent, readable, {readable: [(start, start + 3, b"[E]")]}) == rb'"\ud83d [E]"'
