"""How much anonymous memory a call takes at its peak; each time in a process that has just begun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.figures import Line, at_most
from benchmarks.plan import Case, Plan
from benchmarks.rows_shm import CONTENT
from benchmarks.stage import QWEN, SideName, Stage, new_seed

_COUNT: Final = 2048
_MIB: Final = 2**20
_SLACK: Final = 32 * _MIB
_MOST_REPEATS: Final = 3
"""A process has one first time, and importing takes it three seconds; growth hardly varies."""
_WARM_COUNT: Final = 256


def retrieve(stage: Stage, plan: Plan) -> Iterator[Line]:
    """The result included."""
    case = Case(QWEN, _COUNT)
    limit = case.nbytes + _SLACK if stage.transport == "shm" else 1.4 * case.nbytes
    yield _line("retrieve", stage, case, limit, min(plan.repeats, _MOST_REPEATS))


def store(stage: Stage, plan: Plan) -> Iterator[Line]:
    """The caller's tensor not included: it was there before."""
    case = Case(QWEN, _COUNT)
    limit = _SLACK if stage.transport == "shm" else 0.4 * case.nbytes
    yield _line("store", stage, case, limit, min(plan.repeats, _MOST_REPEATS))


def _line(what: str, stage: Stage, case: Case, limit: float, repeats: int) -> Line:
    grown: dict[SideName, list[float]] = {"ours": [], "official": []}
    for _ in range(repeats):
        for side, sizes in grown.items():
            sizes.append(_growth(what, side, stage, case) / _MIB)
    return Line(
        row=f"RssAnon of {stage.transport} {what}",
        case=case.name,
        against="limit",
        goal=at_most(1.0),
        unit="MiB",
        ours=grown["ours"],
        other=[limit / _MIB] * repeats,
        more={"official": grown["official"], "tensor": [case.nbytes / _MIB]},
    )


def _growth(what: str, side: SideName, stage: Stage, case: Case) -> int:
    """The peak of one call, after a small call of the same kind has brought in what is loaded once."""
    small = Case(case.geometry, _WARM_COUNT)
    seed, first = new_seed(), new_seed()
    try:
        with stage.fresh(side) as peer:
            stage.connect(peer, case.geometry)
            if what == "store":
                peer.ask("make", shape=small.shape, content=CONTENT)
                peer.ask("store", seed=first, count=small.count)
                peer.ask("make", shape=case.shape, content=CONTENT)
                return peer.watch("store", seed=seed, count=case.count)
            _fill(stage, case, seed)
            _fill(stage, small, first)
            for one, watched in ((small, False), (case, True)):
                order = {"seed": seed if watched else first, "count": one.count, "shape": one.shape}
                order |= {"content": CONTENT, "mode": "keep"}
                if watched:
                    return peer.watch("retrieve", **order)
                peer.ask("retrieve", **order)
            raise AssertionError("unreachable")
    finally:
        stage.clear()


def _fill(stage: Stage, case: Case, seed: int) -> None:
    stage.connect(stage.ours, case.geometry)
    stage.ours.ask("make", shape=case.shape, content=CONTENT)
    stage.ours.ask("store", seed=seed, count=case.count)
    stage.ours.ask("close")
