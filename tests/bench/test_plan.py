"""What a run covers, and what the geometries weigh."""

from __future__ import annotations

import pytest

from benchmarks.plan import COUNTS, Case, Plan, quick
from benchmarks.stage import MLA, QWEN, SMALL, Geometry


@pytest.mark.parametrize(("geometry", "per_token"), [(QWEN, 147_456), (SMALL, 1024), (MLA, 70_272)])
def test_bytes_of_a_token(geometry: Geometry, per_token: int) -> None:
    assert geometry.nbytes(1) == per_token


def test_whole_plan_has_every_geometry_and_count() -> None:
    cases = list(Plan().cases())
    assert {case.geometry for case in cases} == {QWEN, SMALL, MLA}
    assert {case.count for case in cases} == set(COUNTS)
    assert len(cases) == 9


def test_heavy_cases_can_be_left_out() -> None:
    assert "Qwen3-8B 8192" not in [case.name for case in Plan().cases(350 * 2**20)]
    assert "Qwen3-8B 2048" in [case.name for case in Plan().cases(350 * 2**20)]


def test_quick_plan() -> None:
    assert [case.name for case in quick(3).cases()] == ["Qwen3-8B 2048"]


@pytest.mark.parametrize(
    ("geometry", "count", "calls"), [(SMALL, 256, 5), (SMALL, 8192, 5), (MLA, 256, 1), (QWEN, 256, 1), (QWEN, 8192, 1)]
)
def test_short_cases_are_means_of_calls_in_a_row(geometry: Geometry, count: int, calls: int) -> None:
    assert Case(geometry, count).calls == calls
