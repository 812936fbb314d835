"""Deadlines by a fake clock, and what a caller may pass as a timeout."""

from __future__ import annotations

import math
import time

import pytest

from lmcache_sdk.errors import ArgumentTypeError, DeadlineExceededError, Fate, UsageError
from lmcache_sdk.session.deadline import MAX_TIMEOUT, Deadline, boot_time, checked_timeout
from tests.fix_faults import FakeClock


def test_it_counts_down_and_stops_at_zero() -> None:
    clock = FakeClock()
    deadline = Deadline(2.5, clock)
    assert (deadline.remaining(), deadline.remaining_ms(), deadline.passed) == (2.5, 2500, False)
    clock.advance(2.0)
    assert (deadline.remaining(), deadline.passed) == (0.5, False)
    clock.advance(0.5)
    assert (deadline.remaining(), deadline.remaining_ms(), deadline.passed) == (0.0, 0, True)
    clock.advance(100)
    assert deadline.remaining() == 0.0


def test_milliseconds_are_rounded_up() -> None:
    """A poll that wakes half a millisecond too early finds nothing and must poll once more."""
    clock = FakeClock(0.0)
    assert Deadline(0.0001, clock).remaining_ms() == 1
    assert Deadline(1.0001, clock).remaining_ms() == 1001


def test_after_runs_by_the_monotonic_clock() -> None:
    before = time.monotonic()
    remaining = Deadline.after(10.0).remaining()
    assert 10.0 - (time.monotonic() - before) <= remaining <= 10.0


def test_check_names_the_step() -> None:
    clock = FakeClock()
    deadline = Deadline(1.5, clock)
    deadline.check("lookup: LOOKUP")
    clock.advance(1.5)
    with pytest.raises(DeadlineExceededError) as caught:
        deadline.check("lookup: LOOKUP", Fate.NOT_SENT)
    assert caught.value.step == "lookup: LOOKUP" and caught.value.fate is Fate.NOT_SENT
    assert "lookup: LOOKUP" in str(caught.value) and "1.5 s" in str(caught.value)


def test_fate_is_unknown_unless_said() -> None:
    assert Deadline(1.0, FakeClock()).exceeded("x").fate is Fate.UNKNOWN


@pytest.mark.parametrize(("seconds", "left"), [(0.5, 0.5), (2.0, 2.0), (9.0, 4.0)])
def test_capped_is_the_sooner_of_the_two(seconds: float, left: float) -> None:
    clock = FakeClock()
    deadline = Deadline(5.0, clock)
    clock.advance(1.0)
    capped = deadline.capped(seconds)
    assert capped.remaining() == left
    clock.advance(left)
    assert capped.passed and deadline.passed == (left == 4.0)


def test_a_passed_deadline_stays_passed_when_capped() -> None:
    clock = FakeClock()
    deadline = Deadline(1.0, clock)
    clock.advance(2.0)
    assert deadline.capped(60.0).passed


def test_repr() -> None:
    assert repr(Deadline(1.25, FakeClock())) == "<Deadline in 1.250 s>"


def test_boot_time_never_runs_backwards() -> None:
    before = boot_time()
    assert boot_time() >= before


@pytest.mark.parametrize("timeout", [1, 60.0, 0.001, MAX_TIMEOUT])
def test_timeouts_are_seconds(timeout: float) -> None:
    checked = checked_timeout(timeout)
    assert checked == timeout and type(checked) is float


@pytest.mark.parametrize(
    "timeout", [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, MAX_TIMEOUT + 1, pytest.param(10**5000, id="huge")]
)
def test_a_timeout_that_cannot_be_meant(timeout: float) -> None:
    with pytest.raises(UsageError, match=r"^timeout: ") as caught:
        checked_timeout(timeout)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("timeout", [None, True, False, "60", b"60", [60], 1j])
def test_a_timeout_of_another_type(timeout: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^timeout: "):
        checked_timeout(timeout)
