"""Forms: parts are found by offset, and what engines could read in different ways is refused."""

import pytest

from din_extproc.domain.request import Operation, RequestHead
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.form import MAX_PARTS, estimate_seconds, outline_form
from din_extproc.intent.read import ParsedRequest, parse_request
from tests.support.steps import lines_run

PATH = Operation.TRANSCRIPTIONS.value
FORM = "multipart/form-data; boundary=b"
SOUND = b"\r\n--\r\n--c\r\n\x00\xff" * 30


def part(name: str, value: bytes, more: str = "") -> bytes:
    return b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more.encode(), value)


def form(*parts: bytes) -> bytes:
    return b"".join((*parts, b"--b--\r\n"))


FILE = part("file", SOUND, '; filename="a.mp3"\r\nContent-Type: audio/mpeg')


def read(body: bytes, content_type: str = FORM, limit: int = 64 << 20, path: str = PATH):
    return parse_request(RequestHead("POST", path, {"content-type": content_type}), body, lambda _name: TokenCalibrator(), limit)


def refused(body: bytes, content_type: str = FORM, **more) -> Refusal:
    found = read(body, content_type, **more)
    assert isinstance(found, Refusal), found
    return found


@pytest.mark.parametrize("parts", [(part("model", b"whisper"), FILE), (FILE, part("model", b"whisper"))], ids=["first", "last"])
def test_the_model_is_found_wherever_its_part_stands(parts):
    body = form(*parts)
    found = read(body)
    assert isinstance(found, ParsedRequest), found
    start, end = found.outline.spans["model"]
    assert (found.intent.model, body[start:end], found.body is body) == ("whisper", b"whisper", True)


@pytest.mark.parametrize(
    ("content_type", "opening"),
    [
        ('multipart/form-data; boundary="b"', b"--b\r\n"),
        ("Multipart/Form-Data;Boundary=b", b"--b\r\n"),
        ("multipart/form-data; charset=utf-8; boundary=b", b"--b\r\n"),
    ],
)
def test_the_boundary_is_read_as_clients_write_it(content_type, opening):
    body = form(part("model", b"m"), FILE)
    assert body.startswith(opening)
    assert isinstance(read(body, content_type), ParsedRequest)


def test_fields_say_how_it_is_answered_and_what_its_prompt_is():
    plain = read(form(part("model", b"m"), FILE)).intent
    asked = read(form(part("model", b"m"), part("stream", b"true"), part("prompt", b"a few words of context" * 9), FILE)).intent
    assert (plain.stream, asked.stream) == (False, True)
    assert asked.prompt_tokens > plain.prompt_tokens >= 10 * plain.audio_seconds > 0


def test_names_that_end_in_brackets_may_come_twice():
    granularity = [part("timestamp_granularities[]", each) for each in (b"word", b"segment")]
    found = read(form(part("model", b"m"), *granularity, FILE))
    assert isinstance(found, ParsedRequest), found
    assert sorted(found.outline.value(found.body, key) for key in found.outline.spans) == [b"m", b"segment", b"word"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (form(part("model", b"a"), part("model", b"b"), FILE), "the name of an earlier one"),
        (part("model", b"m") + FILE, "part 2 is not closed by the boundary"),
        (part("model", b"m") + FILE[:-2], "not closed by the boundary"),
        (b"\r\n" + form(part("model", b"m"), FILE), "does not begin with the boundary"),
        (b"--b", "no headers"),
        (b"--bb\r\n\r\n--bb--", "no headers"),
        (form(b"--b\r\n\r\nx\r\n"), "no content-disposition with one name"),
        (form(b"--b\r\ncontent-type: text/plain\r\n\r\nx\r\n"), "no content-disposition with one name"),
        (form(b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n"), "no content-disposition with one name"),
        (form(part("model", b"m", '; name="other"'), FILE), "no content-disposition with one name"),
        (form(part("model", b"m", '\r\ncontent-disposition: form-data; name="x"'), FILE), "no content-disposition with one name"),
        (form(part("model", b"m", "; =x"), FILE), "no content-disposition with one name"),
        (form(part("model", b"m", "\r\nx: " + "y" * 5000), FILE), "no headers that end within"),
        (form(*[part(f"p{number}", b"") for number in range(MAX_PARTS)]), "more than 128 parts"),
    ],
)  # fmt: skip
def test_a_malformed_form_is_refused_with_the_reason(body, message):
    found = refused(body)
    assert (found.code, message in found.message or found.message) == (RefusalCode.INVALID_REQUEST, True)


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary=", f"{FORM}; boundary=c", f"{FORM},{FORM}"])
def test_a_form_without_exactly_one_boundary_is_refused(content_type):
    assert refused(form(part("model", b"m"), FILE), content_type).param == "content-type"


@pytest.mark.parametrize("content_type", ["application/json", "", "text/plain; boundary=b", "multipart/mixed; boundary=b"])
def test_what_is_no_form_is_refused(content_type):
    assert refused(form(part("model", b"m"), FILE), content_type).param == "content-type"


@pytest.mark.parametrize("body", [form(FILE), form(part("model", b""), FILE), form(part("model", b"m", '; filename="m"'), FILE)])
def test_a_form_without_a_model_is_refused(body):
    found = refused(body)
    assert (found.param, found.message) == ("model", "The body names no model: a non-empty string is expected")


def test_a_form_has_a_limit_of_its_own_and_never_more_than_the_gateway_s():
    large = form(part("model", b"m"), part("file", bytes(25 << 20), '; filename="a.wav"'))
    assert isinstance(read(large), ParsedRequest)
    assert refused(large + bytes(1 << 20)).code is RefusalCode.REQUEST_TOO_LARGE
    assert refused(large, limit=1 << 20).code is RefusalCode.REQUEST_TOO_LARGE


@pytest.mark.parametrize(
    "filler", [b"\r\n--", b"\r\n--b"[:-1] + b"c", b"-" * 6, b"\r" * 6], ids=["boundary", "almost", "dashes", "returns"]
)
def test_no_file_is_looped_over(filler):
    large = form(part("model", b"m"), part("file", filler * (1 << 20), '; filename="a"'))
    assert lines_run(lambda: read(large)) < 400


def test_the_length_of_a_wave_file_is_read_and_of_any_other_estimated():
    rate = (32_000).to_bytes(4, "little")
    wave = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0" + rate + b"\x02\0\x10\0data\0\0\0\0" + bytes(96_000)
    assert estimate_seconds(wave, (0, len(wave))) == 3
    assert estimate_seconds(bytes(32_001), (0, 32_001)) == 3
    lying = wave.replace(rate, b"\xff\xff\xff\xff")
    assert estimate_seconds(lying, (0, len(lying))) == 1
    assert estimate_seconds(b"", (0, 0)) == 0


def test_an_outline_of_any_bytes_is_total():
    for cut in range(len(form(part("model", b"m"), FILE))):
        assert outline_form(form(part("model", b"m"), FILE)[:cut], FORM) is not None
