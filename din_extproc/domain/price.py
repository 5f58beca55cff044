"""Prices of models and the cost of requests, in integers.

Prices are kept in 10**-12 of the currency per token, so that a price per million tokens is exact to six decimals; costs in 10**-9.
"""

from collections.abc import Mapping
from decimal import Decimal

from msgspec import Struct

from din_extproc.domain.usage import ExchangeRecord, Usage

UNITS = 10**9
"""Units of cost in one unit of the currency."""
PRICE_UNITS = 10**12
"""Units of price in one unit of the currency."""
_PER_UNIT = PRICE_UNITS // UNITS


class Price(Struct, frozen=True, gc=False, kw_only=True):
    """The prices of one model from a moment on, in 10**-12 of the currency."""

    since: float
    """Seconds since the epoch; 0: it always did."""
    input: int = 0
    """A prompt token."""
    cached_input: int = 0
    """A prompt token that the engine's cache had."""
    output: int = 0
    """A token of the answer."""
    request: int = 0
    """A request that was answered."""
    media: int = 0
    """An image, audio or file of the prompt."""
    generated_image: int = 0
    """An image of the answer."""
    audio_second: int = 0
    """A second of audio that was read."""

    def cost(self, usage: Usage, media: int) -> int:
        """Return the cost of an answered request in 10**-9 of the currency, rounded half up."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        tokens = fresh * self.input + usage.cached_tokens * self.cached_input + usage.completion_tokens * self.output
        pieces = media * self.media + usage.images * self.generated_image + usage.audio_seconds * self.audio_second
        return (tokens + self.request + pieces + _PER_UNIT // 2) // _PER_UNIT


class PriceList(Struct, frozen=True):
    """The prices of all models, in one currency."""

    currency: str = ""
    models: Mapping[str, tuple[Price, ...]] = {}
    """By physical model, the newest price first."""
    choices: Mapping[str, tuple[str, ...]] = {}
    """The models that a requested name stands for, where there is more than one."""
    header: bool = False
    """Whole answers say what they cost, in `x-din-cost`."""

    def price_at(self, model: str, at: float) -> Price | None:
        """Return the price of a model at a moment; None: it has none."""
        return next((price for price in self.models.get(model, ()) if price.since <= at), None)

    def cost(self, model: str, at: float, usage: Usage, media: int) -> int:
        """Return the cost of a request; 0 for a model without a price, and for a request that used no token."""
        price = self.price_at(model, at)
        return 0 if price is None or not usage.total_tokens else price.cost(usage, media)

    def costs(self, record: ExchangeRecord) -> tuple[int, int]:
        """Return what an exchange cost, and what the dearest model that its name stands for would have cost more."""
        if record.refusal or record.unsent:
            return 0, 0
        cost = self.cost(record.model, record.started_at, record.usage, record.media)
        rivals = (self.cost(model, record.started_at, record.usage, record.media) for model in self.choices.get(record.alias, ()))
        return cost, max(0, max(rivals, default=cost) - cost)


NO_PRICES = PriceList()


def format_money(units: int) -> str:
    """Write a cost as a plain decimal number: at least two decimals, and no more than it needs."""
    sign, whole, rest = "-" * (units < 0), *divmod(abs(units), UNITS)
    return f"{sign}{whole}.{f'{rest:09d}'.rstrip('0').ljust(2, '0')}"


def parse_money(value: float | str | Decimal, units: int) -> int:
    """Return an amount of the currency in these units.

    Raises:
        ValueError: it is no finite number, is negative, or has more decimals than the units have.
    """
    amount = Decimal(str(value)) * units
    if not amount.is_finite() or amount < 0 or amount != amount.to_integral_value():
        raise ValueError(f"{value} is not an amount of money: a number of at least 0 with at most {len(str(units)) - 1} decimals")
    return int(amount)
