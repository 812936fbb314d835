"""The table that people read: one line for each goal and case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from benchmarks.figures import ENOUGH, MEANING, Line, Unit

_HEAD: Final = (
    *("row", "case", "ours", "against", "other", "ratio", "goal", "middle half"),
    *("straight", "×", "n", "verdict"),
)
_LEFT: Final = frozenset({"row", "case", "against", "verdict"})


def amount(value: float, unit: Unit) -> str:
    """A figure with its unit, to three digits."""
    if abs(value) >= 100:
        text = f"{value:.0f}"
    elif abs(value) >= 10:
        text = f"{value:.1f}"
    else:
        text = f"{value:.2f}"
    return f"{text} {unit}"


def _cells(line: Line) -> tuple[str, ...]:
    if not line.ours:
        return (line.row, line.case, "", line.against, *[""] * 6, "0", line.verdict)
    low, high = line.spread
    return (
        line.row,
        line.case,
        amount(median(line.ours), line.unit),
        line.against,
        amount(median(line.other), line.unit),
        f"{line.ratio:.2f}×",
        line.goal.text(),
        f"{low:.2f} … {high:.2f}",
        amount(median(line.straight), line.unit) if line.straight else "",
        f"{line.to_straight:.2f}×" if line.straight else "",
        str(len(line.ours)),
        line.verdict,
    )


def table(lines: Sequence[Line]) -> Iterator[str]:
    """The lines of the table, then what must be said about it."""
    rows = [_HEAD, *(_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        cells = (
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(_HEAD, row, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()
    for line in lines:
        if line.error:
            yield f"{line.row}: {line.error}"
    if any(line.ours and line.unit != "MiB" and len(line.ours) < ENOUGH for line in lines):
        yield f"fewer than {ENOUGH} pairs (n): a look, not a result"
    if any(line.straight for line in lines):
        yield f"straight: {MEANING['straight']}"
    if any(line.verdict == "FLOOR" for line in lines):
        yield f"FLOOR: {MEANING['FLOOR']}"
    counted = [line.verdict for line in lines]
    yield ", ".join(f"{counted.count(verdict)} {verdict}" for verdict in ("PASS", "FLOOR", "FAIL", "ERROR", "info"))
