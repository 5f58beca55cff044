"""Families as Prometheus reads them: its text format, version 0.0.4.

Rule: a page is made in slices, each small and each whole: whoever serves it can let others go first between two of them.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from din_extproc.observe.families import Distribution, Family, Labels
from din_extproc.observe.instruments import Instrument, label

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SLICE = 20
"""Lines: one histogram or so, a tenth of a millisecond."""
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def slices(families: Iterable[Family]) -> Iterator[bytes]:
    """The page, a slice at a time. Of families without values only the name and the kind are there."""
    lines: list[str] = []
    for family in families:
        instrument = family.instrument
        name = instrument.prometheus
        names = [label(attribute) for attribute in instrument.labels]
        bounds = [_number(bound) for bound in instrument.bounds]
        lines += (f"# HELP {name} {instrument.about}", f"# TYPE {name} {instrument.kind.value}")
        for labels, value in family.points:
            inner = _inner(names, labels)
            if isinstance(value, Distribution):
                _histogram(lines, name, inner, bounds, value)
            else:
                lines.append(f"{name}{{{inner}}} {_number(value)}" if inner else f"{name} {_number(value)}")
            if len(lines) >= _SLICE:
                yield _page(lines)
                lines = []
    if lines:
        yield _page(lines)


def samples(instrument: Instrument) -> tuple[str, ...]:
    """The names of the samples that an instrument leaves on the page."""
    name = instrument.prometheus
    return (f"{name}_bucket", f"{name}_sum", f"{name}_count") if instrument.bounds else (name,)


def _histogram(lines: list[str], name: str, inner: str, bounds: list[str], value: Distribution) -> None:
    before = f"{inner}," if inner else ""
    counts = list(accumulate(value.counts))
    lines.extend([f'{name}_bucket{{{before}le="{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=False)])
    lines.append(f'{name}_bucket{{{before}le="+Inf"}} {counts[-1]}')
    braced = f"{{{inner}}}" if inner else ""
    lines.append(f"{name}_sum{braced} {_number(value.total)}")
    lines.append(f"{name}_count{braced} {counts[-1]}")


def _inner(names: list[str], labels: Labels) -> str:
    """An empty value is no label at all, to Prometheus."""
    return ",".join([f'{name}="{_escaped(text)}"' for name, text in zip(names, labels, strict=True) if text])


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _page(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()
