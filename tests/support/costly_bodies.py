"""Bodies of four megabytes that are as costly to parse as possible."""

from collections.abc import Callable

SIZE = 4 << 20


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
