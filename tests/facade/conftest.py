"""Rigs as fixtures: `rig` once with a pool and once inline, and one of each for what concerns only that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.facade.rig import Rig
from tests.session.ports import hasty as hasty  # noqa: PLC0414  # a fixture


@pytest.fixture(params=[True, False], ids=["shm", "inline"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A server of 0.5.6, on both data planes."""
    with Rig(shm=request.param) as made:
        yield made


@pytest.fixture
def shm_rig() -> Iterator[Rig]:
    """A server of 0.5.6 with a pool."""
    with Rig(shm=True) as made:
        yield made


@pytest.fixture
def inline_rig() -> Iterator[Rig]:
    """A server of 0.5.6 without a pool."""
    with Rig() as made:
        yield made
