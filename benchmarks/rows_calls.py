"""The rows in which requests count and bytes do not: misses, lookups, long sequences, many threads, connects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.figures import Line, at_least, at_most
from benchmarks.plan import Case, Plan
from benchmarks.rows_shm import CONTENT, Samples, stored
from benchmarks.stage import SMALL, Stage, new_seed

_CALLS: Final = 10
_LONG: Final = 131_072
_SHORT: Final = 8_192
_THREADS: Final = 8
_CROWD_CALLS: Final = 12


def miss(stage: Stage, plan: Plan) -> Iterator[Line]:
    """A retrieve of what nobody has stored."""
    for count in plan.counts:
        with stage.both(SMALL) as (ours, official):
            samples = Samples()
            for repetition in range(-1, plan.repeats):
                for peer in (ours, official):
                    seed = new_seed(_CALLS)
                    seconds = peer.seconds("miss", seed=seed, count=count, calls=_CALLS)
                    if repetition >= 0:
                        samples.add(peer.side, seconds)
        yield _half("miss", f"{count} tokens", samples)


def lookup(stage: Stage, plan: Plan) -> Iterator[Line]:
    """A lookup of what is stored."""
    for count in plan.counts:
        with stage.both(SMALL):
            samples = _lookups(stage, Case(SMALL, count), plan.repeats)
        yield _half("lookup", f"{count} tokens", samples)


def _half(row: str, case: str, samples: Samples) -> Line:
    return Line(
        row=row, case=case, against="official", goal=at_most(0.5), ours=samples["ours"], other=samples["official"]
    )


def _lookups(stage: Stage, case: Case, repeats: int) -> Samples:
    seed = stored(stage, case)["seed"]
    samples = Samples()
    for repetition in range(-1, repeats):
        for peer in stage.peers:
            seconds = peer.seconds("lookup", seed=seed, count=case.count, calls=_CALLS, expect=case.count)
            if repetition >= 0:
                samples.add(peer.side, seconds)
    return samples


def _retrieves(stage: Stage, case: Case, repeats: int) -> Samples:
    order = stored(stage, case)
    samples = Samples()
    for repetition in range(-2, repeats):
        for peer in stage.peers:
            seconds = peer.seconds("retrieve", **order, mode="drop")
            if repetition >= 0:
                samples.add(peer.side, seconds)
    return samples


def long(stage: Stage, plan: Plan) -> Iterator[Line]:
    """A long sequence on the small geometry, and what a token of it costs against one of a short sequence."""
    for what, measure in (("lookup", _lookups), ("retrieve", _retrieves)):
        with stage.both(SMALL):
            near = measure(stage, Case(SMALL, _SHORT), plan.repeats)
            far = measure(stage, Case(SMALL, _LONG), plan.repeats)
        yield Line(
            row=f"long {what}",
            case="small 131072",
            against="official",
            goal=at_least(2.0),
            ours=far["ours"],
            other=far["official"],
        )
        per_8k = [taken * _SHORT / _LONG for taken in far["ours"]]
        yield Line(
            row=f"long {what} per 8k tokens",
            case="131072 / 8192",
            against="floor",
            goal=at_most(1.0),
            ours=per_8k,
            other=near["ours"],
        )


def crowd(stage: Stage, plan: Plan) -> Iterator[Line]:
    """Eight threads on one context, lookups and retrieves of one chunk each."""
    case = Case(SMALL, 256)
    with stage.both(SMALL) as (ours, official):
        seed = new_seed(_THREADS)
        ours.ask("make", shape=case.shape, content=CONTENT)
        for number in range(_THREADS):
            ours.ask("store", seed=seed + number, count=case.count)
        mine: list[float] = []
        theirs: list[float] = []
        order = {"seed": seed, "count": case.count, "shape": case.shape, "threads": _THREADS, "calls": _CROWD_CALLS}
        for repetition in range(-1, plan.repeats):
            for peer, taken in ((ours, mine), (official, theirs)):
                per_second = float(peer.ask("crowd", **order)["per_second"])
                if repetition >= 0:
                    taken.append(per_second)
    yield Line(
        row="8 threads, lookup and retrieve",
        case=case.name,
        against="official",
        goal=at_least(2.0),
        unit="ops/s",
        ours=mine,
        other=theirs,
    )


def connect(stage: Stage, plan: Plan) -> Iterator[Line]:
    """Connecting in a process that has imported everything."""
    samples = Samples()
    for repetition in range(-1, plan.repeats):
        for peer in stage.peers:
            seconds = stage.connect(peer, SMALL)
            peer.ask("close")
            if repetition >= 0:
                samples.add(peer.side, seconds)
    yield Line(
        row=f"connect ({stage.transport})",
        case=SMALL.name,
        against="official",
        goal=at_most(1.0),
        ours=samples["ours"],
        other=samples["official"],
    )
