"""Every reason for which the soak must fail makes it fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.servers import Held
from tests.soak import plan
from tests.soak.faults import Happened
from tests.soak.report import CALM_SECONDS, Result, read_journal

EMPTY = Held(write_locked=0, read_locked=0, sessions=0, prefetch_jobs=0, registrations=frozenset())
COUNTS = {
    "done.connect": 1,
    "done.store": 9,
    "done.lookup": 9,
    "done.retrieve": 9,
    "done.edit": 9,
    "retrieve.hits": 5,
    "retrieve.views": 2,
}
SAMPLE = {"fds": 20, "threads": 7, "rss_anon": 200 * 2**20, "blocks": 500_000}
IDLE = {"fds": 4, "threads": 1, "rss_anon": 150 * 2**20, "blocks": 500_000}

Records = list[dict[str, Any]]
Spoil = Callable[[Records], None]


def _journal() -> Records:
    """A client's whole life: 100 seconds, in the last 20 nothing happened to it."""
    records: Records = [{"at": 0.0, "counts": {}, "overrun": 0.0, "sample": dict(IDLE), "phase": "before"}]
    for second in range(1, 100):
        counts = {name: number * second for name, number in COUNTS.items()}
        records.append({"at": float(second), "counts": counts, "overrun": 0.2, "sample": dict(SAMPLE), "phase": "work"})
    records.append({**records[-1], "at": 100.0, "sample": dict(IDLE), "phase": "after"})
    return records


def _result(folder: Path, journals: dict[str, Records], left: Held | None = EMPTY, **happened: Any) -> Result:
    for name, records in journals.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = Result("pair", Happened(began=0.0, calm=80.0, ended=99.5, at_stop=EMPTY, **happened))
    result.left = left
    result.add_journals(folder.glob("*.jsonl"))
    result.judge()
    assert list(result.lines())
    return result


def _survivors() -> dict[str, Records]:
    return {f"client-{place}-1": _journal() for place in range(plan.SURVIVORS)}


def test_a_good_run_has_no_problem(tmp_path: Path) -> None:
    result = _result(tmp_path, _survivors())
    assert result.problems == []
    assert result.counts["done.store"] == 9 * 99 * plan.SURVIVORS


def _event(kind: str) -> Spoil:
    return lambda records: records.insert(5, {"at": 5.0, "event": kind, "text": "seen"})


def _late(name: str, value: int) -> Spoil:
    def spoil(records: Records) -> None:
        for record in records[70:-1]:
            record["sample"][name] += value

    return spoil


def _count(name: str, when: float = 1.0) -> Spoil:
    def spoil(records: Records) -> None:
        for record in records:
            if record["at"] >= when:
                record["counts"] = {**record["counts"], name: 1}

    return spoil


def _after(name: str) -> Spoil:
    return lambda records: records[-1]["sample"].update({name: records[0]["sample"][name] + 1})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_event("wrong"), "wrong"),
        (_event("undocumented"), "undocumented"),
        (_event("unexpected"), "unexpected"),
        (_count("error.RemoteProtocolError"), "RemoteProtocolError"),
        (_count("error.LocalProtocolError"), "LocalProtocolError"),
        (_count("error.ConnectionLostError", 80 + CALM_SECONDS + 2), "although nothing happened"),
        (_late("rss_anon", plan.MEMORY_TOLERANCE + 1), "RssAnon grew"),
        (_late("blocks", plan.BLOCKS_TOLERANCE + 1), "blocks grew"),
        (_late("fds", 25), "fds grew"),
        (_late("threads", 3), "threads grew"),
        (_after("fds"), "fds 4 before connect, 5 after close"),
        (_after("threads"), "threads 1 before connect, 2 after close"),
        (lambda records: records[-1].update(overrun=60.0), "longer than its timeout"),
        (lambda records: records.pop(), "journal is not whole"),
    ],
)
def test_what_a_client_tells(tmp_path: Path, spoil: Spoil, said: str) -> None:
    journals = _survivors()
    spoil(journals["client-0-1"])
    result = _result(tmp_path, journals)
    assert len(result.problems) == 1
    assert said in result.problems[0]


@pytest.mark.parametrize(
    "left",
    [
        None,
        Held(write_locked=1, read_locked=0, sessions=0, prefetch_jobs=0, registrations=frozenset()),
        Held(write_locked=0, read_locked=1, sessions=0, prefetch_jobs=0, registrations=frozenset()),
        Held(write_locked=0, read_locked=0, sessions=1, prefetch_jobs=0, registrations=frozenset()),
        Held(write_locked=0, read_locked=0, sessions=0, prefetch_jobs=0, registrations=frozenset({7})),
        Held(write_locked=0, read_locked=0, sessions=0, prefetch_jobs=1, registrations=frozenset()),
    ],
)
def test_what_is_left_on_the_server(tmp_path: Path, left: Held | None) -> None:
    assert len(_result(tmp_path, _survivors(), left).problems) == 1


def test_prefetch_jobs_of_killed_clients_are_counted_apart(tmp_path: Path) -> None:
    left = Held(write_locked=0, read_locked=0, sessions=0, prefetch_jobs=3, registrations=frozenset())
    result = _result(tmp_path, _survivors(), left, faults={"kill-client": 4})
    assert result.problems == []
    assert any("3 prefetch jobs" in line for line in result.lines())


def test_a_client_that_ended_by_itself(tmp_path: Path) -> None:
    assert _result(tmp_path, _survivors(), unexpected=["a client ended by itself with -11"]).problems


def test_nothing_done_is_no_success(tmp_path: Path) -> None:
    journals = _survivors()
    for records in journals.values():
        for record in records:
            record["counts"].pop("done.edit", None)
            record["counts"].pop("retrieve.hits", None)
            record["counts"].pop("retrieve.views", None)
    assert len(_result(tmp_path, journals).problems) == 3


def test_a_journal_that_a_kill_has_cut(tmp_path: Path) -> None:
    path = tmp_path / "client-5-1.jsonl"
    path.write_text('{"at": 1.0}\n{"at": 2.0, "cou')
    assert read_journal(path) == [{"at": 1.0}]
