"""Requests taken apart, as a picture: one bar each, its parts as shares of the whole. SVG, complete in itself.

Rule: every name is escaped; the colours are Okabe and Ito's, which eyes that see fewer tell apart; each part has its number as a title.
"""

from collections.abc import Iterator
from html import escape

from din_extproc.measure.split import PARTS, Apart, Split

_COLOURS = {
    "transfer": "#56b4e9",
    "queue": "#e69f00",
    "decision": "#d55e00",
    "gateway": "#cc79a7",
    "way": "#0072b2",
    "node": "#009e73",
    "forward": "#f0e442",
    "back": "#999999",
}
_LEFT, _BAR, _RIGHT, _ROW, _TOP = 190, 520, 330, 22, 74
_SKIPPED_PX = 0.05
_WIDTH = _LEFT + _BAR + _RIGHT
_STYLE = "text{font:12px system-ui,sans-serif;fill:#222}.dim{fill:#666}.bad{fill:#b00020;font-weight:bold}"


def svg(apart: Apart) -> str:
    """The picture."""
    height = _TOP + _ROW * len(apart.splits) + 40
    rows = [line for number, split in enumerate(apart.splits) for line in _row(split, _TOP + number * _ROW)]
    verdict = f'<text x="10" y="{height - 14}"{"" if apart.sound else _bad()}>{escape(apart.verdict)}</text>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">',
            f"<title>Where the time of requests goes: {escape(apart.model)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
            f'<text x="10" y="20">{escape(apart.model)} at {escape(apart.url)}, {escape(apart.at)}</text>',
            *_legend(),
            *rows,
            verdict,
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    for number, name in enumerate(PARTS):
        x = _LEFT + number * 82
        yield f'<rect x="{x}" y="36" width="12" height="12" fill="{_COLOURS[name]}"/><text x="{x + 16}" y="46">{name}</text>'
    yield f'<text class="dim" x="10" y="{_TOP - 8}">tokens, node</text>'
    yield f'<text class="dim" x="{_LEFT + _BAR + 10}" y="{_TOP - 8}">total, TTFT, TPOT, gap (ms)</text>'


def _row(split: Split, y: int) -> Iterator[str]:
    yield f'<text x="10" y="{y + 14}">{split.tokens}, {escape(split.node)}</text>'
    whole = sum(split.parts.values())
    x = float(_LEFT)
    for name in PARTS:
        width = _BAR * split.parts[name] / whole if whole else 0.0
        if width >= _SKIPPED_PX:
            title = f"<title>{name}: {split.parts[name]:.1f} ms</title>"
            yield f'<rect x="{x:.2f}" y="{y + 3}" width="{width:.2f}" height="15" fill="{_COLOURS[name]}">{title}</rect>'
        x += width
    shown = ", ".join("-" if value is None else f"{value:.1f}" for value in (split.total_ms, split.ttft_ms, split.tpot_ms, split.gap_ms))
    yield f'<text x="{_LEFT + _BAR + 10}" y="{y + 14}"{_bad() if split.suspect else ""}>{shown}</text>'


def _bad() -> str:
    return ' class="bad"'
