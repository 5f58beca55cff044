"""Estimates a prompt's tokens from its bytes: units per script class times tokens per unit.

The cost is bounded: each step is one pass in C, and only evenly spread windows of a long text are read.
"""

import string
from operator import mul

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.request import Estimate
from din_extproc.intent.calibration import CLASSES, Calibration
from din_extproc.intent.openai import Prompt
from din_extproc.intent.outline import has_more_values

_WINDOWS = 64
_WINDOW_BYTES = 512
"""Bytes per window."""
_WHOLE = _WINDOWS * _WINDOW_BYTES
"""The largest text, in bytes, that is read as a whole."""
_MAX_VALUES = 1 << 16
"""The largest number of values of a prompt's objects whose escapes are decoded."""


def _build_shapes() -> bytes:
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


_SHAPES = _build_shapes()
"""Each byte's class. The first byte of a UTF-8 character gives its script: E4-E9 are CJK ideographs, E3 and EF kana, CJK and full-width
punctuation, other first bytes any other script. Continuation bytes (`k`) are not counted."""
_BLANKS = bytes(b" "[0] if byte in b" \t" else b"."[0] for byte in range(256))

_strings = msgspec.json.Decoder(list[str]).decode


class TokenCalibrator(Struct, frozen=True, gc=False):
    """The parameters of a model's prompt estimates."""

    calibration: Calibration = Calibration()
    media_tokens: int = 1024
    """Tokens per image, audio or file."""


def estimate_tokens(prompt: Prompt, calibrator: TokenCalibrator) -> Estimate:
    """Estimate a prompt's tokens, and those of its longest input.

    Text is weighted by class, token ids are counted, media cost a fixed number of tokens each. Where the engine cuts inputs to a limit, no
    input has more tokens, and there are no features to learn from.
    """
    if prompt.limit:
        whole = estimate_tokens(replace(prompt, limit=0), calibrator)
        longest = None if whole.longest is None else _cut(whole.longest, prompt.limit)
        return replace(_cut(whole, prompt.limit * prompt.inputs), longest=longest)
    longest = None if prompt.longest is None else estimate_tokens(prompt.longest, calibrator)
    text = b"%b,%b" % (prompt.strings, prompt.objects) if prompt.objects else prompt.strings
    size = len(text)
    units = _count_units(text)
    if prompt.repeated:
        times = prompt.inputs - 1
        size += times * len(prompt.repeated)
        units = tuple([one + times * more for one, more in zip(units, _count_units(prompt.repeated), strict=True)])
    features = (*units, prompt.messages, 1)
    fixed = prompt.token_ids + prompt.media * calibrator.media_tokens
    if not size and not prompt.messages:
        return Estimate(fixed, features, fixed, longest=longest)
    weighed = sum(map(mul, calibrator.calibration.weights, features))
    tokens = int(min(max(weighed, size / 64), size + 64 * (prompt.messages + 4)))
    return Estimate(tokens + fixed, features, fixed, longest=longest)


def _cut(estimate: Estimate, limit: int) -> Estimate:
    return Estimate(min(estimate.tokens, limit), (), min(estimate.fixed, limit))


def _count_units(text: bytes) -> tuple[int, ...]:
    """Return the units per text class of JSON values joined by commas, in the order of `CLASSES`."""
    sample = _sample_text(text)
    if b"\\" in sample:
        try:
            sample = b'"%b"' % '","'.join(_strings(b"[%b]" % sample)).encode()
        except msgspec.DecodeError:  # # objects among the strings, or windows that cut an escape
            if b"\\u" in sample:
                text = _unescape(text)
                sample = _sample_text(text)
            sample = sample.replace(b"\\n", b"\n").replace(b'\\"', b'"').replace(b"\\\\", b"\\")
    units = _count_classes(sample)
    if len(text) <= _WHOLE:
        return units
    scale = len(text) / _WHOLE
    return tuple([round(count * scale) for count in units])


def _sample_text(text: bytes) -> bytes:
    """Return the text, or `_WHOLE` bytes of a longer text in evenly spread windows."""
    last = len(text) - _WINDOW_BYTES
    if len(text) <= _WHOLE:
        return text
    return b"".join([text[start : start + _WINDOW_BYTES] for start in [last * index // (_WINDOWS - 1) for index in range(_WINDOWS)]])


def _unescape(text: bytes) -> bytes:
    r"""Return the same values with UTF-8 instead of `\uXXXX`. Objects with very many values are returned unchanged."""
    try:
        return msgspec.json.encode(_strings(b"[%b]" % text))[1:-1]
    except msgspec.DecodeError:
        if has_more_values(text, _MAX_VALUES):
            return text
    try:
        return msgspec.json.encode(msgspec.json.decode(b"[%b]" % text))[1:-1]
    except msgspec.DecodeError:
        return text


def _count_classes(text: bytes) -> tuple[int, ...]:
    """Count the classes in one pass and each kind of pair in another; lower case letters are removed first."""
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


assert len(CLASSES) == len(_count_units(b"")) + 2  # noqa: S101 - the order of the two is one contract
