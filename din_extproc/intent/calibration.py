"""Learns the tokens per unit of each script class for one model, from prompts that the model itself counted.

A calibration is immutable; learning returns a new one. An engine that misreports can bend it slowly and never beyond its bounds.

It is a Kalman filter over drifting weights: each settled prompt is one measurement of the relative error, long prompts count more than
short ones, and a weight without measurements keeps its uncertainty.
"""

from itertools import repeat
from operator import mul, sub

from msgspec import Struct

CLASSES = (
    "lower",
    "upper",
    "digit",
    "line",
    "punctuation",
    "ideograph",
    "kana",
    "other",
    "punctuation pair",
    "space run",
    "punctuation and letter",
    "digit pair",
    "message",
    "request",
)
"""The features of a prompt: characters by class, pairs that tokenizers merge or split, messages, and the request itself (the template's
frame)."""

_PRIOR = (
    (0.05, 0.05),
    (0.28, 0.15),
    (1.47, 0.40),
    (0.88, 0.30),
    (0.57, 0.30),
    (0.85, 0.50),
    (1.50, 0.60),
    (1.20, 0.50),
    (-0.6, 0.40),
    (0.87, 0.30),
    (1.00, 0.30),
    (-1.0, 0.60),
    (4.0, 4.0),
    (5.0, 16.0),
)
"""Initial weight and standard deviation per class: the mean over the vocabularies of four current models."""

_VARIANCE = tuple(deviation * deviation for _, deviation in _PRIOR)
_DRIFT = tuple(variance * 1e-5 for variance in _VARIANCE)
_BOUNDS = tuple((weight - 4 * deviation, weight + 4 * deviation) for weight, deviation in _PRIOR)
_NOISE_LONG = 0.02**2
"""Variance of the relative error that remains for a very long prompt."""
_NOISE_SHORT = 0.5
"""Additional variance, divided by the prompt's tokens."""
_BAND_SHARE = 0.02
"""Weight of the latest error in the band after the first errors."""
_P95_OVER_MEAN = 2.8
"""Measured over mixed texts; 2.45 for normally distributed errors."""
_TEXT_CLASSES = 8
_TRUSTED_AFTER = 64


class Calibration(Struct, frozen=True, gc=False):
    """Tokens per unit of each class, and the error of estimates made with them."""

    weights: tuple[float, ...] = tuple(weight for weight, _ in _PRIOR)
    covariance: tuple[tuple[float, ...], ...] = tuple(
        tuple(_VARIANCE[row] if row == column else 0.0 for column in range(len(_PRIOR))) for row in range(len(_PRIOR))
    )
    band: float = 0.3
    """The relative error that 19 of 20 recent estimates stayed within."""
    samples: int = 0
    """Number of prompts learned from."""


def update_calibration(calibration: Calibration, features: tuple[float, ...], fixed: int, actual: int) -> Calibration:
    """Return the calibration after one more prompt with the engine's token count.

    Prompts with a fixed part are ignored, because the cost of their text is unknown. Counts that no tokenizer can produce are ignored, and
    an outlier moves the weights by at most half a band.

    Args:
        calibration: Of the model that answered.
        features: `Estimate.features` of the request.
        fixed: `Estimate.fixed` of the request.
        actual: The engine's `prompt_tokens`.
    """
    if fixed or len(features) != len(CLASSES) or not _is_plausible(features, actual):
        return calibration
    error = 1.0 - sum(map(mul, calibration.weights, features)) / actual
    seen = calibration.samples + 1
    band = _update_band(calibration.band, abs(error), seen)
    if seen > _TRUSTED_AFTER and abs(error) < calibration.band / 4:
        return Calibration(calibration.weights, calibration.covariance, band, seen)
    units = [feature / actual for feature in features]
    weights, covariance = _update_weights(calibration, units, error, _NOISE_LONG + _NOISE_SHORT / actual)
    return Calibration(weights, covariance, band, seen)


def _is_plausible(features: tuple[float, ...], actual: int) -> bool:
    characters = sum(features[:_TEXT_CLASSES])
    return characters / 32 < actual < 4 * characters + 4096 + 256 * features[-2]


def _update_band(band: float, error: float, seen: int) -> float:
    """Return the band after one step of a running mean of errors, scaled to their P95."""
    share = max(_BAND_SHARE, 1.0 / (seen + 1))
    return min(1.0, max(0.01, band + share * (_P95_OVER_MEAN * min(1.0, error) - band)))


def _update_weights(
    calibration: Calibration, units: list[float], error: float, noise: float
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    spread = [sum(map(mul, row, units)) for row in calibration.covariance]
    surprise = noise + sum(map(mul, spread, units))
    widest = max(0.1, calibration.band / 2)
    clipped = max(-widest, min(widest, error)) / surprise
    weights = tuple(
        [
            min(high, max(low, weight + gain * clipped))
            for weight, gain, (low, high) in zip(calibration.weights, spread, _BOUNDS, strict=True)
        ]
    )
    rows: list[tuple[float, ...]] = []
    for index, (row, gain) in enumerate(zip(calibration.covariance, spread, strict=True)):
        fresh = list(map(sub, row, map(mul, spread, repeat(gain / surprise))))
        fresh[index] = min(_VARIANCE[index], max(0.0, fresh[index]) + _DRIFT[index])
        rows.append(tuple(fresh))
    return weights, tuple(rows)
