"""The rows in which bytes move through shared memory.

Every sample of a line, of each side and of the floors, is taken the same way: `Case.calls` calls in a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.figures import NEAR_STORE, Line, at_least, at_most
from benchmarks.plan import Case, Plan
from benchmarks.samples import CONTENT, Samples, against_official, order_of, read_back, stored
from benchmarks.stage import TINY, Stage, new_seed

_WARM_UP: Final = 2
_VIEW_CALLS: Final = 5
_NAMED_COUNT: Final = 2048
"""The number of tokens for which the goals against the official SDK are named."""
_KEPT_BYTES: Final = 350 * 2**20
"""Of the largest tensor of which every repetition's result is kept, by each side."""


def retrieve(stage: Stage, plan: Plan) -> Iterator[Line]:
    """Steady state: the result is dropped before the next call, or goes into the caller's own tensor."""
    for case in plan.cases():
        with stage.connected(case.geometry) as (ours, official, straight):
            order = {**stored(stage, case), "calls": case.calls}
            samples = Samples()
            for repetition in range(-_WARM_UP, plan.repeats):
                taken = {
                    "recycled": ours.seconds("retrieve", **order, mode="drop"),
                    "official": official.seconds("retrieve", **order, mode="drop"),
                    "straight": straight.seconds("retrieve", **order, mode="drop"),
                    "out": ours.seconds("retrieve", **order, mode="out"),
                    "round trips": ours.seconds("view", **order),
                    "copy": ours.seconds("copy", **order),
                }
                samples.add_all(taken if repetition >= 0 else {})
        floor, more = samples.sums("copy", "round trips"), samples.all()
        for row, mine in (("shm retrieve", "recycled"), ("shm retrieve out=", "out")):
            goal, named = at_most(1.25), case.count == _NAMED_COUNT
            yield Line(
                row=row,
                case=case.name,
                against="floor",
                goal=goal,
                ours=samples[mine],
                other=floor,
                straight=samples["straight"],
                more=more,
            )
            yield against_official(row, case.name, at_least(3.5), samples, mine=mine, judged=named)


def retrieve_kept(stage: Stage, plan: Plan) -> Iterator[Line]:
    """Every result is fresh, because all of them are kept."""
    for case in plan.cases(_KEPT_BYTES):
        with stage.connected(case.geometry, kept=True) as peers:
            order = {**stored(stage, case), "calls": case.calls}
            samples = Samples()
            for repetition in range(-1, plan.repeats):
                for peer in peers:
                    answer = peer.ask("retrieve", **order, mode="keep")
                    if repetition >= 0:
                        samples.add(peer.side, answer["seconds"])
                        samples.add_faults(peer.side, answer["faults"])
        yield against_official("shm retrieve kept", case.name, at_least(1.0), samples)


def store(stage: Stage, plan: Plan) -> Iterator[Line]:
    """New tokens every time, into a pool whose pages are there; each store is read back, outside of the timed part."""
    for case in plan.cases():
        with stage.connected(case.geometry):
            samples = _stores(stage, case, plan.repeats)
        yield Line(
            row="shm store",
            case=case.name,
            against="floor",
            goal=at_most(1.35),
            ours=samples["ours"],
            other=samples.sums("copy", "round trips"),
            more=samples.all(),
        )
        if case.geometry.official_stores:
            yield against_official("shm store", case.name, at_least(2.5), samples, near=NEAR_STORE)


def _stores(stage: Stage, case: Case, repeats: int) -> Samples:
    storers = stage.storers(case.geometry)
    for peer in storers:
        peer.ask("make", shape=case.shape, content=CONTENT)
    stage.bare.ask("make", shape=TINY.shape(case.count), content=CONTENT)
    samples = Samples()
    for repetition in range(-_WARM_UP, repeats):
        taken: dict[str, float] = {}
        faults: dict[str, float] = {}
        for peer in storers:
            stage.clear()
            seed = new_seed(case.calls)
            answer = peer.ask("store", seed=seed, count=case.count, calls=case.calls)
            taken[peer.side], faults[peer.side] = answer["seconds"], answer["faults"]
            read_back(stage.ours, case, seed)
            if peer is stage.ours:
                taken["copy"] = stage.ours.seconds("copy", **order_of(case, seed), calls=case.calls)
        seed = new_seed(case.calls)
        taken["round trips"] = stage.bare.seconds("store", seed=seed, count=case.count, calls=case.calls)
        if repetition >= 0:
            samples.add_all(taken)
            for side, count in faults.items():
                samples.add_faults(side, count)
    return samples


def store_new_slots(stage: Stage, plan: Plan) -> Iterator[Line]:
    """The same on slots that neither has written since it connected, as a user meets them: the official SDK faults
    its mapping in while it copies. No goal speaks of it; it stands beside the row in which both are warm. One call a
    sample, and without the straight-line client: the pool has room for two sides.
    """
    for case in plan.cases(_KEPT_BYTES):
        if not case.geometry.official_stores:
            continue
        with stage.connected(case.geometry) as (ours, official, _):
            samples = Samples()
            for peer in (ours, official):
                peer.ask("make", shape=case.shape, content=CONTENT)
            for _ in range(plan.repeats):
                for peer in (ours, official):
                    answer = peer.ask("store", seed=new_seed(), count=case.count)
                    samples.add(peer.side, answer["seconds"])
                    samples.add_faults(peer.side, answer["faults"])
        yield Line(
            row="shm store, new slots",
            case=case.name,
            against="official",
            goal=at_least(2.5),
            ours=samples["ours"],
            other=samples["official"],
            judged=False,
            more=samples.all(),
        )


def view(stage: Stage, plan: Plan) -> Iterator[Line]:
    """A zero-copy read against the same on a model of nearly no bytes: the round trips alone."""
    for case in plan.cases():
        with stage.connected(case.geometry) as (ours, *_):
            order = stored(stage, case)
            bare = order_of(Case(TINY, case.count), new_seed())
            stage.bare.ask("make", shape=bare["shape"], content=CONTENT)
            stage.bare.ask("store", seed=bare["seed"], count=case.count)
            samples = Samples()
            for repetition in range(-_WARM_UP, plan.repeats):
                taken = {
                    "full": ours.seconds("view", **order, calls=_VIEW_CALLS),
                    "bare": stage.bare.seconds("view", **bare, calls=_VIEW_CALLS),
                }
                samples.add_all(taken if repetition >= 0 else {})
        yield Line(
            row="view",
            case=case.name,
            against="floor",
            goal=at_most(1.25),
            ours=samples["full"],
            other=samples["bare"],
            more={"MiB": [case.nbytes / 2**20]},
        )
