"""A counting lock that ends by itself. Nobody owns it: whoever releases takes one from the count, whose it may be.

Every acquisition renews the time of the whole counter, so a forgotten lock on a busy object lives for ever (PROTOCOL.md
section 5).
"""

from __future__ import annotations

from lmcache_sdk.devserver.clocks import Clock
from lmcache_sdk.values import override


class ExpiringLock:
    """A counter that is zero again `ttl` seconds after the last acquisition."""

    __slots__ = ("_clock", "_count", "_expires_at", "_ttl")

    def __init__(self, clock: Clock, ttl: float) -> None:
        self._clock = clock
        self._ttl = ttl
        self._count = 0
        self._expires_at = 0.0

    @property
    def count(self) -> int:
        """How many are held now."""
        if self._count and self._clock() >= self._expires_at:
            self._count = 0
        return self._count

    @property
    def held(self) -> bool:
        """Whether any is held now."""
        return self.count > 0

    def acquire(self, times: int = 1) -> None:
        """Adds to the count and renews the time of all of it."""
        self._count = self.count + times
        self._expires_at = self._clock() + self._ttl

    def release(self, times: int = 1) -> None:
        """Takes from the count; never below zero."""
        self._count = max(0, self.count - times)

    def expire(self) -> None:
        """Ends all of it, as if its time had passed."""
        self._count = 0

    @override
    def __repr__(self) -> str:
        return f"<ExpiringLock {self.count} held>"
