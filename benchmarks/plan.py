"""What a run measures: how often, on which geometries, with how many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.stage import GEOMETRIES, QWEN, Geometry

COUNTS: Final = (256, 2048, 8192)
_LARGE: Final = 16 * 2**20
"""Bytes from which on one call is one sample: below, a call is short and its first one after a pause is another."""
_CALLS: Final = 5


@dataclass(frozen=True)
class Case:
    """One geometry with one number of tokens."""

    geometry: Geometry
    count: int

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.geometry.name} {self.count}"

    @property
    def nbytes(self) -> int:
        """Of its tensor."""
        return self.geometry.nbytes(self.count)

    @property
    def calls(self) -> int:
        """How many calls in a row make one sample, of every side and of the floors: their mean."""
        return _CALLS if self.nbytes < _LARGE else 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of its tensor."""
        return self.geometry.shape(self.count)


@dataclass(frozen=True)
class Plan:
    """The size of a run."""

    repeats: int = 7
    geometries: tuple[Geometry, ...] = tuple(GEOMETRIES.values())
    counts: tuple[int, ...] = COUNTS
    quick: bool = False

    def cases(self, most_bytes: int | None = None) -> Iterator[Case]:
        """Every geometry with every count, those above `most_bytes` left out."""
        for geometry in self.geometries:
            for count in self.counts:
                case = Case(geometry, count)
                if most_bytes is None or case.nbytes <= most_bytes:
                    yield case


def quick(repeats: int) -> Plan:
    """A look in two minutes."""
    return Plan(repeats, (QWEN,), (2048,), quick=True)
