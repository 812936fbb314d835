"""The picture is well-formed, shows each judged line once, and says the verdict in words."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.chart import Scale, chart, shown_of
from benchmarks.figures import Against, Goal, Line, at_least, at_most, failed

CASES = ("Qwen3-8B 256", "Qwen3-8B 2048", "Qwen3-8B 8192", "small 2048")
SVG = "{http://www.w3.org/2000/svg}"


def a_line(row: str, goal: Goal, against: Against = "official", other: float = 4.0, *, judged: bool = True) -> Line:
    return Line(row=row, case="c", against=against, goal=goal, ours=[1.0, 1.0, 1.1], other=[other] * 3, judged=judged)


def drawn(*lines: Line) -> ElementTree.Element:
    return ElementTree.fromstring(chart(lines, "made on <a> & b"))


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def test_one_bar_for_each_judged_line() -> None:
    picture = drawn(
        a_line("one", at_least(2.0)),
        a_line("two & more", at_most(1.25), "floor", 0.5),
        a_line("shown in the table only", at_least(2.0), judged=False),
        failed("broken", RuntimeError()),
    )
    assert [bar.get("class") for bar in picture.iter(f"{SVG}rect")] == ["pass", "fail"]
    assert "two & more, c" in texts(picture)
    assert "made on <a> & b" in texts(picture)
    assert any(text.startswith("4.00× (pass") for text in texts(picture))


def test_cost_against_the_official_is_drawn_as_a_gain() -> None:
    picture = drawn(a_line("miss", at_most(0.5)))
    assert "4.00× (pass, goal 2.00×)" in texts(picture)


def test_floor_is_a_word_of_its_own() -> None:
    held = Line(row="r", case="c", against="official", goal=at_least(2.0), ours=[7.0], other=[10.0], straight=[6.0])
    picture = drawn(held)
    assert [bar.get("class") for bar in picture.iter(f"{SVG}rect")] == ["floor"]
    assert any(text.startswith("1.43× (floor") for text in texts(picture))


def test_nothing_lies_outside() -> None:
    picture = drawn(a_line("slow", at_least(2.0), other=0.01), a_line("fast", at_least(2.0), other=900.0))
    width = float(picture.get("width", "0"))
    for bar in picture.iter(f"{SVG}rect"):
        assert float(bar.get("x", "-1")) >= 0
        assert float(bar.get("x", "0")) + float(bar.get("width", "0")) <= width


def test_nothing_measured_is_a_picture_too() -> None:
    assert texts(drawn())[-1] == "made on <a> & b"


def test_a_row_is_shown_once_at_the_count_that_goals_name() -> None:
    cases = [
        Line(row="store", case=case, against="floor", goal=at_most(2.0), ours=[1.0], other=[1.0]) for case in CASES
    ]
    single = a_line("crowd", at_least(2.0))
    assert [line.case for line in shown_of([*cases, single])] == ["Qwen3-8B 2048", "c"]


@pytest.mark.parametrize(("ratios", "ticks"), [([4.0, 2.0], [1, 2, 4]), ([0.3], [0.25, 0.5, 1, 2]), ([1.0], [1, 2])])
def test_axis_has_one_in_it(ratios: list[float], ticks: list[float]) -> None:
    scale = Scale(ratios)
    assert scale.ticks == ticks
    assert scale.x(ticks[0]) < scale.x(ticks[-1])
