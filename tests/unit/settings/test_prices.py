"""What `prices:` takes, in the configuration or in a file of its own."""

import pytest

from din_extproc.domain.price import Price, PriceList
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings
from tests.support.configs import read


def test_prices_are_exact_and_the_newest_that_is_valid_counts(tmp_path):
    loaded = read(tmp_path, "prices: {currency: EUR, models: {small: [{input: 0.15, output: 0.6}, {from: 2027-01-01, input: 0.1}]}}")
    assert isinstance(loaded, Settings)
    newer, older = loaded.prices.models["small"]
    assert older == Price(since=0, input=150_000, cached_input=150_000, output=600_000)
    assert (newer.since, newer.input, newer.output) == (1_798_761_600, 100_000, 0)
    assert loaded.prices.choices == {"auto": ("small", "large")}


def test_a_price_file_is_part_of_the_configuration(tmp_path):
    (tmp_path / "prices.yaml").write_text(
        'models: {large: {input: "3", request: 0.001, image: 0.002, generated_image: 0.04, audio_second: 0.0001}}'
    )
    loaded = read(tmp_path, "prices: {currency: EUR, file: prices.yaml}")
    assert isinstance(loaded, Settings)
    assert str(tmp_path / "prices.yaml") in loaded.files
    large = Price(
        since=0, input=3_000_000, cached_input=3_000_000, request=10**9, media=2 * 10**9, generated_image=40 * 10**9, audio_second=10**8
    )
    assert loaded.prices.models == {"large": (large,)}
    (tmp_path / "prices.yaml").write_text("models: {large: {input: 4}}")
    changed = load(tmp_path / "din.yaml", {})
    assert isinstance(changed, Settings)
    assert changed.fingerprint != loaded.fingerprint


def test_without_prices_nothing_has_one(tmp_path):
    loaded = read(tmp_path, "")
    assert isinstance(loaded, Settings)
    assert loaded.prices == PriceList()


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ("{currency: EUR, models: {small: {input: -1}}}", "is not an amount of money"),
        ("{currency: EUR, models: {small: {input: 0.0000001}}}", "at most 6 decimals"),
        ("{currency: EUR, models: {small: {input: .inf}}}", "is not an amount of money"),
        ("{currency: EUR, models: {small: {input: cheap}}}", "is not an amount of money"),
        ("{currency: EUR, models: {small: {request: 1000001}}}", "at most 1000000 is expected"),
        ("{currency: EUR, models: {small: {from: soon}}}", "a date such as 2027-05-01 is expected"),
        ("{currency: EUR, models: {small: [{input: 1}, {input: 2}]}}", "valid from the same day"),
        ("{currency: EUR, models: {small: []}}", "at least 1"),
        ("{currency: EUR, models: {small: {input: 1}}, file: p.yaml}", "either under `models` or in `file`"),
        ("{currency: EUR, file: missing.yaml}", "can't be read: No such file"),
        ("{models: {small: {input: 1}}}", "currency: is missing"),
    ],
)
def test_what_is_no_price_is_reported(tmp_path, prices, message):
    rejected = read(tmp_path, f"prices: {prices}")
    assert isinstance(rejected, ConfigRejected)
    assert message in str(rejected)


def test_a_price_of_a_model_that_no_pool_serves_is_a_warning(tmp_path):
    loaded = read(tmp_path, "prices: {currency: EUR, models: {smal: {input: 1}}}")
    assert isinstance(loaded, Settings)
    assert "no pool serves a model 'smal'" in str(loaded.warnings[0])
