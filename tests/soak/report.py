"""What one pair of the soak came to: the journals of its clients and its server's /status, added up and judged.

Contract: no I/O but reading journals. `Result.problems` is empty exactly when the soak may pass; each problem is a
sentence with its number.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.integration.servers import Held
from tests.soak import plan
from tests.soak.faults import Happened

_STRANGE: Final = frozenset(
    {
        *("LocalProtocolError", "RemoteProtocolError", "UnsupportedError", "UsageError", "ArgumentTypeError"),
        *("LayoutError", "LayoutChangedError", "UnknownLayoutError", "ShapeMismatchError", "AlreadyCachedError"),
    }
)
"""Documented, but their documentation says that a right caller on an honest, unchanged server does not get them."""
_WARM_UP: Final = 0.35
_WINDOW: Final = 0.2
"""Shares of a witness's samples: those before the first measurement, and those in each measurement."""

Record = dict[str, Any]


def read_journal(path: Path) -> list[Record]:
    """The lines of a client's journal; a SIGKILL may have cut the last."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


@dataclass(frozen=True)
class Levels:
    """What a process held, in the middle of a stretch of time."""

    fds: float
    threads: float
    rss_anon: float
    blocks: float

    @classmethod
    def of(cls, samples: Sequence[dict[str, int]]) -> Levels:
        """The medians."""
        return cls(*(median(sample[name] for sample in samples) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Witness:
    """A client that lived through a whole pair, and what it held: before connect, warm, at the end, after close."""

    name: str
    before: dict[str, int]
    warm: Levels
    end: Levels
    after: dict[str, int]

    def problems(self) -> Iterator[str]:
        """What grew."""
        for what in ("fds", "threads"):
            if self.after[what] > self.before[what]:
                yield f"{self.name}: {what} {self.before[what]} before connect, {self.after[what]} after close"
            warm, end = getattr(self.warm, what), getattr(self.end, what)
            if end > warm + _SLACK[what]:
                yield f"{self.name}: {what} grew from {warm:.0f} to {end:.0f} while it worked"
        if (grown := self.end.rss_anon - self.warm.rss_anon) > plan.MEMORY_TOLERANCE:
            yield f"{self.name}: RssAnon grew by {_mib(grown)}, tolerated are {_mib(plan.MEMORY_TOLERANCE)}"
        if (grown := self.end.blocks - self.warm.blocks) > plan.BLOCKS_TOLERANCE:
            yield f"{self.name}: Python's blocks grew by {grown:.0f}, tolerated are {plan.BLOCKS_TOLERANCE}"

    def line(self) -> str:
        """Start and end, for people."""
        return (
            f"{self.name}: fds {self.before['fds']} → {self.warm.fds:.0f} → {self.end.fds:.0f} → {self.after['fds']}, "
            f"threads {self.before['threads']} → {self.warm.threads:.0f} → {self.end.threads:.0f} → "
            f"{self.after['threads']}, RssAnon {_mib(self.before['rss_anon'])} → {_mib(self.warm.rss_anon)} → "
            f"{_mib(self.end.rss_anon)} → {_mib(self.after['rss_anon'])}, "
            f"Python blocks {self.warm.blocks:.0f} → {self.end.blocks:.0f}"
        )


_SLACK: Final = {"fds": 24, "threads": 2}
"""Channels of four descriptors each: a session keeps as many as it ever needed at once, four for the threads and one
for each call that a frozen server left unanswered. Threads: a connection that is being made again."""


def witness_of(name: str, records: Sequence[Record]) -> Witness | str:
    """What a survivor measured; a sentence when it did not.

    Only moments between which calls succeeded are looked at: while the server is down a client holds less.
    """
    work = [record for record in records if record.get("phase") == "work"]
    alive = [now["sample"] for earlier, now in pairwise(work) if _succeeded(now) > _succeeded(earlier)]
    warm = alive[int(_WARM_UP * len(alive)) :][: int(_WINDOW * len(alive))]
    end = alive[len(alive) - int(_WINDOW * len(alive)) :]
    before = [r["sample"] for r in records if r.get("phase") == "before"]
    after = [r["sample"] for r in records if r.get("phase") == "after"]
    if not (before and warm and end and after):
        return f"{name}: its journal is not whole ({len(alive)} samples at work), it cannot be measured"
    return Witness(name, before[0], Levels.of(warm), Levels.of(end), after[0])


def _succeeded(record: Record) -> int:
    return sum(number for name, number in record["counts"].items() if name.startswith("done."))


@dataclass
class Result:
    """One pair."""

    name: str
    happened: Happened
    left: Held | None = None
    """What the server still held after all its patience."""
    counts: Counter[str] = field(default_factory=Counter)
    overrun: float = 0.0
    calm_errors: Counter[str] = field(default_factory=Counter)
    """Errors that came when the last fault was over for longer than a call can take."""
    events: dict[str, list[str]] = field(default_factory=dict)
    witnesses: list[Witness] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_journals(self, paths: Iterable[Path]) -> None:
        """Reads what the clients told."""
        for path in sorted(paths):
            records = read_journal(path)
            totals = [record for record in records if "counts" in record]
            if totals:
                self.counts.update(totals[-1]["counts"])
                self.overrun = max(self.overrun, totals[-1]["overrun"])
                self._add_calm_errors(totals)
            for record in records:
                if "event" in record:
                    self.events.setdefault(record["event"], []).append(f"{path.stem}: {record['text']}")
            place, generation = path.stem.split("-")[1:]
            if int(place) < plan.SURVIVORS and generation == "1":
                found = witness_of(path.stem, records)
                if isinstance(found, str):
                    self.problems.append(found)
                else:
                    self.witnesses.append(found)

    def _add_calm_errors(self, totals: Sequence[Record]) -> None:
        settled = self.happened.calm + CALM_SECONDS
        before = [record["counts"] for record in totals if record["at"] <= settled]
        inside = [record["counts"] for record in totals if settled < record["at"] <= self.happened.ended]
        if before and inside:
            names = {name for name in inside[-1] if name.startswith("error.")}
            for name in names - {"error.SessionClosedError"}:
                self.calm_errors[name.removeprefix("error.")] += inside[-1][name] - before[-1].get(name, 0)
        self.calm_errors = +self.calm_errors

    def judge(self) -> None:
        """Fills `problems`."""
        say = self.problems.append
        self.problems.extend(self.happened.unexpected)
        for what in ("wrong", "undocumented", "unexpected"):
            for text in self.events.get(what, [])[:1]:
                say(f"{len(self.events[what])} × {what}, the first: {text}")
        for name in sorted(_STRANGE):
            if number := self.counts[f"error.{name}"]:
                say(f"{number} × {name}, which nothing here can be the reason of")
        for witness in self.witnesses:
            self.problems.extend(witness.problems())
        if self.overrun > plan.OVERRUN_TOLERANCE:
            say(f"a call took {self.overrun:.1f} s longer than its timeout")
        if self.calm_errors:
            say(f"errors although nothing happened for {CALM_SECONDS:g} s: {_listed(self.calm_errors)}")
        for kind in plan.MIX:
            if not self.counts[f"done.{kind}"]:
                say(f"no {kind} succeeded")
        if not self.counts["retrieve.hits"]:
            say("nothing was ever found: nothing was checked")
        if not self.counts["retrieve.views"]:
            say("nothing was read through a view")
        self._judge_what_is_left()

    def _judge_what_is_left(self) -> None:
        left = self.left
        if left is None:
            self.problems.append("the server could not be asked what it still holds")
        elif left.read_locked or left.write_locked or left.sessions or left.registrations:
            self.problems.append(
                f"left on the server after the TTLs: {left.read_locked} read locks, {left.write_locked} write locks, "
                f"{left.sessions} sessions, {len(left.registrations)} registrations"
            )

        killed = sum(number for name, number in self.happened.faults.items() if name.startswith("kill-client"))
        if left is not None and left.prefetch_jobs and not killed:
            self.problems.append(f"{left.prefetch_jobs} prefetch jobs left although no client was killed")

    def lines(self) -> Iterator[str]:
        """All figures, for people."""
        counts, happened = self.counts, self.happened
        up = happened.ended - happened.began - happened.down
        yield (
            f"{self.name}: {up:.0f} s of traffic and {happened.down:.0f} s without a server; {_listed(happened.faults)}"
        )
        done = ", ".join(f"{counts[f'done.{kind}']} {kind}" for kind in ("connect", *plan.MIX))
        yield f"  operations    {done}"
        yield f"  stores        {counts['store.complete']} complete, {counts['store.incomplete']} not (and said so)"
        hits = (f"{kind} {counts[f'{kind}.hits']} hits, {counts[f'{kind}.misses']} misses" for kind in _FINDING)
        yield f"  found         {'; '.join(hits)}; {counts['checked_bytes'] / 2**30:.2f} GiB checked"
        errors = {name.removeprefix("error."): n for name, n in counts.items() if name.startswith("error.")}
        yield f"  errors        {_listed(errors)}; undocumented: {counts['undocumented']}"
        yield f"  in the calm   {_listed(self.calm_errors)} (errors)"
        yield f"  overrun       the slowest call took {max(0.0, self.overrun):.2f} s longer than its timeout"
        yield f"  wrong bytes   {counts['wrong_bytes']}"
        for when, held in (("at stop", happened.at_stop), ("after the TTLs", self.left)):
            yield f"  left {when + ' ' * (15 - len(when))}{_held(held)}"
        for witness in self.witnesses:
            yield f"  {witness.line()}"
        for problem in self.problems:
            yield f"  PROBLEM       {problem}"
        yield f"  {'FAILED' if self.problems else 'ok'}"


_FINDING: Final = ("lookup", "retrieve")
CALM_SECONDS: Final = 3.0
"""Half a second of clean-up and the pauses of the clients are over by then."""


def _held(held: Held | None) -> str:
    if held is None:
        return "could not be asked"
    return (
        f"{held.read_locked} read locks, {held.write_locked} write locks, {held.sessions} sessions, "
        f"{len(held.registrations)} registrations; apart from them {held.prefetch_jobs} prefetch jobs of killed clients"
    )


def _listed(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(numbers.items()) if number) or "none"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
