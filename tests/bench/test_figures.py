"""Ratios, spreads, verdicts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.figures import NEAR, NEAR_STORE, Against, Goal, Line, Unit, at_least, at_most, failed, passed, quartiles


def line(goal: Goal, ours: list[float], other: list[float], unit: Unit = "ms", *, judged: bool = True) -> Line:
    return Line(row="r", case="c", against="official", goal=goal, unit=unit, ours=ours, other=other, judged=judged)


@pytest.mark.parametrize(
    ("goal", "unit", "ratio", "verdict"),
    [
        (at_least(2.0), "ms", 2.5, "PASS"),
        (at_least(3.0), "ms", 2.5, "FAIL"),
        (at_most(0.5), "ms", 0.4, "PASS"),
        (at_most(0.3), "ms", 0.4, "FAIL"),
        (at_most(0.4), "MiB", 0.4, "PASS"),
        (at_least(2.5), "ms", 2.5, "PASS"),
        # of operations per second more is better: ten against twenty-five is a gain of less than half
        (at_least(0.4), "ops/s", 0.4, "PASS"),
        (at_least(2.0), "ops/s", 0.4, "FAIL"),
        (at_most(2.5), "ops/s", 2.5, "PASS"),
    ],
)
def test_ratio_has_the_direction_of_the_goal(goal: Goal, unit: Unit, ratio: float, verdict: str) -> None:
    taken = line(goal, [10.0, 10.0], [25.0, 25.0], unit)
    assert taken.ratio == pytest.approx(ratio)
    assert taken.verdict == verdict


def test_pairs_are_compared_and_not_medians() -> None:
    """A machine that was slow for half of the run was slow for both."""
    taken = line(at_least(2.0), [1.0, 1.0, 10.0], [2.0, 2.2, 20.0])
    assert taken.ratios == [2.0, 2.2, 2.0]
    assert taken.ratio == 2.0


def test_one_spoilt_pair_decides_nothing() -> None:
    taken = line(at_most(1.25), [1.0, 1.0, 90.0, 1.0, 1.0], [1.0] * 5)
    assert taken.verdict == "PASS"
    assert taken.spread == (1.0, 1.0)


def test_pairs_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        _ = line(at_most(1.0), [1.0], [1.0, 2.0]).ratio


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], (3.0, 3.0)), ([1.0, 3.0], (1.5, 2.5)), ([1.0, 2.0, 3.0, 4.0, 5.0], (2.0, 4.0))],
)
def test_quartiles(values: list[float], expected: tuple[float, float]) -> None:
    assert quartiles(values) == expected


def test_case_without_a_goal_decides_nothing() -> None:
    taken = line(at_least(9.0), [1.0], [1.0], judged=False)
    assert taken.verdict == "info"
    assert passed([taken])


def test_row_that_was_not_measured_does_not_pass() -> None:
    taken = failed("r", RuntimeError("two\nlines"))
    assert taken.error == "RuntimeError: two lines"
    assert taken.verdict == "ERROR"
    assert not passed([line(at_least(1.0), [1.0], [1.0]), taken])
    assert line(at_least(1.0), [], []).verdict == "ERROR"


def test_json_has_samples_and_what_follows() -> None:
    document = json.loads(json.dumps(line(at_least(2.0), [1.0, 2.0, 3.0], [4.0, 4.0, 6.0]).as_json()))
    assert document["ours"] == [1.0, 2.0, 3.0]
    assert document["ours_median"] == 2.0
    assert document["other_median"] == 4.0
    assert document["ratio"] == 2.0
    assert document["verdict"] == "PASS"
    assert document["goal"] == {"kind": "gain", "bound": 2.0}
    assert "ratio" not in failed("r", RuntimeError()).as_json()


def held(
    goal: Goal, ours: float, official: float, straight: float, *, against: Against = "official", near: float = NEAR
) -> Line:
    """Three sides that always take the same time."""
    taken = line(goal, [ours] * 3, [official] * 3)
    return replace(taken, straight=[straight] * 3, against=against, near=near)


@pytest.mark.parametrize(
    ("taken", "verdict"),
    [
        # twice as fast as 10 is 5: the straight client takes 6, so nobody reaches it
        (held(at_least(2.0), 7.5, 10.0, 6.0), "FLOOR"),
        (held(at_least(2.0), 7.6, 10.0, 6.0), "FAIL"),
        (held(at_least(2.0), 7.6, 10.0, 6.0, near=NEAR_STORE), "FLOOR"),
        # the straight client reaches the goal, so ours could
        (held(at_least(2.0), 5.5, 10.0, 5.0), "FAIL"),
        (held(at_least(2.0), 4.9, 10.0, 6.0), "PASS"),
        (held(at_most(0.5), 7.0, 10.0, 6.0), "FLOOR"),
        (held(at_most(0.5), 7.0, 10.0, 5.0), "FAIL"),
        # parts that were measured apart, and that the straight client cannot do together in that time
        (held(at_most(1.25), 7.5, 5.0, 6.9, against="floor"), "FLOOR"),
        (held(at_most(1.25), 7.5, 5.0, 6.1, against="floor"), "FAIL"),
        (held(at_most(1.25), 7.5, 5.0, 6.9, against="limit"), "FAIL"),
    ],
)
def test_goal_that_nobody_reaches_is_a_floor_if_ours_is_near(taken: Line, verdict: str) -> None:
    assert taken.verdict == verdict
    assert passed([taken]) is (verdict != "FAIL")


def test_floor_of_operations_per_second_counts_the_other_way() -> None:
    taken = replace(line(at_least(2.0), [150.0], [100.0], "ops/s"), straight=[180.0])
    assert (taken.ratio, taken.straight_ratio, taken.to_straight) == (1.5, 1.8, 1.2)
    assert taken.verdict == "FLOOR"


def test_floor_is_seen_in_pairs_too() -> None:
    """Three times slower for one repetition, all three sides: nothing changes."""
    taken = line(at_least(2.0), [7.0, 21.0, 7.0], [10.0, 30.0, 10.0])
    taken = replace(taken, straight=[6.0, 18.0, 6.0])
    assert taken.to_straight == pytest.approx(7 / 6)
    assert taken.straight_ratio == pytest.approx(10 / 6)


def test_json_says_what_the_straight_client_took() -> None:
    document = json.loads(json.dumps(held(at_least(2.0), 7.5, 10.0, 6.0).as_json()))
    assert document["straight"] == [6.0] * 3
    assert document["to_straight"] == 1.25
    assert document["straight_ratio"] == pytest.approx(10 / 6)
    assert document["verdict"] == "FLOOR"
    assert "to_straight" not in line(at_least(2.0), [1.0], [4.0]).as_json()
