"""Time as the server sees it: a function that gives seconds. Tests give it a clock that they move by hand."""

from __future__ import annotations

from collections.abc import Callable

from lmcache_sdk.values import override

Clock = Callable[[], float]


class ManualClock:
    """A clock that stands still until it is moved; call it to read it."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        """The time it shows."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves it forward."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._now += seconds

    @override
    def __repr__(self) -> str:
        return f"<ManualClock {self._now}>"
