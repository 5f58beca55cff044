"""Reads the models of an engine from `GET /v1/models`, which is the same for every OpenAI-compatible engine.

Any body gives the names or None.
"""

import msgspec
from msgspec import Struct

PATH = "/v1/models"


class _Model(Struct):
    id: str


class _EngineListing(Struct):
    data: list[_Model]


def parse_models(body: bytes) -> frozenset[str] | None:
    """Return the model names of a `/v1/models` answer, or None for any other body."""
    try:
        return frozenset(model.id for model in msgspec.json.decode(body, type=_EngineListing).data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
