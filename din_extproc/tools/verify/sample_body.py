"""Bodies for each operation that cost little: the answer is one token, the sound a second of silence.

Rule: the description of an operation says what its body is, so that one of a configuration's own is asked like those that are built in.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from din_extproc.domain.request import BodyKind, Operation

_BOUNDARY = "din-extproc-verify"
_RATE = 8_000
"""Bytes per second of the sound, one per sample."""
_SILENCE = (
    b"RIFF"
    + (36 + _RATE).to_bytes(4, "little")
    + b"WAVEfmt \x10\0\0\0\x01\0\x01\0"
    + 2 * _RATE.to_bytes(4, "little")
    + b"\x01\0\x08\0data"
    + _RATE.to_bytes(4, "little")
    + b"\x80" * _RATE
)
_BESIDES: Mapping[Operation, Mapping[str, Any]] = {
    Operation.RERANK: {"query": "OK"},
    Operation.SCORE: {"text_1": "OK"},
    Operation.SPEECH: {"voice": "alloy"},
}
"""Members that an operation needs besides the common ones; its prompt is then its next member."""


def content_type(operation: Operation) -> str:
    """Return the content type of the operation's bodies."""
    return f"multipart/form-data; boundary={_BOUNDARY}" if operation.spec.body is BodyKind.MULTIPART else "application/json"


def build_body(operation: Operation, name: str, words: int, *, stream: bool = False) -> bytes:
    """Return a body with a prompt of about so many tokens.

    Args:
        operation: Any that takes a body.
        name: The model's.
        words: Tokens of the prompt, at least 1.
        stream: The answer is asked for as a stream.
    """
    spec = operation.spec
    text = "echo_node: say OK. " + "echo " * words
    fields: dict[str, Any] = {spec.model: name, **_BESIDES.get(operation, {})}
    key = next((key for key in spec.prompt if key not in fields), None)
    if key is not None:
        fields[key] = _make_prompt(key, text, words)
    if spec.limits:
        fields[spec.limits[-1]] = 1
    if stream:
        fields["stream"] = True
    return _build_form(fields) if spec.body is BodyKind.MULTIPART else msgspec.json.encode(fields)


def _make_prompt(key: str, text: str, words: int) -> object:
    match key:
        case "messages":
            return [{"role": "user", "content": text}]
        case "documents":
            return [text]
        case "tokens":
            return [1] * words
        case _:
            return text


def _build_form(fields: Mapping[str, Any]) -> bytes:
    parts = [
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="{key}"\r\n\r\n{"true" if value is True else value}\r\n'.encode()
        for key, value in fields.items()
    ]
    file = f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="silence.wav"\r\ncontent-type: audio/wav\r\n\r\n'
    return b"".join((*parts, file.encode(), _SILENCE, f"\r\n--{_BOUNDARY}--\r\n".encode()))
