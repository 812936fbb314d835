"""How much anonymous memory a call takes at its peak; each time in a process that has just begun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.figures import Against, Line, at_most
from benchmarks.plan import Case, Plan
from benchmarks.samples import CONTENT
from benchmarks.stage import QWEN, SideName, Stage, new_seed

_COUNT: Final = 2048
_MIB: Final = 2**20
_SLACK: Final = 32 * _MIB
_MOST_REPEATS: Final = 3
"""A process has one first time, and importing takes it three seconds; growth hardly varies."""
_WARM_COUNT: Final = 256
_PAGE: Final = 4096 / _MIB


def retrieve(stage: Stage, plan: Plan) -> Iterator[Line]:
    """The result included."""
    case = Case(QWEN, _COUNT)
    limit = case.nbytes + _SLACK if stage.transport == "shm" else 1.4 * case.nbytes
    yield from _lines("retrieve", stage, case, limit, min(plan.repeats, _MOST_REPEATS))


def store(stage: Stage, plan: Plan) -> Iterator[Line]:
    """The caller's tensor not included: it was there before."""
    case = Case(QWEN, _COUNT)
    limit = _SLACK if stage.transport == "shm" else 0.4 * case.nbytes
    yield from _lines("store", stage, case, limit, min(plan.repeats, _MOST_REPEATS))


def _lines(what: str, stage: Stage, case: Case, limit: float, repeats: int) -> Iterator[Line]:
    grown: dict[SideName, list[float]] = {"ours": [], "official": []}
    for _ in range(repeats):
        for side, sizes in grown.items():
            sizes.append(_growth(what, side, stage, case) / _MIB)
    others: dict[Against, list[float]] = {"limit": [limit / _MIB] * repeats, "official": grown["official"]}
    for against, other in others.items():
        yield Line(
            row=f"RssAnon of {stage.transport} {what}",
            case=case.name,
            against=against,
            goal=at_most(1.0),
            unit="MiB",
            # a page at least: growth may be nothing, and a ratio needs something
            ours=[max(size, _PAGE) for size in grown["ours"]],
            other=[max(size, _PAGE) for size in other],
            judged=against == "limit",
            more={"tensor": [case.nbytes / _MIB]},
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
            for one, number in ((case, seed), (small, first)):
                _fill(stage, one, number)
            peer.ask("retrieve", **_order(small, first))
            return peer.watch("retrieve", **_order(case, seed))
    finally:
        stage.clear()


def _fill(stage: Stage, case: Case, seed: int) -> None:
    stage.connect(stage.ours, case.geometry)
    stage.ours.ask("make", shape=case.shape, content=CONTENT)
    stage.ours.ask("store", seed=seed, count=case.count)
    stage.ours.ask("close")


def _order(case: Case, seed: int) -> dict[str, object]:
    return {"seed": seed, "count": case.count, "shape": case.shape, "content": CONTENT, "mode": "keep"}
