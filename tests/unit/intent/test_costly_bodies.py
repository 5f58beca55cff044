"""Every shape of a body is read by a few lines of Python, whatever it holds and whether it is served or refused.

What the C code under them costs is for `tests.bench costly_bodies`.
"""

import gzip
import json

import pytest

from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import Refusal
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.outline import build_outline, is_too_deep, replace_lone_surrogates
from din_extproc.intent.read import ParsedRequest, parse_request
from tests.support.costly_bodies import LISTS, SHAPES, SIZE, chat, keys, text
from tests.support.steps import lines_run

MOST_LINES = SIZE // 10
"""A loop over bytes would be several lines for each."""
GAUGE = TokenCalibrator()


def lines_for(body: bytes, path: str = "/v1/chat/completions") -> int:
    return lines_run(lambda: parse_request(RequestHead("POST", path, {}), body, lambda _model: GAUGE, 3 * SIZE))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_body_is_looped_over(shape):
    assert lines_for(SHAPES[shape]()) < MOST_LINES


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions"])
@pytest.mark.parametrize("shape", LISTS)
def test_no_list_of_inputs_is_looped_over(shape, path):
    assert lines_for(LISTS[shape](), path) < MOST_LINES


def test_the_bounds_hold_for_what_gzip_unfolds_to():
    body = gzip.compress(chat(b'"messages":[],' + keys(b'"k%d":[{}]')), compresslevel=1)
    found = parse_request(RequestHead("POST", "/v1/chat/completions", {"content-encoding": "gzip"}), body, lambda _model: GAUGE, 2 * SIZE)
    assert isinstance(found, Refusal)
    assert found.message in {build_outline(chat(keys(b'"k%d":1'))).message, build_outline(chat(keys(b'"k%d":[{}]'))).message}


def test_brackets_in_texts_are_neither_lists_nor_depth():
    for inside in (b"[", b'\\"[', b"\\\\", b'\\\\\\"[{'):
        body = chat(b'"messages":[],"x":["%b",[1],"","]"]' % (inside * 400_000))
        assert not isinstance(build_outline(body), Refusal), inside
        assert not is_too_deep(body), inside
    assert is_too_deep(b'{"a":["\\\\",' + b'["]",' * 600 + b"1" + b"]" * 601 + b"}")


def test_more_halves_of_surrogate_pairs_than_any_client_cuts_are_no_json():
    body = chat(b'"messages":[{"role":"user","content":"%b"}]' % (b"\\ud83dx" * 60_000))
    many = text(b"\\ud83d")
    assert isinstance(parse_request(RequestHead("POST", "/v1/chat/completions", {}), body, lambda _model: GAUGE, SIZE), ParsedRequest)
    found = parse_request(RequestHead("POST", "/v1/chat/completions", {}), many, lambda _model: GAUGE, 2 * SIZE)
    assert isinstance(found, Refusal)
    assert "not valid JSON" in found.message
    assert len(replace_lone_surrogates(many)) == len(many)


def test_a_half_after_what_only_looks_like_an_escape_is_a_half():
    body = chat(b'"messages":[{"role":"user","content":"\\\\ud83d\\ude00"}]')
    assert json.loads(replace_lone_surrogates(body))["messages"][0]["content"] == "\\ud83d\ufffd"
    assert replace_lone_surrogates(b'"\\ud83d\0\\\\"') == b'"\\ud83d\0\\\\"'
