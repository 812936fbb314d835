"""The `office` fixture: see office.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fix_faults import FakeClock
from tests.session.office import Office
from tests.session.ports import hasty as hasty  # noqa: PLC0414  # a fixture


@pytest.fixture
def office(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    """A session that is closed at the end, with every connection of it."""
    made = Office(clock, monkeypatch)
    yield made
    made.session.close()
    assert all(line.closed for line in made.lines)
