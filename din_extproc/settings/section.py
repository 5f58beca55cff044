"""Base class of all configuration sections, strict and frozen, and the value types that sections share.

Rule: a value is taken as it stands or refused; nothing is converted but one item to a list of one.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from din_extproc.domain.node import Endpoint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}").fullmatch
_MODEL = re.compile(r"[^\s*?,\"'\\\x00-\x1f\x7f-\x9f]{1,200}").fullmatch
_UNSPECIFIED = {"0.0.0.0": "0.0.0.0", "[::]": "::"}


class Section(BaseModel):
    """A part of the file; a field that it does not have is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, arbitrary_types_allowed=True)


def _name(text: str) -> str:
    if _NAME(text) is None:
        raise ValueError(f"{text!r} is not a name: 1-128 letters, digits, '.', '_' and '-', a letter or digit first")
    return text


def _name_if_any(text: str) -> str:
    return text and _name(text)


def _model(text: str) -> str:
    if _MODEL(text) is None:
        raise ValueError(f"{text!r} is not a model's name: no spaces, quotes, commas, backslashes, '*' or '?', at most 200 characters")
    return text


def _alias(text: str) -> str:
    return text if _model(text.replace("*", "x")) else ""


def parse_listen(text: str) -> Endpoint:
    """An address to listen on: an IP address and a port; `0.0.0.0` and `[::]` are every address of the machine.

    Raises:
        ValueError: it is something else.
    """
    host, _, port = text.rpartition(":")
    try:
        if host in _UNSPECIFIED:
            return Endpoint(host=_UNSPECIFIED[host], port=Endpoint.parse(f"127.0.0.1:{port}").port)
        return Endpoint.parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no address to listen on: an IP address and a port, such as 0.0.0.0:8000 or [::1]:8000") from error


def _read_with(read: Callable[[str], Endpoint]) -> BeforeValidator:
    """Read a text into an endpoint."""

    def convert(value: Any) -> Any:
        if isinstance(value, Endpoint):
            return value
        if not isinstance(value, str):
            raise ValueError("a text such as '10.0.0.7:8000' is expected")  # noqa: TRY004 - pydantic turns it into a finding
        return read(value)

    return BeforeValidator(convert)


def one_or_many(value: Any) -> Any:
    """Read a single item as a list of one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Name = Annotated[str, AfterValidator(_name)]
NameIfAny = Annotated[str, AfterValidator(_name_if_any)]
""""": none."""
ModelName = Annotated[str, AfterValidator(_model)]
AliasName = Annotated[str, AfterValidator(_alias)]
"""A model's name, or a pattern with `*`."""
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1, le=10**9)]
"""Up to what fits every number of Envoy's and of a node's own."""
Ceiling = Annotated[int, Field(ge=1, le=10**10)]
"""Of a budget. Redis counts in doubles and tokens in 1/60000: what two minutes may hold of them is exact up to here."""
NodeAddress = Annotated[Endpoint, _read_with(Endpoint.parse)]
ListenAddress = Annotated[Endpoint, _read_with(parse_listen)]
AsTuple = BeforeValidator(_listed)
OneOrMany = BeforeValidator(one_or_many)
