"""Policies for sensitive data in prompts, as written: a tenant's policy, and the operator's own kinds.

Rule: a policy alone applies to every kind.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from din_extproc.domain.tenant import OnSensitive, SensitiveData
from din_extproc.screen.kinds import BUILT_IN, custom
from din_extproc.settings.section import Name, OneOrMany, Section, Text


def _read_policy(value: Any) -> Any:
    """A policy by its name. YAML reads a bare `off` as false."""
    value = OnSensitive.OFF.value if value is False else value
    known = [policy.value for policy in OnSensitive]
    if isinstance(value, OnSensitive):
        return value
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{value!r} is not a policy: {', '.join(known)}")
    return OnSensitive(value)


def _read_one_policy(value: Any) -> Any:
    """A policy alone applies to every kind."""
    return value if isinstance(value, dict | SensitiveDataSection) else {"policy": value}


class SensitiveDataSection(Section):
    """Policy for sensitive data in prompts."""

    policy: Annotated[OnSensitive, BeforeValidator(_read_policy)]
    kinds: Annotated[tuple[Text, ...], OneOrMany, Field(min_length=1)] | None = None
    """Built-in ones and those of the `sensitive_data` section; None: all of them."""

    def sensitive_data(self) -> SensitiveData:
        """For the domain."""
        return SensitiveData(self.policy, self.kinds)


SensitiveDataPolicy = Annotated[SensitiveDataSection, BeforeValidator(_read_one_policy)]


def _check_pattern(text: str) -> str:
    custom("pattern", text)
    return text


def _check_new_kind(name: str) -> str:
    if name in BUILT_IN:
        raise ValueError(f"{name!r} is a kind already; there are: {', '.join(BUILT_IN)}")
    return name


class SensitivePatternsSection(Section):
    """`sensitive_data:`, kinds of the operator's own."""

    patterns: dict[Annotated[Name, AfterValidator(_check_new_kind)], Annotated[str, AfterValidator(_check_pattern)]] = Field(
        default_factory=dict
    )
    """RE2 syntax, by name."""
