"""No shape of a body costs much more time than an ordinary chat of its size, whether it is served or refused."""

import gzip
import json
import time
from collections.abc import Callable

import pytest

from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import Refusal
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.outline import build_outline, is_too_deep, replace_lone_surrogates
from din_extproc.intent.read import ParsedRequest, parse_request

SIZE = 4 << 20
MOST = 12.0
"""Times an ordinary chat's time per byte. Quiet machines show 7 at most; what it holds off was 15 to 50."""
GAUGE = TokenCalibrator()


def filled(unit: bytes, most: int = SIZE) -> bytes:
    return b",".join([unit] * min(most, SIZE // (len(unit) + 1)))


def chat(fields: bytes) -> bytes:
    return b'{"model":"m",%b}' % fields


def messages(unit: bytes, most: int = SIZE) -> bytes:
    return chat(b'"messages":[%b]' % filled(unit, most))


def extra(unit: bytes, most: int = SIZE) -> bytes:
    return chat(b'"messages":[],"x":[%b]' % filled(unit, most))


def parts(unit: bytes, most: int = SIZE) -> bytes:
    return chat(b'"messages":[{"role":"user","content":[%b]}]' % filled(unit, most))


def text(unit: bytes) -> bytes:
    return chat(b'"messages":[{"role":"user","content":"%b"}]' % (unit * (SIZE // len(unit))))


def keys(form: bytes) -> bytes:
    return b",".join(form % number for number in range(SIZE // (len(form) + 5)))


HI = b'{"role":"user","content":"hi"}'
SHAPES: dict[str, Callable[[], bytes]] = {
    "keys of lists of objects": lambda: chat(b'"messages":[],' + keys(b'"k%d":[{}]')),
    "keys of numbers": lambda: chat(keys(b'"k%d":1')),
    "keys of texts": lambda: chat(keys(b'"k%d":"' + b"x" * 60 + b'"')),
    "keys in a message": lambda: chat(b'"messages":[{' + keys(b'"k%d":1') + b"}]"),
    "keys in stream_options": lambda: chat(b'"messages":[],"stream_options":{' + keys(b'"k%d":1') + b"}"),
    "fewer keys, with objects": lambda: chat(b",".join(b'"k%d":[%b]' % (i, b",".join([b'{"a":1}'] * 200)) for i in range(1200))),
    "empty messages": lambda: messages(b"{}"),
    "short messages": lambda: messages(HI),
    "as many short messages as are read": lambda: messages(HI, 170_000),
    "short messages that end too early": lambda: messages(HI, 170_000)[:-2],
    "messages of halves": lambda: messages(b'{"role":"user","content":"\\ud83d"}', 170_000),
    "messages of numbers": lambda: messages(b"1"),
    "messages of parts of numbers": lambda: messages(b'{"content":[' + b"1," * 2000 + b"1]}"),
    "messages of nested parts": lambda: messages(b'{"content":[[[[' + b"1," * 2000 + b"1]]]]}"),
    "parts": lambda: parts(b'{"text":"a"}', 250_000),
    "parts of halves": lambda: parts(b'"\\ud83d"'),
    "stop": lambda: chat(b'"messages":[],"stop":[%b]' % filled(b'"a"')),
    "tools": lambda: chat(b'"messages":[],"tools":[%b]' % filled(b'{"type":"function","function":{"name":"f"}}')),
    "objects": lambda: extra(b'{"a":1}', 260_000),
    "objects of lists": lambda: extra(b'{"":[[1]]}', 500_000),
    "lists": lambda: extra(b"[1]"),
    "deep lists": lambda: extra(b"[" * 500 + b"]" * 500),
    "deep objects": lambda: extra(b'{"a":' * 500 + b"1" + b"}" * 500),
    "brackets in texts": lambda: extra(b'"[[[["', 500_000),
    "numbers": lambda: extra(b"1e5"),
    "one number": lambda: chat(b'"messages":[],"max_tokens":' + b"9" * SIZE),
    "escapes": lambda: text(b"\\n"),
    "escaped quotes": lambda: text(b'\\"'),
    "escaped backslashes, and a half": lambda: text(b"\\\\").replace(b'"}]', b'\\ud83d"}]'),
    "escaped letters": lambda: text(b"\\u4e2d"),
    "halves": lambda: text(b"\\ud83d"),
    "pairs, and a half": lambda: text(b"\\ud83d\\ude00").replace(b'"}]', b'\\ud83d"}]'),
    "a text that does not end": lambda: text(b"word ")[:-4],
    "a long key": lambda: chat(b'"messages":[],"' + b"\\n" * (SIZE // 2) + b'":1'),
    "a key that occurs twice": lambda: text(b"word ")[:-1] + b',"model":"n"}',
    "a list": lambda: b"[" + filled(b"{}") + b"]",
    "a text": lambda: b'"' + b"x" * SIZE + b'"',
}


def listed(unit: bytes, most: int = SIZE) -> bytes:
    return b'{"model":"m","messages":[],"query":"q","input":[%b],"prompt":[%b]}' % ((filled(unit, most),) * 2)


LISTS: dict[str, Callable[[], bytes]] = {
    "short texts": lambda: listed(b'"a"', 200_000),
    "texts of another script": lambda: listed('"中文"'.encode(), 200_000),
    "texts": lambda: listed(b'"' + b"word " * 400 + b'"'),
    "escaped texts": lambda: listed(b'"\\u4e2d\\u6587"', 200_000),
    "token ids": lambda: listed(b"[1,22,333]", 100_000),
    "lists without token ids": lambda: listed(b"[]", 100_000),
    "objects": lambda: listed(b'{"text":"a"}', 100_000),
    "fewer objects": lambda: listed(b'{"text":"' + b"word " * 80 + b'"}', 4096),
    "mixed": lambda: listed(b'"a",[1],{"text":"a"}', 60_000),
}


def spent(body: bytes, path: str = "/v1/chat/completions") -> float:
    """Processor time per byte, in seconds: the better of two."""
    return min(timed(body, path) for _ in range(2)) / len(body)


def timed(body: bytes, path: str = "/v1/chat/completions") -> float:
    began = time.process_time()
    parse_request(RequestHead("POST", path, {}), body, lambda _model: GAUGE, 3 * SIZE)
    return time.process_time() - began


@pytest.fixture(scope="module")
def ordinary() -> float:
    """An ordinary chat's time per byte."""
    body = messages(json.dumps({"role": "user", "content": "The quick brown fox, and a lazy dog. " * 20}).encode())
    return min(spent(body) for _ in range(4))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_body_costs_much_more_than_a_chat_of_its_size(ordinary, shape):
    body = SHAPES[shape]()
    assert spent(body) < MOST * ordinary


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions"])
@pytest.mark.parametrize("shape", LISTS)
def test_no_list_of_inputs_costs_much_more_than_a_chat_of_its_size(ordinary, shape, path):
    assert spent(LISTS[shape](), path) < MOST * ordinary


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
