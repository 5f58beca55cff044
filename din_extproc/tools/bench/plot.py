"""The chart of `bench split`: per request, the shares of its parts, and all parts but the node's in milliseconds. Standalone SVG.

Rule: every name is escaped; the colours are Okabe and Ito's colour-blind safe set; each part has its value as a title.
"""

from collections.abc import Iterable, Iterator
from html import escape

from din_extproc.tools.bench.split_parts import PARTS, Split, SplitReport

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
_LEFT, _BAR, _SPACE, _OWN, _RIGHT, _ROW, _TOP = 180, 300, 20, 300, 260, 22, 74
_SKIPPED_PX = 0.05
_OWN_PARTS = tuple(name for name in PARTS if name != "node")
_WIDTH = _LEFT + _BAR + _SPACE + _OWN + _RIGHT
_FIGURES = _LEFT + _BAR + _SPACE + _OWN + 10
_STYLE = "text{font:12px system-ui,sans-serif;fill:#222}.dim{fill:#666}.bad{fill:#b00020;font-weight:bold}"


def draw_svg(apart: SplitReport) -> str:
    """Return the chart as SVG."""
    height = _TOP + _ROW * len(apart.splits) + 40
    longest = max((_own_ms(split) for split in apart.splits), default=0.0)
    rows = [line for number, split in enumerate(apart.splits) for line in _draw_row(split, _TOP + number * _ROW, longest)]
    verdict = f'<text x="10" y="{height - 14}"{"" if apart.sound else _mark_bad()}>{escape(apart.verdict)}</text>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">',
            f"<title>Where the time of requests goes: {escape(apart.model)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
            f'<text x="10" y="20">{escape(apart.model)} at {escape(apart.url)}, {escape(apart.at)}</text>',
            *_draw_legend(longest),
            *rows,
            verdict,
            "</svg>\n",
        ]
    )


def _draw_legend(longest_ms: float) -> Iterator[str]:
    for number, name in enumerate(PARTS):
        x = _LEFT + number * 82
        yield f'<rect x="{x}" y="30" width="12" height="12" fill="{_COLOURS[name]}"/><text x="{x + 16}" y="40">{name}</text>'
    own = f"all but the node's work, up to {longest_ms:.1f} ms"
    titles = ((10, "tokens, node"), (_LEFT, "shares"), (_LEFT + _BAR + _SPACE, own), (_FIGURES, "total, TTFT, TPOT, gap (ms)"))
    for x, title in titles:
        yield f'<text class="dim" x="{x}" y="{_TOP - 8}">{title}</text>'


def _draw_row(split: Split, y: int, longest_ms: float) -> Iterator[str]:
    """Draw one request. `longest_ms`: the scale of the second bar."""
    yield f'<text x="10" y="{y + 14}">{split.tokens}, {escape(split.node)}</text>'
    yield from _draw_bar(split, PARTS, (_LEFT, y, _BAR), sum(split.parts.values()))
    yield from _draw_bar(split, _OWN_PARTS, (_LEFT + _BAR + _SPACE, y, _OWN), longest_ms)
    figures = ", ".join("-" if value is None else f"{value:.1f}" for value in (split.total_ms, split.ttft_ms, split.tpot_ms, split.gap_ms))
    yield f'<text x="{_FIGURES}" y="{y + 14}"{_mark_bad() if split.suspect else ""}>{figures}</text>'


def _draw_bar(split: Split, parts: Iterable[str], place: tuple[int, int, int], whole_ms: float) -> Iterator[str]:
    """Draw parts side by side. `place`: left, top, and the width of the whole."""
    x, y, width = float(place[0]), place[1], place[2]
    for name in parts:
        wide = width * split.parts[name] / whole_ms if whole_ms else 0.0
        if wide >= _SKIPPED_PX:
            title = f"<title>{name}: {split.parts[name]:.1f} ms</title>"
            yield f'<rect x="{x:.2f}" y="{y + 3}" width="{wide:.2f}" height="15" fill="{_COLOURS[name]}">{title}</rect>'
        x += wide


def _own_ms(split: Split) -> float:
    return sum(split.parts[name] for name in _OWN_PARTS)


def _mark_bad() -> str:
    return ' class="bad"'
