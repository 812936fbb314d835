"""The clock: means of its blocks, and nothing of what lies between them."""

from __future__ import annotations

import gc
import time

import pytest

from benchmarks.worker import timing


def test_clock_counts_its_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with timing() as clock:
        for taken in (1.0, 2.0, 6.0):
            with clock:
                now[0] += taken
            now[0] += 100.0
    assert clock.calls == 3
    assert clock.answer()["seconds"] == 3.0


def test_no_garbage_is_collected_between_calls() -> None:
    with timing() as clock, clock:
        assert not gc.isenabled()
    assert gc.isenabled()
