"""Aliases and rules, as written, and their translation for `route/`.

Rule: this file knows the spelling only; what makes sense together is decided where routes are compiled.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from din_extproc.domain.price import UNITS
from din_extproc.domain.request import Priority
from din_extproc.route.aliases import Alias
from din_extproc.route.rules import Rule, RuleCondition, TokenRange
from din_extproc.settings.prices import read_money
from din_extproc.settings.section import AsTuple, Name, OneOrMany, Section, Text


def read_priority(text: object) -> object:
    """A priority by its name."""
    known = [priority.value for priority in Priority]
    if not isinstance(text, str) or text not in known:
        raise ValueError(f"{text!r} is not a priority: {', '.join(known)}")
    return Priority(text)


PriorityName = Annotated[Priority, BeforeValidator(read_priority)]
Texts = Annotated[tuple[Text, ...], OneOrMany, Field(min_length=1)]
Tokens = Annotated[int, Field(ge=0, le=10**9)]
Money = Annotated[int, BeforeValidator(lambda value: read_money(value, UNITS, 10**6))]
"""In 10**-9 of the currency."""


class AliasSection(Section):
    """One logical name: one `model`, or several `models` that rules choose among."""

    model: Text | None = None
    models: Annotated[tuple[Text, ...], AsTuple, Field(min_length=1)] | None = None
    version: str = ""

    @model_validator(mode="after")
    def _one(self) -> "AliasSection":
        if (self.model is None) == (self.models is None):
            raise ValueError("either `model` or `models`, one of them")
        return self

    def alias(self, name: str) -> Alias:
        """For `route/`."""
        targets = (self.model,) if self.model is not None else self.models or ()
        return Alias(name, targets, self.version, listed=self.models is not None)


class TokensSection(Section):
    """Bounds; at least one."""

    gt: Tokens | None = None
    ge: Tokens | None = None
    lt: Tokens | None = None
    le: Tokens | None = None

    @model_validator(mode="after")
    def _any(self) -> "TokensSection":
        if not self.model_fields_set:
            raise ValueError("give a bound: gt, ge, lt or le")
        return self


class CostSection(Section):
    """Bounds in the currency of `prices`; at least one."""

    gt: Money | None = None
    ge: Money | None = None
    lt: Money | None = None
    le: Money | None = None

    @model_validator(mode="after")
    def _any(self) -> "CostSection":
        if not self.model_fields_set:
            raise ValueError("give a bound: gt, ge, lt or le")
        return self


def _header_match(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"present"} and isinstance(value["present"], bool):
        return value["present"]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(value, str):
        return (value,)
    raise ValueError("a text, a list of texts or {present: true} is expected")


HeaderName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9-]+$"), BeforeValidator(lambda name: name.lower() if isinstance(name, str) else name)
]
HeaderMatch = Annotated[Any, BeforeValidator(_header_match)]


def _condition(value: Any) -> Any:
    """`always` is the one condition that is a word."""
    if value == "always":
        return {"always": True}
    if isinstance(value, dict) and "always" in value:
        raise ValueError("`always` can't be combined with other conditions: when: always")
    if not isinstance(value, dict):
        raise ValueError("`always`, or a mapping of conditions such as {estimated_tokens: {gt: 16000}}, is expected")  # noqa: TRY004 - a finding
    return value


class WhenSection(Section):
    """One condition; all its fields must hold."""

    always: bool = False
    path: Annotated[tuple[Text, ...], OneOrMany] = ()
    estimated_tokens: TokensSection | None = None
    timeout_ms: TokensSection | None = None
    """The client's deadline (`x-din-timeout-ms`); a request without one counts as longer than every bound."""
    budget_tokens: TokensSection | None = None
    """The most tokens that the client wants to spend (`x-din-budget-tokens`); a request without it counts as above every bound."""
    budget_cost: CostSection | None = None
    """Likewise in money (`x-din-budget-cost`)."""
    header: dict[HeaderName, HeaderMatch] = Field(default_factory=dict)
    model: Texts | None = None
    tenant: Texts | None = None
    priority: Annotated[tuple[PriorityName, ...], OneOrMany] = ()
    stream: bool | None = None
    any: "Annotated[tuple[When, ...], AsTuple]" = ()
    all: "Annotated[tuple[When, ...], AsTuple]" = ()
    negated: "When | None" = Field(default=None, alias="not")
    cel: Text | None = None

    def condition(self) -> RuleCondition:
        """For `route/`."""
        return RuleCondition(
            always=self.always,
            path=self.path,
            estimated_tokens=_bounds(self.estimated_tokens),
            timeout_ms=_bounds(self.timeout_ms),
            budget_tokens=_bounds(self.budget_tokens),
            budget_cost=_bounds(self.budget_cost),
            header=dict(self.header),
            model=self.model or (),
            tenant=self.tenant or (),
            priority=self.priority,
            stream=self.stream,
            any=tuple(inner.condition() for inner in self.any),
            all=tuple(inner.condition() for inner in self.all),
            negated=None if self.negated is None else self.negated.condition(),
            cel=self.cel or "",
        )


def _bounds(section: TokensSection | CostSection | None) -> TokenRange | None:
    return None if section is None else TokenRange(gt=section.gt, ge=section.ge, lt=section.lt, le=section.le)


When = Annotated[WhenSection, BeforeValidator(_condition)]


class RuleSection(Section):
    """One rule; the first that matches wins."""

    id: Name
    when: When
    pool: Text
    fallback: Text | None = None
    overflow: bool = False
    """The fallback also takes requests while every node of the pool is full (`max_concurrency`) or too slow for `x-din-timeout-ms`."""
    stays_on_site: bool = False
    """Neither `pool` nor `fallback` may be a remote API: `check` refuses a change that would let this rule's requests leave the site."""

    def rule(self) -> Rule:
        """For `route/`."""
        return Rule(self.id, self.when.condition(), self.pool, self.fallback or "", self.stays_on_site, overflow=self.overflow)


WhenSection.model_rebuild()
