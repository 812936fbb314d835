"""The chart: each row against the other SDK and against its floor, and where its goal is. Pure text, no I/O.

Of the cases of a row it shows one, at 2048 tokens where there is that: the table and the results files have them all.

A logarithmic axis, since 2 times better and half as good are equally far from equal. The colours are chosen for both
backgrounds by the viewer's own setting, and the verdict is also a word: colour is never the only sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log2
from typing import Final

from benchmarks.figures import Against, Line

_TITLES: Final[dict[Against, str]] = {
    "official": "Times as good as the SDK inside lmcache (longer is better)",
    "floor": "Multiple of the floor: memcpy and round trips (shorter is better)",
}
_WIDTH: Final = 960
_LABEL: Final = 330
_VALUE: Final = 172
_ROW: Final = 22
_BAR: Final = 12
_HEAD: Final = 46
_SHOWN_COUNT: Final = "2048"
_LEGEND: Final = (
    "dashed: the goal; line in a bar: the middle half of the repetitions; floor: a client that checks nothing, "
    "measured beside, misses the goal too"
)
_STYLE: Final = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 14px; }
  .quiet { fill: #59636e; font-size: 12px; }
  .grid { stroke: #d1d9e0; stroke-width: 1; }
  .pass { fill: #1a7f5a; } .floor { fill: #8a6d1b; } .fail { fill: #c4432b; }
  .spread { stroke: #1f2328; stroke-width: 1.5; }
  .goal { stroke: #1f2328; stroke-width: 2; stroke-dasharray: 3 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .quiet { fill: #9198a1; } .grid { stroke: #3d444d; }
    .pass { fill: #3fb68b; } .floor { fill: #d4b44a; } .fail { fill: #f0806a; } .spread, .goal { stroke: #f0f6fc; }
  }
"""


class Scale:
    """Ratios on a logarithmic axis of whole powers of two, 1 among them."""

    def __init__(self, ratios: Sequence[float]) -> None:
        self.low = min(0, floor(log2(min(ratios))))
        self.high = max(1, ceil(log2(max(ratios))))

    def x(self, ratio: float) -> float:
        """Where a ratio is, in pixels."""
        share = (log2(ratio) - self.low) / (self.high - self.low)
        return _LABEL + max(0.0, min(1.0, share)) * (_WIDTH - _LABEL - _VALUE)

    @property
    def ticks(self) -> list[float]:
        """The powers of two."""
        return [2.0**power for power in range(self.low, self.high + 1)]


def _panel(lines: Sequence[Line], title: str, top: float) -> Iterator[str]:
    scale = Scale([value for line in lines for value in (_shown(line, line.ratio), _shown(line, line.goal.bound))])
    bottom = top + _HEAD + _ROW * len(lines)
    yield f'<text class="title" x="12" y="{top + 18:.0f}">{escape(title)}</text>'
    for tick in scale.ticks:
        x = scale.x(tick)
        yield f'<line class="grid" x1="{x:.1f}" y1="{top + _HEAD - 6:.0f}" x2="{x:.1f}" y2="{bottom:.0f}"/>'
        yield f'<text class="quiet" x="{x:.1f}" y="{top + _HEAD - 10:.0f}" text-anchor="middle">{tick:g}×</text>'
    for number, line in enumerate(lines):
        yield from _bar(line, scale, top + _HEAD + _ROW * number)


def _shown(line: Line, ratio: float) -> float:
    """A ratio in the direction of its panel: against the official one a cost is turned into a gain."""
    return 1 / ratio if line.against == "official" and line.goal.kind == "cost" else ratio


def _bar(line: Line, scale: Scale, y: float) -> Iterator[str]:
    middle = y + _ROW / 2
    ratio, goal = _shown(line, line.ratio), scale.x(_shown(line, line.goal.bound))
    low, high = sorted(scale.x(_shown(line, edge)) for edge in line.spread)
    start, end = sorted((scale.x(1.0), scale.x(ratio)))
    kind = line.verdict.lower()
    top = middle - _BAR / 2
    yield f'<text x="{_LABEL - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(f"{line.row}, {line.case}")}</text>'
    width = max(1.0, end - start)
    yield (
        f'<rect class="{kind}" x="{start:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_BAR}" rx="2">'
        f"<title>{escape(f'{line.row}, {line.case}: {ratio:.2f}')}</title></rect>"
    )
    yield f'<line class="spread" x1="{low:.1f}" y1="{middle:.1f}" x2="{high:.1f}" y2="{middle:.1f}"/>'
    yield f'<line class="goal" x1="{goal:.1f}" y1="{top - 3:.1f}" x2="{goal:.1f}" y2="{top + _BAR + 3:.1f}"/>'
    text = f"{ratio:.2f}× ({kind}, goal {_shown(line, line.goal.bound):.2f}×)"
    yield f'<text class="quiet" x="{_WIDTH - _VALUE + 6}" y="{middle + 4:.1f}">{escape(text)}</text>'


def shown_of(lines: Sequence[Line]) -> list[Line]:
    """One judged line of each row: the first with the shown number of tokens, else the first."""
    rows: dict[str, Line] = {}
    for line in lines:
        if line.verdict not in ("PASS", "FLOOR", "FAIL"):
            continue
        before = rows.setdefault(line.row, line)
        if _SHOWN_COUNT not in before.case.split() and _SHOWN_COUNT in line.case.split():
            rows[line.row] = line
    return list(rows.values())


def chart(lines: Sequence[Line], note: str) -> str:
    """The whole picture; `note` says what it was measured on."""
    parts: list[str] = []
    top = 8.0
    for against, title in _TITLES.items():
        chosen = shown_of([line for line in lines if line.against == against])
        if chosen:
            parts.extend(_panel(chosen, title, top))
            top += _HEAD + _ROW * len(chosen) + 24
    for text in (_LEGEND, note):
        parts.append(f'<text class="quiet" x="12" y="{top + 4:.0f}">{escape(text)}</text>')
        top += 18
    height = top + 4
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="Speed against the SDK inside lmcache and against the floor">'
    )
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])
