"""The rows in which bytes travel inside messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.content import CHUNK
from benchmarks.figures import Line, at_least
from benchmarks.plan import Plan
from benchmarks.rows_shm import CONTENT, Samples, stored, turns
from benchmarks.stage import Stage, new_seed

_MOST_BYTES: Final = 350 * 2**20
"""A larger tensor takes the other SDK a quarter of a minute each time."""
_QUICK_REPEATS: Final = 2


def _repeats(plan: Plan) -> int:
    return min(plan.repeats, _QUICK_REPEATS) if plan.quick else plan.repeats


def store(stage: Stage, plan: Plan) -> Iterator[Line]:
    """New tokens every time; the first chunk is read back."""
    for case in plan.cases(_MOST_BYTES):
        if not case.geometry.official_stores:
            continue
        with stage.both(case.geometry) as (ours, official):
            for peer in (ours, official):
                peer.ask("make", shape=case.shape, content=CONTENT)
            samples = Samples()
            for peer, counts in turns((ours, official), _repeats(plan), warm_up=1):
                stage.clear()
                seed = new_seed()
                answer = peer.ask("store", seed=seed, count=case.count)
                ours.ask("lookup", seed=seed, count=case.count, calls=1, expect=case.count)
                first = case.geometry.shape(CHUNK)
                ours.ask("retrieve", seed=seed, count=CHUNK, shape=first, content=CONTENT, mode="drop")
                if counts:
                    samples.add_answer(peer.side, answer)
        yield Line(
            row="inline store",
            case=case.name,
            against="official",
            goal=at_least(2.5),
            ours=samples["ours"],
            other=samples["official"],
        )


def retrieve(stage: Stage, plan: Plan) -> Iterator[Line]:
    """The result is dropped before the next call."""
    for case in plan.cases(_MOST_BYTES):
        with stage.both(case.geometry) as (ours, official):
            order = stored(stage, case)
            samples = Samples()
            for peer, counts in turns((ours, official), _repeats(plan), warm_up=1):
                answer = peer.ask("retrieve", **order, mode="drop")
                if counts:
                    samples.add_answer(peer.side, answer)
        yield Line(
            row="inline retrieve",
            case=case.name,
            against="official",
            goal=at_least(1.6),
            ours=samples["ours"],
            other=samples["official"],
        )
