"""One instant that every wait inside a call counts down to, and the clocks that lifetimes are measured with.

A timeout is a caller's relative seconds; it becomes a `Deadline` once, at the door. Waits take what remains of it.
Locks that the *server* holds for us are measured with a clock that runs through a suspended machine: their TTL does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from lmcache_sdk.errors import ArgumentTypeError, DeadlineExceededError, Fate, UsageError
from lmcache_sdk.values import override

Clock = Callable[[], float]

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
MAX_TIMEOUT = 86_400.0
"""One day, in seconds: longer than any lock lives, and short enough for every operating system's wait."""


def boot_time() -> float:
    """Seconds of a monotonic clock that counts suspended time too, where the system has one."""
    return time.clock_gettime(_BOOTTIME)


class Deadline:
    """An absolute instant of a monotonic clock."""

    __slots__ = ("_clock", "_instant", "seconds")

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self.seconds: float = seconds
        """How long it was when it was made; for messages."""
        self._clock = clock
        self._instant = clock() + seconds

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """The instant `seconds` from now."""
        return cls(seconds, clock)

    def remaining(self) -> float:
        """Seconds that are left, 0.0 when it has passed."""
        return max(0.0, self._instant - self._clock())

    def remaining_ms(self) -> int:
        """Milliseconds that are left, rounded up so that a poll does not wake just before."""
        return math.ceil(self.remaining() * 1000)

    @property
    def passed(self) -> bool:
        """Whether nothing is left."""
        return self._clock() >= self._instant

    def capped(self, seconds: float) -> Deadline:
        """This deadline, or `seconds` from now if that is sooner."""
        return Deadline(min(seconds, self.remaining()), self._clock)

    def check(self, step: str, fate: Fate = Fate.UNKNOWN) -> None:
        """Raises DeadlineExceededError, naming `step`, when it has passed."""
        if self.passed:
            raise self.exceeded(step, fate)

    def exceeded(self, step: str, fate: Fate = Fate.UNKNOWN) -> DeadlineExceededError:
        """The error for a wait that this deadline ended."""
        return DeadlineExceededError(f"{step}: no answer within {self.seconds:g} s", step=step, fate=fate)

    @override
    def __repr__(self) -> str:
        return f"<Deadline in {self.remaining():.3f} s>"


def checked_timeout(timeout: object) -> float:
    """A caller's timeout in seconds; refuses what is not a positive finite number, naming what came."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ArgumentTypeError(f"timeout: expected a number of seconds, got {timeout!r}")
    if not (0 < timeout <= MAX_TIMEOUT):
        shown = repr(timeout) if isinstance(timeout, float) or timeout.bit_length() < 64 else "a huge integer"
        raise UsageError(f"timeout: expected more than 0 and at most {MAX_TIMEOUT:g} seconds, got {shown}")
    return float(timeout)
