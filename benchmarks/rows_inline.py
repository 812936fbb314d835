"""The rows in which bytes travel inside messages; a sample is `Case.calls` calls in a row, of every side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.content import CHUNK
from benchmarks.figures import NEAR_STORE, Line, at_least
from benchmarks.plan import Case, Plan
from benchmarks.samples import CONTENT, Samples, against_official, order_of, stored
from benchmarks.stage import Stage, new_seed

_MOST_BYTES: Final = 350 * 2**20
"""A larger tensor takes the other SDK a quarter of a minute each time."""
_QUICK_REPEATS: Final = 2


def _repeats(plan: Plan) -> int:
    return min(plan.repeats, _QUICK_REPEATS) if plan.quick else plan.repeats


def store(stage: Stage, plan: Plan) -> Iterator[Line]:
    """New tokens every time; all of them are found, and the first chunk is read back."""
    for case in plan.cases(_MOST_BYTES):
        if not case.geometry.official_stores:
            continue
        with stage.connected(case.geometry) as peers:
            for peer in peers:
                peer.ask("make", shape=case.shape, content=CONTENT)
            samples = Samples()
            for repetition in range(-1, _repeats(plan)):
                for peer in peers:
                    stage.clear()
                    seed = new_seed(case.calls)
                    seconds = peer.seconds("store", seed=seed, count=case.count, calls=case.calls)
                    _check_stored(stage, case, seed)
                    if repetition >= 0:
                        samples.add(peer.side, seconds)
        yield against_official("inline store", case.name, at_least(2.5), samples, near=NEAR_STORE)


def _check_stored(stage: Stage, case: Case, seed: int) -> None:
    first = Case(case.geometry, CHUNK)
    for call in range(case.calls):
        stage.ours.ask("lookup", seed=seed + call, count=case.count, calls=1, expect=case.count)
        stage.ours.ask("retrieve", **order_of(first, seed + call), mode="drop")


def retrieve(stage: Stage, plan: Plan) -> Iterator[Line]:
    """The result is dropped before the next call."""
    for case in plan.cases(_MOST_BYTES):
        with stage.connected(case.geometry) as peers:
            order = {**stored(stage, case), "calls": case.calls}
            samples = Samples()
            for repetition in range(-1, _repeats(plan)):
                for peer in peers:
                    seconds = peer.seconds("retrieve", **order, mode="drop")
                    if repetition >= 0:
                        samples.add(peer.side, seconds)
        yield against_official("inline retrieve", case.name, at_least(1.6), samples)
