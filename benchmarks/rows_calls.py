"""The rows in which requests count and bytes do not: misses, lookups, long sequences, many threads, connects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.figures import Line, at_least, at_most
from benchmarks.plan import Case, Plan
from benchmarks.samples import CONTENT, Samples, against_official, stored
from benchmarks.stage import SMALL, SideName, Stage, new_seed

_CALLS: Final = 10
_LONG_CALLS: Final = 5
"""Of a retrieve: as many for the long sequence as for the short one, which is held against it."""
_LONG: Final = 131_072
_SHORT: Final = 8_192
_THREADS: Final = 8
_CROWD_CALLS: Final = 12


def miss(stage: Stage, plan: Plan) -> Iterator[Line]:
    """A retrieve of what nobody has stored."""
    for count in plan.counts:
        with stage.connected(SMALL) as peers:
            samples = Samples()
            for repetition in range(-1, plan.repeats):
                for peer in peers:
                    seed = new_seed(_CALLS)
                    seconds = peer.seconds("miss", seed=seed, count=count, calls=_CALLS)
                    if repetition >= 0:
                        samples.add(peer.side, seconds)
        yield against_official("miss", f"{count} tokens", at_most(0.5), samples)


def lookup(stage: Stage, plan: Plan) -> Iterator[Line]:
    """A lookup of what is stored."""
    for count in plan.counts:
        with stage.connected(SMALL):
            (samples,) = _lookups(stage, [Case(SMALL, count)], plan.repeats)
        yield against_official("lookup", f"{count} tokens", at_most(0.5), samples)


def _lookups(stage: Stage, cases: Sequence[Case], repeats: int) -> list[Samples]:
    """Of each case, in turn."""
    orders = [
        {"seed": stored(stage, case)["seed"], "count": case.count, "expect": case.count, "calls": _CALLS}
        for case in cases
    ]
    return _in_turn(stage, "lookup", orders, repeats)


def _retrieves(stage: Stage, cases: Sequence[Case], repeats: int) -> list[Samples]:
    """Of each case, in turn."""
    orders = [{**stored(stage, case), "mode": "drop", "calls": _LONG_CALLS} for case in cases]
    return _in_turn(stage, "retrieve", orders, repeats)


def _in_turn(stage: Stage, do: str, orders: Sequence[dict[str, object]], repeats: int) -> list[Samples]:
    taken = [Samples() for _ in orders]
    for repetition in range(-2, repeats):
        for order, samples in zip(orders, taken, strict=True):
            for peer in stage.peers:
                seconds = peer.seconds(do, **order)
                if repetition >= 0:
                    samples.add(peer.side, seconds)
    return taken


def long(stage: Stage, plan: Plan) -> Iterator[Line]:
    """A long sequence on the small geometry, and what a token of it costs against one of a short sequence."""
    cases = [Case(SMALL, _SHORT), Case(SMALL, _LONG)]
    for what, measure in (("lookup", _lookups), ("retrieve", _retrieves)):
        with stage.connected(SMALL):
            near, far = measure(stage, cases, plan.repeats)
        yield against_official(f"long {what}", f"small {_LONG}", at_least(2.0), far)
        per_8k = [taken * _SHORT / _LONG for taken in far["ours"]]
        yield Line(
            row=f"long {what} per 8k tokens",
            case=f"{_LONG} / {_SHORT}",
            against="floor",
            goal=at_most(1.0),
            ours=per_8k,
            other=near["ours"],
        )


def crowd(stage: Stage, plan: Plan) -> Iterator[Line]:
    """Eight threads on one context, lookups and retrieves of one chunk each."""
    case = Case(SMALL, 256)
    rates: dict[SideName, list[float]] = {"ours": [], "official": [], "straight": []}
    with stage.connected(SMALL) as (ours, *_):
        seed = new_seed(_THREADS)
        ours.ask("make", shape=case.shape, content=CONTENT)
        ours.ask("store", seed=seed, count=case.count, calls=_THREADS)
        order = {"seed": seed, "count": case.count, "shape": case.shape, "threads": _THREADS, "calls": _CROWD_CALLS}
        for repetition in range(-1, plan.repeats):
            for peer in stage.peers:
                per_second = float(peer.ask("crowd", **order)["per_second"])
                if repetition >= 0:
                    rates[peer.side].append(per_second)
    yield Line(
        row="8 threads, lookup and retrieve",
        case=case.name,
        against="official",
        goal=at_least(2.0),
        unit="ops/s",
        ours=rates["ours"],
        other=rates["official"],
        straight=rates["straight"],
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
    yield against_official(f"connect ({stage.transport})", SMALL.name, at_most(1.0), samples)
