"""What requests cost: exact in integers, by the price of their day, against the dearest model that they could have had."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.price import UNITS, Price, PriceList, format_money, parse_money
from din_extproc.domain.usage import Outcome, Usage
from tests.support.exchanges import record

NEW_YEAR = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
SMALL = Price(since=0, input=150_000, cached_input=50_000, output=600_000)
LARGE = Price(since=0, input=3_000_000, cached_input=3_000_000, output=15_000_000, request=10**9, media=2 * 10**9)


def test_cached_tokens_have_their_own_price_and_are_not_paid_twice():
    assert SMALL.cost(Usage(1000, 100, cached_tokens=400), 0) == 600 * 150 + 400 * 50 + 100 * 600


def test_a_request_and_its_images_cost_besides_their_tokens():
    assert LARGE.cost(Usage(1, 0), media=3) == 3000 + 10**6 + 6 * 10**6


def test_images_that_are_made_and_seconds_of_audio_have_prices_of_their_own():
    price = Price(since=0, input=10**6, generated_image=40 * 10**9, audio_second=10**8)
    assert price.cost(Usage(7, 0, images=2), 0) == 7 * 10**3 + 2 * 40 * 10**6
    assert price.cost(Usage(0, 5, audio_seconds=61), 0) == 61 * 10**5
    assert PriceList("EUR", {"m": (price,)}).cost("m", 0.0, Usage(0, 0, images=1), 0) == 0, "nothing was made"


@given(st.integers(0, 10**7), st.integers(0, 10**6))
def test_sums_are_off_by_less_than_half_a_unit_a_request(prompt, completion):
    price = Price(since=0, input=333, output=1001)
    assert abs(price.cost(Usage(prompt, completion), 0) * 1000 - (prompt * 333 + completion * 1001)) <= 500


def test_a_price_holds_from_its_day_on():
    prices = PriceList("EUR", {"m": (Price(since=NEW_YEAR, input=2000), Price(since=0, input=1000))})
    assert [prices.cost("m", at, Usage(7, 0), 0) for at in (NEW_YEAR - 1, NEW_YEAR)] == [7, 14]
    assert PriceList("EUR", {"m": (Price(since=NEW_YEAR, input=2000),)}).cost("m", NEW_YEAR - 1, Usage(7, 0), 0) == 0


def test_what_was_saved_is_measured_against_the_dearest_model_behind_the_name():
    prices = PriceList("EUR", {"small": (SMALL,), "large": (LARGE,)}, {"auto": ("small", "large", "free")})
    used = Usage(1000, 100)
    small, large = SMALL.cost(used, 0), LARGE.cost(used, 0)
    assert prices.costs(record(model="small", alias="auto", usage=used)) == (small, large - small)
    assert prices.costs(record(model="large", alias="auto", usage=used)) == (large, 0)
    assert prices.costs(record(model="small", alias="small", usage=used)) == (small, 0)
    assert prices.costs(record(model="free", alias="free", usage=used)) == (0, 0)


def test_refused_and_unsent_requests_cost_nothing_and_failed_ones_what_they_used():
    prices = PriceList("EUR", {"m": (LARGE,)})
    assert prices.costs(record(refusal="rate_limit_exceeded", outcome=Outcome.REFUSED)) == (0, 0)
    assert prices.costs(record(outcome=Outcome.UPSTREAM_ERROR, usage=Usage(0, 0), sent_ms=1.0)) == (0, 0)
    assert prices.costs(record(outcome=Outcome.CLIENT_CANCELLED, usage=Usage(1, 0), sent_ms=1.0)) == (10**6 + 3000, 0)


@pytest.mark.parametrize(
    ("units", "text"), [(0, "0.00"), (UNITS, "1.00"), (-1, "-0.000000001"), (123_450_000_000, "123.45"), (1_234_567, "0.001234567")]
)
def test_money_is_written_as_a_plain_decimal_number_and_read_back(units, text):
    assert format_money(units) == text
    if units >= 0:
        assert parse_money(text, UNITS) == units


@pytest.mark.parametrize("value", ["-1", "inf", "0.0000000001"])
def test_an_amount_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="is not an amount of money"):
        parse_money(value, UNITS)
