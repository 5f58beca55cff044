"""Families as Prometheus reads them: its text format, version 0.0.4.

Rule: a page is made in slices, each small and each whole: whoever serves it can let others go first between two of them.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from din_extproc.observe.families import Distribution, Family, Labels
from din_extproc.observe.instruments import Instrument, label

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SLICE = 120
"""Lines of histograms, seven or so: about a tenth of a millisecond."""
_ALONE = 4
"""A line by itself takes as long as so many of a histogram."""
_LABELS = "\0"
"""Stands in a histogram's form for the labels."""
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def slices(families: Iterable[Family | None]) -> Iterator[bytes]:
    """The page, a slice at a time. Of families without values only the name and the kind are there; None is an empty slice."""
    lines: list[str] = []
    size = 0
    for family in families:
        if family is None:
            yield b""
            continue
        instrument = family.instrument
        name = instrument.prometheus
        names = [label(attribute) for attribute in instrument.labels]
        form = _form(name, [_number(bound) for bound in instrument.bounds])
        lines += (f"# HELP {name} {instrument.about}", f"# TYPE {name} {instrument.kind.value}")
        size += 2
        for labels, value in family.points:
            inner = _inner(names, labels)
            if isinstance(value, Distribution):
                lines.append(_histogram(form, inner, value))
                size += len(value.counts) + 2
            else:
                lines.append(f"{name}{{{inner}}} {_number(value)}" if inner else f"{name} {_number(value)}")
                size += _ALONE
            if size >= _SLICE:
                yield _page(lines)
                lines, size = [], 0
    if lines:
        yield _page(lines)


def samples(instrument: Instrument) -> tuple[str, ...]:
    """The names of the samples that an instrument leaves on the page."""
    name = instrument.prometheus
    return (f"{name}_bucket", f"{name}_sum", f"{name}_count") if instrument.bounds else (name,)


def _form(name: str, bounds: list[str]) -> str:
    """All lines of one histogram, to be filled in at one go."""
    buckets = [f'{name}_bucket{{{_LABELS}le="{bound}"}} %d' for bound in (*bounds, "+Inf")]
    return "\n".join([*buckets, f"{name}_sum%s %s", f"{name}_count%s %d"])


def _histogram(form: str, inner: str, value: Distribution) -> str:
    counts = list(accumulate(value.counts))
    before, braced = (f"{inner},".replace("%", "%%"), f"{{{inner}}}") if inner else ("", "")
    return form.replace(_LABELS, before) % (*counts, braced, _number(value.total), braced, counts[-1])


def _inner(names: list[str], labels: Labels) -> str:
    """An empty value is no label at all, to Prometheus."""
    return ",".join([f'{name}="{_escaped(text)}"' for name, text in zip(names, labels, strict=True) if text])


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _page(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()
