"""Transcriptions: a form with a WAVE file, and answers whose text depends on the length of the sound alone."""

from collections.abc import Callable
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import HTTP

import msgspec

from din_extproc.tools.engine_model.errors import EngineFailure, refuse
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.pooling import PoolingRequest
from din_extproc.tools.engine_model.requests import refuse_model

_HEADER = 44
_RATE = slice(28, 32)
"""Bytes per second in the header of a WAVE file."""


def read_audio(model: ModelSpec) -> Callable[[bytes, str], PoolingRequest | EngineFailure]:
    """Return what parses a form of /v1/audio/transcriptions."""

    def read(body: bytes, content_type: str) -> PoolingRequest | EngineFailure:
        parts = _read_parts(body, content_type)
        if "file" not in parts:
            return refuse(400, "[{'type': 'missing', 'loc': ('body', 'file'), 'msg': 'Field required'}]", param="file")
        refused = refuse_model(model, parts.get("model", b"").decode())
        sound = parts["file"]
        seconds = -(-max(0, len(sound) - _HEADER) // max(1, int.from_bytes(sound[_RATE], "little")))
        return refused or PoolingRequest("transcription", (), (), query=parts.get("response_format", b"json").decode(), count=seconds)

    return read


def transcription_body(request: PoolingRequest, _answer_id: str, _created: int, _model: str) -> bytes:
    """Return the answer: one word for each second."""
    text = " ".join(["word"] * request.count)
    if request.query == "verbose_json":
        return msgspec.json.encode({"duration": str(request.count), "language": "en", "text": text, "segments": None, "words": None})
    return msgspec.json.encode({"text": text, "usage": {"type": "duration", "seconds": request.count}})


def _read_parts(body: bytes, content_type: str) -> dict[str, bytes]:
    message = BytesParser(EmailMessage, policy=HTTP).parsebytes(b"content-type: %b\r\n\r\n%b" % (content_type.encode(), body))
    return {
        str(part.get_param("name", "", "content-disposition")): part.get_payload(decode=True)  # type: ignore[misc]
        for part in message.iter_parts()
    }
