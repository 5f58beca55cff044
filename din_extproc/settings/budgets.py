"""`budgets:`, what may be spent in a day, a week or a month.

Rule: a hard budget is exact over all replicas; where the shared counters can't be reached, it admits nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from din_extproc.domain.price import UNITS
from din_extproc.domain.spending import EACH, BudgetPeriod, SpendingBudget, SpendingBudgets
from din_extproc.settings.prices import read_money
from din_extproc.settings.section import AsTuple, Name, Section, Text

_LARGEST_MONEY = 4_000_000
"""Redis counts in doubles and money in 10**-9: twice as much is exact."""
_LARGEST_TOKENS = 10**15


def _zone(value: Any) -> Any:
    try:
        return ZoneInfo(value)
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"{value!r} is not a time zone, such as Europe/Berlin or UTC") from None


def _period(value: Any) -> Any:
    known = [period.value for period in BudgetPeriod]
    if value not in known:
        raise ValueError(f"{value!r} is not a period: {', '.join(known)}")
    return BudgetPeriod(value)


Money = Annotated[int, BeforeValidator(lambda value: read_money(value, UNITS, _LARGEST_MONEY)), Field(gt=0)]


class BudgetSection(Section):
    """One budget."""

    name: Name
    """In refusals, metrics and on the command line."""
    period: Annotated[BudgetPeriod, BeforeValidator(_period)]
    """`day`, `week` (from Monday) or `month`."""
    tokens: Annotated[int, Field(gt=0, le=_LARGEST_TOKENS)] | None = None
    """The most tokens of a period, prompts and answers together."""
    money: Money | None = None
    """The most money of a period, in the currency of `prices`."""
    tenant: Text = ""
    """The tenant that it is for, or `*`: every tenant has one of its own. Without it, one for all of them together."""
    key: Text = ""
    """The key or identity that it is for, by its id, or `*`. Without it, one for all of them together."""
    model: Text = ""
    """The physical model that it is for, or `*`. Without it, one for all of them together."""
    soft: bool = False
    """Requests pass when it is spent; a header and metrics say so."""

    @model_validator(mode="after")
    def _bounded(self) -> "BudgetSection":
        if self.tokens is None and self.money is None:
            raise ValueError("give `tokens`, `money` or both")
        if self.key and not self.tenant:
            raise ValueError("keys belong to a tenant: give `tenant`, or `tenant: '*'`")
        return self

    def budget(self, zone: ZoneInfo) -> SpendingBudget:
        """For the domain."""
        return SpendingBudget(
            name=self.name,
            period=self.period,
            zone=zone,
            tokens=self.tokens or 0,
            cost=self.money or 0,
            hard=not self.soft,
            tenant=self.tenant,
            key=self.key,
            model=self.model,
        )


def _http_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is not a URL such as https://hooks.example/din")
    return text


class WebhookSection(Section):
    """The receiver of warnings when 80 % and 100 % of a budget are spent."""

    url: Annotated[str, AfterValidator(_http_url)]
    secret: Annotated[SecretStr, Field(strict=False, min_length=16)]
    """The key of the signature in `x-din-signature`, at least 16 characters, such as `${DIN_WEBHOOK_SECRET}`."""


class BudgetsSection(Section):
    """`budgets:`."""

    time_zone: Annotated[ZoneInfo, BeforeValidator(_zone)] = ZoneInfo("UTC")
    """Where days, weeks and months begin at midnight, such as `Europe/Berlin`."""
    limits: Annotated[tuple[BudgetSection, ...], AsTuple] = ()
    """A request is charged to all that it fits."""
    webhook: WebhookSection | None = None
    """None: warnings are in the log and in metrics only."""

    @model_validator(mode="after")
    def _apart(self) -> "BudgetsSection":
        names = [each.name for each in self.limits]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two budgets are called {name!r}")
        return self

    def spending(self) -> SpendingBudgets | None:
        """For the domain; None: there are none."""
        return SpendingBudgets(tuple(each.budget(self.time_zone) for each in self.limits)) if self.limits else None


def unknown_names(section: BudgetsSection, known: Mapping[str, frozenset[str]]) -> list[tuple[int, str, str]]:
    """Return index, field and value of what budgets name and the configuration lacks. `known`: the names of each field."""
    return [
        (index, field, value)
        for index, budget in enumerate(section.limits)
        for field, names in known.items()
        if (value := getattr(budget, field)) not in {"", EACH} and value not in names
    ]
