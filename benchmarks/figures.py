"""What was measured, and what it is held against: samples, paired ratios, goals, verdicts. No I/O.

Contract: the samples of a `Line` were taken in turn, so sample i of one side and sample i of the other saw the same
machine. The ratio of a line is the median of the ratios of such pairs, not the ratio of two medians: a neighbour who
takes the machine for a second then spoils one pair and not the result. The spread is the middle half of those ratios.

A line against the official SDK may carry a third series, taken in turn with the two: the straight-line client, which
sends the requests that the work needs and checks nothing. What even that one cannot reach is held by the server and
the wire: such a line is FLOOR and no FAIL, if ours is close enough to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Final, Literal, TypeAlias

Unit: TypeAlias = Literal["ms", "MiB", "ops/s"]
Against: TypeAlias = Literal["official", "floor", "limit"]
Verdict: TypeAlias = Literal["PASS", "FLOOR", "FAIL", "info", "ERROR"]

ENOUGH: Final = 7
"""Fewer pairs than this are no result; the table says so."""
NEAR: Final = 1.25
NEAR_STORE: Final = 1.35
"""How many times the straight-line client's time ours may take where the goal is out of reach of both."""
MEANING: Final[Mapping[str, str]] = {
    "straight": (
        "a client that sends only the requests that the work needs, payloads made beforehand, copies the bytes, and "
        "checks nothing: what the server and the wire cost whatever a client does; × is our time as a multiple of its"
    ),
    "FLOOR": (
        "the goal is missed, but the straight client, measured in turn with the others, misses it too, and ours takes "
        f"at most {NEAR} times its time ({NEAR_STORE} times for stores); it counts as a pass"
    ),
}


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
    straight: Sequence[float] = ()
    """Of the straight-line client, in the same repetitions; empty where there is none."""
    near: float = NEAR
    """How many times its time ours may take for a FLOOR."""
    judged: bool = True
    error: str = ""
    more: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What was measured beside it: floors in parts, page faults; for the JSON file."""

    @property
    def ratios(self) -> list[float]:
        """One for each pair, in the direction of the goal."""
        return self._against_other(self.ours)

    def _against_other(self, samples: Sequence[float]) -> list[float]:
        flip = (self.goal.kind == "gain") != self._more_is_better
        return [other / mine if flip else mine / other for mine, other in zip(samples, self.other, strict=True)]

    @property
    def _more_is_better(self) -> bool:
        return self.unit == "ops/s"

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Their lower and upper quartile."""
        return quartiles(self.ratios)

    @property
    def straight_ratio(self) -> float:
        """What the straight-line client reaches in the place of ours."""
        return median(self._against_other(self.straight))

    @property
    def to_straight(self) -> float:
        """Our time as a multiple of the straight-line client's: the median over the repetitions."""
        pairs = zip(self.ours, self.straight, strict=True)
        return median(straight / ours if self._more_is_better else ours / straight for ours, straight in pairs)

    @property
    def held_by_floor(self) -> bool:
        """Whether the straight-line client misses the goal too, and ours is near it. Of a line against a floor: the
        parts that make it up were measured apart, and no client does them together in that time. A limit is a limit.
        """
        if self.against == "limit" or not self.straight or self.goal.met_by(self.straight_ratio):
            return False
        return self.to_straight <= self.near

    @property
    def verdict(self) -> Verdict:
        """What the line says about the goal."""
        if self.error or not self.ours:
            return "ERROR"
        if not self.judged:
            return "info"
        if self.goal.met_by(self.ratio):
            return "PASS"
        return "FLOOR" if self.held_by_floor else "FAIL"

    def as_json(self) -> dict[str, object]:
        """For the results file: the samples, and what follows from them."""
        document: dict[str, object] = asdict(self)
        document["verdict"] = self.verdict
        if self.ours:
            document.update(
                ours_median=median(self.ours), other_median=median(self.other), ratio=self.ratio, spread=self.spread
            )
        if self.straight:
            document.update(
                straight_median=median(self.straight),
                straight_ratio=self.straight_ratio,
                to_straight=self.to_straight,
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
    """Whether every line that judges is a pass, or is held by a floor that was measured beside it."""
    return all(line.verdict in ("PASS", "FLOOR", "info") for line in lines)
