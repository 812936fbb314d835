"""What was measured, and what it is held against: samples, paired ratios, goals, verdicts. No I/O.

Contract: the samples of a `Line` were taken in turn, so sample i of one side and sample i of the other saw the same
machine. The ratio of a line is the median of the ratios of such pairs, not the ratio of two medians: a neighbour who
takes the machine for a second then spoils one pair and not the result. The spread is the middle half of those ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Final, Literal, TypeAlias

Unit: TypeAlias = Literal["ms", "MiB", "ops/s"]
Against: TypeAlias = Literal["official", "floor", "limit"]
Verdict: TypeAlias = Literal["PASS", "FAIL", "info", "ERROR"]

ENOUGH: Final = 7
"""Fewer pairs than this are no result; the table says so."""


@dataclass(frozen=True)
class Goal:
    """A bound on the ratio: `gain`, how many times better than the other, or `cost`, what part or multiple of it."""

    kind: Literal["gain", "cost"]
    bound: float

    def met_by(self, ratio: float) -> bool:
        """Whether a ratio reaches it."""
        return ratio >= self.bound if self.kind == "gain" else ratio <= self.bound

    def text(self) -> str:
        """As the table writes it."""
        return f"{'≥' if self.kind == 'gain' else '≤'} {self.bound:.2f}×"


def at_least(bound: float) -> Goal:
    """That many times better than the other."""
    return Goal("gain", bound)


def at_most(bound: float) -> Goal:
    """No more than that multiple of the other."""
    return Goal("cost", bound)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: a row on one case, against one other figure.

    `judged` is false for a case that the goal does not speak of: it is shown and decides nothing. `error` takes the
    place of samples when the row could not be measured.
    """

    row: str
    case: str
    against: Against
    goal: Goal
    unit: Unit = "ms"
    ours: Sequence[float] = ()
    other: Sequence[float] = ()
    judged: bool = True
    error: str = ""
    more: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What was measured beside it: floors in parts, page faults; for the JSON file."""

    @property
    def ratios(self) -> list[float]:
        """One for each pair, in the direction of the goal."""
        better_is_more = self.unit == "ops/s"
        flip = (self.goal.kind == "gain") != better_is_more
        pairs = zip(self.ours, self.other, strict=True)
        return [other / ours if flip else ours / other for ours, other in pairs]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Their lower and upper quartile."""
        return quartiles(self.ratios)

    @property
    def verdict(self) -> Verdict:
        """What the line says about the goal."""
        if self.error or not self.ours:
            return "ERROR"
        if not self.judged:
            return "info"
        return "PASS" if self.goal.met_by(self.ratio) else "FAIL"

    def as_json(self) -> dict[str, object]:
        """For the results file: the samples, and what follows from them."""
        document: dict[str, object] = asdict(self)
        document["verdict"] = self.verdict
        if self.ours:
            document.update(
                ours_median=median(self.ours), other_median=median(self.other), ratio=self.ratio, spread=self.spread
            )
        return document


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile; of a single value that value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def failed(row: str, error: BaseException) -> Line:
    """The line of a row that could not be measured."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return Line(row=row, case="-", against="official", goal=at_least(1.0), error=text)


def passed(lines: Sequence[Line]) -> bool:
    """Whether every line that judges is a pass."""
    return all(line.verdict in ("PASS", "info") for line in lines)
