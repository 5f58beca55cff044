"""The model catalogue: which models exist, in which versions, and what is known about them.

Rule: it describes models, not nodes; a node says only where it differs.
"""

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, Field

from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.route.versions import is_version
from din_extproc.settings.section import AsTuple, ModelName, Name, Positive, Section, Text


def _check_version(text: str) -> str:
    if not is_version(text):
        raise ValueError(f"{text!r} is not a version such as '2025.3.1', '1.4' or '2.0rc1': version constraints could not be checked")
    return text


VersionText = Annotated[str, AfterValidator(_check_version)]


class CatalogModel(Section):
    """One version of one model."""

    model_name: ModelName
    model_version: VersionText
    dtype: Name
    max_seq_len: Positive
    """Tokens: prompt and output together."""
    tensor_parallel: Positive = 1
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Of the weights."""
    tokenizer: Text | None = None
    """A local folder with the model's tokenizer, relative to the catalogue; None: lengths are estimated."""
    media_tokens: Positive = TokenCalibrator().media_tokens
    """Tokens that one image, audio or file adds to a prompt, whatever its size in bytes."""
    output_tokens_default: Positive = 256
    """Expected output tokens of a request without a maximum, until something was learned."""


class CatalogFile(Section):
    """The JSON file."""

    models: Annotated[tuple[CatalogModel, ...], AsTuple]


class CatalogSection(Section):
    """`catalog:`."""

    source: Text
    """A JSON file, relative to the configuration, or an `http://` or `https://` URL."""
    refresh_s: Annotated[float, Field(strict=False, ge=1, le=86_400)] = 30.0
    """How often a URL is asked again."""


class Catalog:
    """The models of one catalogue, found by name, or by name and version."""

    __slots__ = ("_versions", "models")

    def __init__(self, models: Iterable[CatalogModel] = ()) -> None:
        self.models = tuple(models)
        self._versions: dict[str, dict[str, CatalogModel]] = {}
        for model in self.models:
            self._versions.setdefault(model.model_name, {})[model.model_version] = model

    def versions(self, name: str) -> dict[str, CatalogModel]:
        """Version -> entry, in the order of the file; empty when the catalogue does not know the model."""
        return self._versions.get(name, {})

    def model(self, name: str) -> CatalogModel | None:
        """The model's first entry: it has what does not depend on the version."""
        return next(iter(self.versions(name).values()), None)
