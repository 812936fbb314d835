"""What each fault test saw, and the table that is made of it.

Contract: nobody writes a verdict. A test whose assertions all hold is *right*; one that fails is *poor*, and DANGEROUS
when what failed was a `Fault.never`, that is, wrong bytes, lost data that was called stored, foreign code, or a hang. A
test may declare, by `Fault.bounded`, that the server itself does the damage; it then has asserted the bound.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from lmcache_sdk import KVCacheSDKError
from tests.integration.patterns import same_bytes

from .rows import DANGEROUS, ROWS

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

SLACK = 1.0
"""Seconds that a call may take beyond its timeout."""


class Danger(AssertionError):  # noqa: N818  # it names what it is
    """What must never happen has happened."""


class Verdict(enum.IntEnum):
    """How bad it is; the worst case of a row is the row's."""

    RIGHT = 0
    BOUNDED = 1
    POOR = 2
    DANGEROUS = 3

    @property
    def text(self) -> str:
        """As the table has it."""
        return {0: "right", 1: "server, bounded to one batch", 2: "**poor**", 3: "**DANGEROUS**"}[self.value]


@dataclass
class Fault:
    """One test's view of the report: where it ran, what it saw."""

    rows: tuple[str, ...]
    transport: str = "-"
    server: str = "-"
    seen: list[str] = field(default_factory=list)
    bound: str = ""

    def saw(self, outcome: str) -> None:
        """Adds to the outcome."""
        self.seen.append(outcome)

    def never(self, happened: bool, what: str) -> None:
        """Fails as DANGEROUS when it happened."""
        if happened:
            raise Danger(what)

    def bounded(self, proof: str) -> None:
        """The server does the damage, and what was asserted bounds it."""
        self.bound = proof
        self.saw(proof)

    def timed(self, call: Callable[[], T], within: float, what: str = "") -> T:
        """The value of a call that must end `within` so many seconds."""
        began = time.monotonic()
        value = call()
        took = time.monotonic() - began
        assert took <= within, f"{what or 'the call'} took {took:.2f} s, more than {within:g} s"
        if what:
            self.saw(f"{what} in {took:.1f} s")
        return value

    def error(
        self, call: Callable[[], object], kind: type[E] | tuple[type[E], ...], *, within: float = SLACK, says: str = ""
    ) -> E:
        """The error of a call that must fail so, within so many seconds, saying this."""
        began = time.monotonic()
        value: object = None
        came: BaseException | None = None
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001  # whatever came is judged below
            came = error
        took = time.monotonic() - began
        assert came is not None, f"no error but {_short(value)}, instead of {_names(kind)}"
        assert isinstance(came, kind), f"{type(came).__name__} instead of {_names(kind)}: {came}"
        assert took <= within, f"{type(came).__name__} after {took:.2f} s, later than {within:g} s"
        assert says in str(came), f"{says!r} is not in the message: {came}"
        self.saw(f"{type(came).__name__} after {took:.1f} s")
        return came

    def refused(self, call: Callable[[], object], *, says: str = "") -> KVCacheSDKError:
        """The error of a call whose arguments could not be meant: at once, of ours, and nothing was sent."""
        error = self.error(call, KVCacheSDKError, within=0.5, says=says)
        assert error.fate.name == "NOT_SENT", error.fate
        return error

    def exact(self, found: torch.Tensor | None, expected: torch.Tensor, who: str = "retrieve") -> None:
        """These bytes came back: others are DANGEROUS, none are poor."""
        self.never(found is not None and not same_bytes(found, expected), f"{who}: wrong bytes as a hit")
        assert found is not None, f"{who}: nothing was found"
        self.saw(f"{who} exact")

    def exact_or_miss(self, found: torch.Tensor | None, expected: torch.Tensor, who: str = "retrieve") -> None:
        """A prefix of these bytes came back, or nothing."""
        if found is not None:
            whole = expected[:, :, : found.shape[2]].contiguous()
            self.never(not same_bytes(found, whole), f"{who}: wrong bytes as a hit")


def _names(kind: type[BaseException] | tuple[type[BaseException], ...]) -> str:
    return kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    return repr(value)[:120]


@dataclass
class Case:
    """One finished test."""

    fault: Fault
    verdict: Verdict
    problem: str = ""


def worst(cases: Iterable[Case]) -> Verdict:
    """The worst verdict of some cases."""
    return max((case.verdict for case in cases), default=Verdict.RIGHT)


@dataclass
class Report:
    """All cases of a run."""

    cases: list[Case] = field(default_factory=list)

    def lines(self) -> list[tuple[str, str, str, str, str]]:
        """row, transport, server, outcome, verdict; the cases of one row at one place joined."""
        places: dict[tuple[str, str, str], list[Case]] = {}
        for case in self.cases:
            for row in case.fault.rows:
                places.setdefault((row, case.fault.transport, case.fault.server), []).append(case)
        order = {row: position for position, row in enumerate(ROWS)}
        lines = []
        for (row, transport, server), cases in sorted(places.items(), key=lambda item: (order[item[0][0]], item[0])):
            lines.append((row, transport, server, _outcome(cases), worst(cases).text))
        return lines

    def missing(self) -> list[str]:
        """Rows that no case has shown."""
        shown = {row for case in self.cases for row in case.fault.rows}
        return [row for row in ROWS if row not in shown]

    def counts(self) -> dict[str, int]:
        """Rows by their worst verdict."""
        found = dict.fromkeys((verdict.text.strip("*") for verdict in Verdict), 0)
        for row in ROWS:
            cases = [case for case in self.cases if row in case.fault.rows]
            if cases:
                found[worst(cases).text.strip("*")] += 1
        return found

    def table(self) -> str:
        """The table in Markdown."""
        out = ["| row | fault | transport | server | outcome | verdict |", "|---|---|---|---|---|---|"]
        for row, transport, server, outcome, verdict in self.lines():
            mark = "!" if row in DANGEROUS else ""
            out.append(f"| {row}{mark} | {ROWS[row]} | {transport} | {server} | {outcome} | {verdict} |")
        counts = ", ".join(f"{number} {name}" for name, number in self.counts().items())
        out += ["", f"{len(ROWS) - len(self.missing())} of {len(ROWS)} rows: {counts}. `!`: dangerous with the client "]
        out[-1] += "inside lmcache 0.5.6."
        if self.missing():
            out.append(f"Not shown: {', '.join(self.missing())}.")
        return "\n".join(out) + "\n"

    def failed(self) -> bool:
        """Whether a row is poor or DANGEROUS."""
        return worst(self.cases) >= Verdict.POOR


def _outcome(cases: list[Case]) -> str:
    """What the cases saw, each thing once, the problems of the bad ones first."""
    problems = [f"{case.problem}" for case in cases if case.problem]
    seen = list(dict.fromkeys(text for case in cases for text in case.fault.seen))
    shown = "; ".join([*problems, *seen[:6]]) + (f"; and {len(seen) - 6} more" if len(seen) > 6 else "")
    times = f" ({len(cases)} cases)" if len(cases) > 1 else ""
    return shown.replace("|", "/").replace("\n", " ")[:600] + times
