"""The rows in which bytes move through shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benchmarks.figures import Line, at_least, at_most
from benchmarks.plan import Case, Plan
from benchmarks.stage import TINY, Answer, Peer, Stage, new_seed

CONTENT: Final = 11
_WARM_UP: Final = 2
_MS: Final = 1000.0
_VIEW_CALLS: Final = 5
_NAMED_COUNT: Final = 2048
"""The number of tokens for which the goals against the official SDK are named."""
_KEPT_BYTES: Final = 350 * 2**20
"""Of the largest tensor of which every repetition's result is kept, twice: by both workers."""


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

    def add_answer(self, side: str, answer: Answer) -> None:
        """Seconds and page faults of one worker's answer."""
        self.add(side, answer["seconds"])
        self.add(f"{side} faults", answer["faults"] / _MS)

    def __getitem__(self, name: str) -> list[float]:
        return self._taken[name]

    def sums(self, *names: str) -> list[float]:
        """The sum of several, repetition by repetition."""
        return [sum(parts) for parts in zip(*(self._taken[name] for name in names), strict=True)]

    def all(self) -> dict[str, Sequence[float]]:
        """Everything, for the results file."""
        return dict(self._taken)


def turns(peers: Sequence[Peer], repeats: int, *, warm_up: int = 0) -> Iterator[tuple[Peer, bool]]:
    """Each worker in its turn, again and again, and whether the turn counts: the first `warm_up` rounds do not."""
    for repetition in range(-warm_up, repeats):
        for peer in peers:
            yield peer, repetition >= 0


def _order(case: Case) -> dict[str, object]:
    """What retrieves the case under tokens that nobody has used."""
    return {"seed": new_seed(), "count": case.count, "shape": case.shape, "content": CONTENT}


def stored(stage: Stage, case: Case) -> dict[str, object]:
    """Stores the case once, through our worker; the order that retrieves it."""
    order = _order(case)
    stage.ours.ask("make", shape=case.shape, content=CONTENT)
    stage.ours.ask("store", seed=order["seed"], count=case.count)
    return order


def retrieve(stage: Stage, plan: Plan) -> Iterator[Line]:
    """Steady state: the result is dropped before the next call, or goes into the caller's own tensor."""
    for case in plan.cases():
        with stage.both(case.geometry) as (ours, official):
            order = stored(stage, case)
            samples = Samples()
            for repetition in range(-_WARM_UP, plan.repeats):
                taken = {
                    "recycled": ours.seconds("retrieve", **order, mode="drop"),
                    "official": official.seconds("retrieve", **order, mode="drop"),
                    "out": ours.seconds("retrieve", **order, mode="out"),
                    "round trips": ours.seconds("view", **order, calls=_VIEW_CALLS),
                    "copy": ours.seconds("copy", **order),
                }
                samples.add_all(taken if repetition >= 0 else {})
        floor, more = samples.sums("copy", "round trips"), samples.all()
        for row, mine in (("shm retrieve", samples["recycled"]), ("shm retrieve out=", samples["out"])):
            yield Line(row=row, case=case.name, against="floor", goal=at_most(1.25), ours=mine, other=floor, more=more)
            yield Line(
                row=row,
                case=case.name,
                against="official",
                goal=at_least(3.5),
                ours=mine,
                other=samples["official"],
                judged=case.count == _NAMED_COUNT,
            )


def retrieve_kept(stage: Stage, plan: Plan) -> Iterator[Line]:
    """Every result is fresh, because all of them are kept."""
    for case in plan.cases(_KEPT_BYTES):
        with stage.both(case.geometry) as (ours, official):
            order = stored(stage, case)
            samples = Samples()
            for peer, counts in turns((ours, official), plan.repeats, warm_up=1):
                answer = peer.ask("retrieve", **order, mode="keep")
                if counts:
                    samples.add_answer(peer.side, answer)
        yield Line(
            row="shm retrieve kept",
            case=case.name,
            against="official",
            goal=at_least(1.0),
            ours=samples["ours"],
            other=samples["official"],
            more=samples.all(),
        )


def store(stage: Stage, plan: Plan) -> Iterator[Line]:
    """New tokens every time, into a pool whose pages are there; each store is read back, outside of the timed part."""
    for case in plan.cases():
        storers = stage.storers(case.geometry)
        with stage.both(case.geometry) as (ours, _):
            for peer in storers:
                peer.ask("make", shape=case.shape, content=CONTENT)
            stage.bare.ask("make", shape=TINY.shape(case.count), content=CONTENT)
            samples = Samples()
            for repetition in range(-_WARM_UP, plan.repeats):
                taken: dict[str, float] = {}
                for peer in storers:
                    stage.clear()
                    order = _order(case)
                    answer = peer.ask("store", seed=order["seed"], count=case.count)
                    taken[peer.side], taken[f"{peer.side} faults"] = answer["seconds"], answer["faults"] / _MS
                    ours.ask("retrieve", **order, mode="drop")
                    if peer is ours:
                        taken["copy"] = ours.seconds("copy", **order)
                taken["round trips"] = stage.bare.seconds("store", seed=new_seed(), count=case.count)
                samples.add_all(taken if repetition >= 0 else {})
        yield Line(
            row="shm store",
            case=case.name,
            against="floor",
            goal=at_most(1.35),
            ours=samples["ours"],
            other=samples.sums("copy", "round trips"),
            more=samples.all(),
        )
        if len(storers) == 1:
            continue
        yield Line(
            row="shm store",
            case=case.name,
            against="official",
            goal=at_least(2.5),
            ours=samples["ours"],
            other=samples["official"],
        )


def store_new_slots(stage: Stage, plan: Plan) -> Iterator[Line]:
    """The same on slots that neither has written since it connected, as a user meets them: the official SDK faults
    its mapping in while it copies. No goal speaks of it; it stands beside the row in which both are warm.
    """
    for case in plan.cases(_KEPT_BYTES):
        if not case.geometry.official_stores:
            continue
        with stage.both(case.geometry) as (ours, official):
            samples = Samples()
            for peer in (ours, official):
                peer.ask("make", shape=case.shape, content=CONTENT)
            for peer, _ in turns((ours, official), plan.repeats):
                samples.add_answer(peer.side, peer.ask("store", seed=new_seed(), count=case.count))
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
        with stage.both(case.geometry) as (ours, _):
            order = stored(stage, case)
            bare = _order(Case(TINY, case.count))
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
