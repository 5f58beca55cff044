"""`prices:`, what models cost.

Rule: amounts are decimal numbers as written; they never pass through binary fractions.
"""

from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import InvalidOperation
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from din_extproc.domain.price import PRICE_UNITS, Price, PriceList, parse_money
from din_extproc.settings.section import ModelName, Section, Text

_MILLION = 10**6
_LARGEST = 10**6


def read_money(value: Any, units: int, largest: int) -> int:
    """Return an amount of a file in these units; for validators.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("an amount of money is expected, such as 0.15")  # noqa: TRY004 - pydantic turns it into a finding
    try:
        amount = parse_money(value, units)
    except InvalidOperation:
        raise ValueError(f"{value!r} is not an amount of money, such as 0.15") from None
    if amount > largest * units:
        raise ValueError(f"at most {largest} is expected")
    return amount


def _first_moment(value: Any) -> Any:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise ValueError("a date such as 2027-05-01 is expected")  # noqa: TRY004 - pydantic turns it into a finding
    return value


Day = Annotated[date, BeforeValidator(_first_moment)]
PerMillion = Annotated[int, BeforeValidator(lambda value: read_money(value, PRICE_UNITS // _MILLION, _LARGEST))]
"""An amount per million tokens."""
PerPiece = Annotated[int, BeforeValidator(lambda value: read_money(value, PRICE_UNITS, _LARGEST))]


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,)


class PriceSection(Section):
    """Prices of one model from a day on."""

    since: Day | None = Field(default=None, alias="from")
    """The first day, UTC; without one: always."""
    input: PerMillion = 0
    """A million prompt tokens."""
    cached_input: PerMillion | None = None
    """A million prompt tokens that the engine's cache had; without one: as `input`."""
    output: PerMillion = 0
    """A million tokens of answers."""
    request: PerPiece = 0
    """One answered request."""
    image: PerPiece = 0
    """One image, audio or file of a prompt, besides its tokens."""
    generated_image: PerPiece = 0
    """One image that was made."""
    audio_second: PerPiece = 0
    """One second of audio that was transcribed or translated, besides its tokens."""

    def price(self) -> Price:
        """For the domain."""
        since = 0.0 if self.since is None else datetime(self.since.year, self.since.month, self.since.day, tzinfo=UTC).timestamp()
        cached = self.input if self.cached_input is None else self.cached_input
        return Price(
            since=since,
            input=self.input,
            cached_input=cached,
            output=self.output,
            request=self.request,
            media=self.image,
            generated_image=self.generated_image,
            audio_second=self.audio_second,
        )


def _apart(prices: tuple[PriceSection, ...]) -> tuple[PriceSection, ...]:
    days = [price.since for price in prices]
    if len(set(days)) < len(days):
        raise ValueError("two prices are valid from the same day")
    return prices


ModelPrices = dict[ModelName, Annotated[tuple[PriceSection, ...], BeforeValidator(_listed), Field(min_length=1), AfterValidator(_apart)]]


class PricesSection(Section):
    """`prices:`. Either `models` or `file` has them."""

    currency: Annotated[str, Field(pattern="^[A-Za-z]{1,8}$")]
    """Of all prices and budgets, such as EUR."""
    models: ModelPrices = Field(default_factory=dict)
    """Physical model -> its prices; a list where they change on a day."""
    file: Text | None = None
    """A YAML file with `models`, relative to this one and reloaded like it."""
    header: bool = False
    """Whole answers say what they cost, in `x-din-cost`; Envoy holds them until they are complete."""

    @model_validator(mode="after")
    def _one_place(self) -> "PricesSection":
        if self.file is not None and self.models:
            raise ValueError("prices are either under `models` or in `file`")
        return self


def make_prices(section: PricesSection | None, prices: ModelPrices, choices: Mapping[str, tuple[str, ...]]) -> PriceList:
    """For the domain. `choices`: the models that each requested name stands for."""
    if section is None:
        return PriceList()
    models = {model: tuple(sorted((each.price() for each in listed), key=lambda price: -price.since)) for model, listed in prices.items()}
    return PriceList(section.currency, models, {name: among for name, among in choices.items() if len(among) > 1}, section.header)
