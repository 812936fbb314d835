"""What the rows share: samples by name, what is stored for a retrieve, and the line of three sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.figures import NEAR, Goal, Line
from benchmarks.plan import Case
from benchmarks.stage import Peer, Stage, new_seed

CONTENT: Final = 11
_MS: Final = 1000.0


class Samples:
    """Milliseconds by name, one for each repetition."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """One more."""
        self._taken.setdefault(name, []).append(seconds * _MS)

    def add_all(self, taken: Mapping[str, float]) -> None:
        """Those of one repetition."""
        for name, seconds in taken.items():
            self.add(name, seconds)

    def add_faults(self, name: str, count: float) -> None:
        """Page faults, for the results file."""
        self._taken.setdefault(f"{name} faults", []).append(count)

    def __getitem__(self, name: str) -> list[float]:
        return self._taken[name]

    def sums(self, *names: str) -> list[float]:
        """The sum of several, repetition by repetition."""
        return [sum(parts) for parts in zip(*(self._taken[name] for name in names), strict=True)]

    def all(self) -> dict[str, Sequence[float]]:
        """Everything, for the results file."""
        return dict(self._taken)


def against_official(
    row: str, case: str, goal: Goal, samples: Samples, *, mine: str = "ours", near: float = NEAR, judged: bool = True
) -> Line:
    """The line of the three sides."""
    return Line(
        row=row,
        case=case,
        against="official",
        goal=goal,
        ours=samples[mine],
        other=samples["official"],
        straight=samples["straight"],
        near=near,
        judged=judged,
        more=samples.all(),
    )


def order_of(case: Case, seed: int) -> dict[str, object]:
    """What retrieves the case under the tokens of a seed."""
    return {"seed": seed, "count": case.count, "shape": case.shape, "content": CONTENT}


def stored(stage: Stage, case: Case) -> dict[str, object]:
    """Stores the case once, through our worker; the order that retrieves it."""
    seed = new_seed()
    stage.ours.ask("make", shape=case.shape, content=CONTENT)
    stage.ours.ask("store", seed=seed, count=case.count)
    return order_of(case, seed)


def read_back(peer: Peer, case: Case, seed: int) -> None:
    """Looks at what the calls of one sample stored, outside of the timed part."""
    for call in range(case.calls):
        peer.ask("retrieve", **order_of(case, seed + call), mode="drop")
