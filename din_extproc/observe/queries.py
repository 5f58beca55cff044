"""Questions that people at three in the morning ask the metrics, in Prometheus' language, made from the instruments.

Rule: no metric's name is spelled here; what an instrument is called, every question calls it.
"""

from din_extproc.observe import instruments as of
from din_extproc.observe.instruments import Instrument, label

WINDOW = "$__rate_interval"
"""Grafana's: as long as a panel's resolution needs."""


def select_series(instrument: Instrument, suffix: str = "", **labels: str) -> str:
    """The samples of an instrument, those with these labels: `selected(REQUESTS, outcome="completed")`. A value is a regular expression."""
    inner = ",".join(f'{name}=~"{value}"' for name, value in labels.items())
    return f"{instrument.prometheus}{suffix}" + (f"{{{inner}}}" if inner else "")


def rate(instrument: Instrument, *by: str, window: str = WINDOW, suffix: str = "", **labels: str) -> str:
    """The rate per second, by these attributes."""
    return f"sum{_group_by(*by)}(rate({select_series(instrument, suffix, **labels)}[{window}]))"


def total(instrument: Instrument, *by: str, **labels: str) -> str:
    """The sum over all sidecars."""
    return f"sum{_group_by(*by)}({select_series(instrument, **labels)})"


def quantile(share: float, instrument: Instrument, *by: str, window: str = WINDOW, **labels: str) -> str:
    """A quantile of the values."""
    grouped = ", ".join(["le", *map(label, by)])
    return f"histogram_quantile({share:g}, sum by ({grouped}) (rate({select_series(instrument, '_bucket', **labels)}[{window}])))"


def mean(instrument: Instrument, *by: str, window: str = WINDOW) -> str:
    """The mean of a histogram's values."""
    return f"{rate(instrument, *by, window=window, suffix='_sum')} / {rate(instrument, *by, window=window, suffix='_count')}"


def share(part: str, whole: str) -> str:
    """A part of a whole; nothing when there is no whole."""
    return f"({part}) / ({whole} > 0)"


FAULTY = "upstream_.*|not_dispatched"
"""Outcomes that a client sees as a failure that is not its own."""


def failures(window: str = WINDOW) -> str:
    """The share of finished exchanges that failed at nodes, or found none."""
    failed = rate(of.REQUESTS, window=window, **{label(of.OUTCOME): FAULTY})
    return share(failed, rate(of.REQUESTS, window=window))


def _group_by(*attributes: str) -> str:
    return f" by ({', '.join(map(label, attributes))}) " if attributes else ""
