"""Which models an engine says it serves: `GET /v1/models`, the same for every engine that speaks OpenAI's dialect.

Rule: whatever the body is, names come out or nothing does.
"""

import msgspec
from msgspec import Struct

PATH = "/v1/models"


class _Model(Struct):
    id: str


class _EngineListing(Struct):
    data: list[_Model]


def listed(body: bytes) -> frozenset[str] | None:
    """The names of a `/v1/models` answer. None: it is none."""
    try:
        return frozenset(model.id for model in msgspec.json.decode(body, type=_EngineListing).data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
