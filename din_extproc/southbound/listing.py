"""Reads the models of an engine from `GET /v1/models`, which is the same for every OpenAI-compatible engine.

Any body gives the names or None.
"""

import msgspec
from msgspec import Struct

PATH = "/v1/models"


class _Model(Struct):
    id: str
    parent: str | None = None
    """The model that this one adapts, of an adapter (LoRA) in vLLM's and SGLang's lists."""


class _EngineListing(Struct):
    data: list[_Model]


class ModelNames(Struct, frozen=True):
    """The names that an engine lists."""

    models: frozenset[str] = frozenset()
    """All of them."""
    adapters: frozenset[str] = frozenset()
    """Of these, the adapters of another model."""


def parse_models(body: bytes) -> ModelNames | None:
    """Return the names in a `/v1/models` answer, or None for any other body."""
    try:
        listed = msgspec.json.decode(body, type=_EngineListing).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return ModelNames(frozenset(model.id for model in listed), frozenset(model.id for model in listed if model.parent))
