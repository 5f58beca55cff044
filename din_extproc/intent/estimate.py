"""How many tokens a prompt holds, told from its bytes: units per script class, times the tokens that each unit costs.

Rule: the cost is bounded. Every step is one pass in C, and of a long text only evenly spread windows are looked at.
"""

import string
from operator import mul

import msgspec
from msgspec import Struct

from din_extproc.domain.request import Estimate
from din_extproc.intent.calibration import CLASSES, Calibration
from din_extproc.intent.openai import Prompt
from din_extproc.intent.outline import holds_more

_WINDOWS = 64
_WINDOW = 512
"""Bytes of one window."""
_WHOLE = _WINDOWS * _WINDOW
"""Bytes up to which a text is looked at as a whole."""
_MOST_VALUES = 1 << 16
"""Values of a prompt's objects up to which their escapes are decoded."""


def _shapes() -> bytes:
    shapes = bytearray(b"." * 128 + b"k" * 64 + b"o" * 64)
    for shape, members in (
        (b"a", string.ascii_lowercase.encode()),
        (b"A", string.ascii_uppercase.encode()),
        (b"0", string.digits.encode()),
        (b" ", b" \t"),
        (b"\n", b"\r\n"),
        (b"P", b"\xe3\xef"),
        (b"C", bytes(range(0xE4, 0xEA))),
    ):
        for member in members:
            shapes[member] = shape[0]
    return bytes(shapes)


_SHAPES = _shapes()
"""Each byte's class. UTF-8 tells a character's script by its first byte: E4-E9 are CJK ideographs, E3 and EF kana, CJK and full-width
punctuation, the other first bytes any other script; the bytes that follow (`k`) are not counted."""
_BLANKS = bytes(b" "[0] if byte in b" \t" else b"."[0] for byte in range(256))

_strings = msgspec.json.Decoder(list[str]).decode


class TokenCalibrator(Struct, frozen=True, gc=False):
    """What the size of a model's prompts is told by."""

    calibration: Calibration = Calibration()
    media_tokens: int = 1024
    """One image, audio or file."""


def estimate(prompt: Prompt, gauge: TokenCalibrator) -> Estimate:
    """Estimate a prompt's tokens. Text is weighed, token ids are counted, media cost what the gauge says; the longest input likewise."""
    longest = None if prompt.longest is None else estimate(prompt.longest, gauge)
    text = b"%b,%b" % (prompt.strings, prompt.objects) if prompt.objects else prompt.strings
    size = len(text)
    units = _units(text)
    if prompt.again:
        times = prompt.inputs - 1
        size += times * len(prompt.again)
        units = tuple([one + times * more for one, more in zip(units, _units(prompt.again), strict=True)])
    features = (*units, prompt.messages, 1)
    fixed = prompt.token_ids + prompt.media * gauge.media_tokens
    if not size and not prompt.messages:
        return Estimate(fixed, features, fixed, longest=longest)
    weighed = sum(map(mul, gauge.calibration.weights, features))
    tokens = int(min(max(weighed, size / 64), size + 64 * (prompt.messages + 4)))
    return Estimate(tokens + fixed, features, fixed, longest=longest)


def _units(text: bytes) -> tuple[int, ...]:
    """Units per text class in JSON values joined by commas, in the order of `CLASSES`."""
    sample = _sample(text)
    if b"\\" in sample:
        try:
            sample = b'"%b"' % '","'.join(_strings(b"[%b]" % sample)).encode()
        except msgspec.DecodeError:  # objects among the strings, or windows that cut an escape
            if b"\\u" in sample:
                text = _in_utf8(text)
                sample = _sample(text)
            sample = sample.replace(b"\\n", b"\n").replace(b'\\"', b'"').replace(b"\\\\", b"\\")
    units = _counts(sample)
    if len(text) <= _WHOLE:
        return units
    scale = len(text) / _WHOLE
    return tuple([round(count * scale) for count in units])


def _sample(text: bytes) -> bytes:
    """The text, or when it is long `_WHOLE` bytes of it in windows from its first byte to its last."""
    last = len(text) - _WINDOW
    if len(text) <= _WHOLE:
        return text
    return b"".join([text[start : start + _WINDOW] for start in [last * index // (_WINDOWS - 1) for index in range(_WINDOWS)]])


def _in_utf8(text: bytes) -> bytes:
    r"""The same values with UTF-8 for `\uXXXX`: some clients write every other script so. Objects of very many values stay as they are."""
    try:
        return msgspec.json.encode(_strings(b"[%b]" % text))[1:-1]
    except msgspec.DecodeError:
        if holds_more(text, _MOST_VALUES):
            return text
    try:
        return msgspec.json.encode(msgspec.json.decode(b"[%b]" % text))[1:-1]
    except msgspec.DecodeError:
        return text


def _counts(text: bytes) -> tuple[int, ...]:
    """One pass for the classes, one each for the pairs; the rest is counted in what is left without lower case letters."""
    shapes = text.translate(_SHAPES)
    rest = shapes.translate(None, b"ak")
    count = rest.count
    lower = len(text) - len(rest)
    ideographs = kana = others = 0
    if not text.isascii():
        lower -= shapes.count(b"k")
        ideographs, kana, others = count(b"C"), count(b"P"), count(b"o")
    return (
        lower,
        count(b"A"),
        count(b"0"),
        count(b"\n"),
        count(b"."),
        ideographs,
        kana,
        others,
        shapes.count(b".."),
        text.translate(_BLANKS).count(b". "),
        shapes.count(b".a"),
        count(b"00"),
    )


assert len(CLASSES) == len(_units(b"")) + 2  # noqa: S101 - the order of the two is one contract
