"""What people read."""

from __future__ import annotations

import pytest

from benchmarks.figures import Line, at_least, at_most, failed
from benchmarks.table import amount, table

SEVEN = [2.0] * 7


def a_line(count: int) -> Line:
    return Line(
        row="shm store",
        case="small 256",
        against="floor",
        goal=at_most(1.35),
        ours=SEVEN[:count],
        other=[4.0] * count,
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12 ms"), (9.876, "9.88 ms"), (12.34, "12.3 ms"), (1234.5, "1234 ms")]
)
def test_amount(value: float, text: str) -> None:
    assert amount(value, "ms") == text


def test_columns_and_count() -> None:
    head, row, verdicts = table([a_line(7)])
    assert head.split()[:3] == ["row", "case", "ours"]
    assert " ".join(row.split()) == "shm store small 256 2.00 ms floor 4.00 ms 0.50× ≤ 1.35× 0.50 … 0.50 7 PASS"
    assert verdicts == "1 PASS, 0 FLOOR, 0 FAIL, 0 ERROR, 0 info"
    assert head.index("verdict") == row.index("PASS")


def test_error_is_written_out() -> None:
    lines = list(table([failed("view", ValueError("why"))]))
    assert lines[1].endswith("ERROR")
    assert "view: ValueError: why" in lines


def test_too_few_pairs_are_named_as_such() -> None:
    assert any("a look, not a result" in text for text in table([a_line(3)]))
    assert not any("a look, not a result" in text for text in table([a_line(7)]))


def test_memory_is_no_matter_of_pairs() -> None:
    line = Line(row="r", case="c", against="limit", goal=at_least(1.0), unit="MiB", ours=[1.0], other=[1.0])
    assert not any("a look" in text for text in table([line]))


def test_straight_client_has_columns_and_words() -> None:
    line = Line(row="r", case="c", against="official", goal=at_least(2.0), ours=[7.0], other=[10.0], straight=[6.0])
    _, row, *notes = table([line])
    assert row.split()[-5:] == ["6.00", "ms", "1.17×", "1", "FLOOR"]
    assert any(note.startswith("straight: a client that sends only") for note in notes)
    assert any(note.startswith("FLOOR: the goal is missed") for note in notes)
    assert notes[-1] == "0 PASS, 1 FLOOR, 0 FAIL, 0 ERROR, 0 info"


def test_words_are_explained_only_where_they_stand() -> None:
    assert not any(text.startswith(("straight:", "FLOOR:")) for text in table([a_line(7)]))
