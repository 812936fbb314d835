"""Rows 10.1 and 10.5 to 10.7: how a process leaves, forks and is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.integration.processes import Child

from .clients import script_env
from .conftest import everywhere
from .report import Fault
from .worlds import KV, World

START = 60.0


@contextlib.contextmanager
def script(here: World, name: str, *arguments: str, answers: bool = True) -> Iterator[Child]:
    """A script of this folder, running."""
    log = here.server.log.parent / f"{name}-{uuid4().hex[:8]}.log"
    command: list[str | Path] = [sys.executable, "-m", f"tests.faults.scripts.{name}"]
    env = script_env()
    if name == "forks":
        del env["OMP_NUM_THREADS"]  # as users have it
    child = Child(name, [*command, here.server.url, here.server.http_url, KV, *arguments], env, log, answers=answers)
    try:
        yield child
    finally:
        child.stop()


def said(child: Child, timeout: float = START) -> dict[str, object]:
    found = json.loads(child.read_line(timeout))
    assert isinstance(found, dict)
    return found


@pytest.mark.row("10.1")
@pytest.mark.parametrize(("how", "status"), [("close", 0), ("forget", 0), ("two", 0), ("error", 1), ("raise", 1)])
def test_leaving(fault: Fault, here: World, how: str, status: int) -> None:
    before = here.server.held()
    with script(here, "leaving", how, answers=False) as child:
        assert child.wait(START) == status, child.log.read_text()
    log = child.log.read_text()
    if how == "two":
        assert '"found": 512' in log, log
    assert ("ResourceWarning" in log) is False, log  # not shown unless asked for
    # what is left is cached, the registration is gone
    here.settled(before)
    if here.transport == "shm":
        assert here.server.segment_path.exists()  # no resource tracker took it away
    fault.saw(f"{how}: exit status {status}, registrations +0")


def fork_and_check(fault: Fault, here: World, mode: str, expected: str) -> dict[str, object]:
    before = here.server.held()
    with script(here, "forks", mode) as child:
        report = said(child)
        assert child.wait(20) == 0, child.log.read_text()
    fault.never(report["hangs"] is True, f"the forked child hangs ({mode})")
    fault.never("wrong" in str(report["said"]), "wrong bytes in the child")
    assert report["said"] == expected, report
    assert report["before"] is report["after"] is True and report["parent"] == [], report
    here.settled(before)
    fault.saw(f"{mode}: {report['said']} after {report['seconds']:.1f} s; the parent is unharmed")
    return report


@pytest.mark.row("10.5")
def test_forked_child_uses_the_parents_context(fault: Fault, here: World) -> None:
    fork_and_check(fault, here, "use", "SessionClosedError SessionClosedError SessionClosedError")


@pytest.mark.row("10.5")
def test_forked_child_leaves_the_parents_view(fault: Fault, here: World) -> None:
    report = fork_and_check(fault, here, "view", "SessionClosedError SessionClosedError no error")
    assert report["stored"] is report["viewed"] is True, report


@pytest.mark.row("10.6")
@everywhere
@pytest.mark.parametrize("mode", ["connect", "pool"])
def test_forked_child_connects(fault: Fault, here: World, mode: str) -> None:
    fork_and_check(fault, here, mode, "exact")


@pytest.mark.row("10.7")
@pytest.mark.leaves("an interrupted store on shm: judged below")
@pytest.mark.parametrize("how", ["interrupt", "interrupt-store"])
def test_ctrl_c_on_a_frozen_server(fault: Fault, here: World, how: str) -> None:
    before = here.server.held()
    with script(here, "leaving", how) as child:
        assert said(child) == {"ready": True}
        with here.frozen():
            child.send_line("go")
            assert said(child) == {"calling": True}
            time.sleep(0.5)
            began = time.monotonic()
            os.kill(child.pid, signal.SIGINT)
            assert said(child, 10) == {"ended": "KeyboardInterrupt"}
            raised = time.monotonic() - began
            assert raised <= 1.0, f"raised {raised:.2f} s after the signal"
            assert said(child, 10) == {"closed": True}
            assert child.wait(10) == 0
            left = time.monotonic() - began
            assert left <= 5.0, f"left {left:.2f} s after the signal"
    if how == "interrupt-store" and here.transport == "shm":
        # its PREPARE is executed when the server goes on: it must not unregister, or unwritten slots are published
        time.sleep(0.5)
        found = here.read([1, *range(1, 512)])
        fault.never(found is not None, "unwritten slots were published")
        fault.saw("store: nothing published, its slots and registration are left to the server's TTL and grace")
        here.server.clear()
    else:
        here.settled(before, timeout=4)
        fault.saw(f"{how}: 0 locks, 0 sessions, registrations +0")
    fault.saw(f"KeyboardInterrupt after {raised:.1f} s, process gone after {left:.1f} s")
