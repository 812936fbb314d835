"""One value that many threads use and any of them may replace when it has gone bad, once for all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from lmcache_sdk.errors import Fate
from lmcache_sdk.session.deadline import Deadline

T = TypeVar("T")


class Renewable(Generic[T]):
    """Holds the current value. `renew` makes a new one unless somebody else has done so already."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._lock = threading.Lock()

    @property
    def current(self) -> T:
        """The value that is good now, as far as anybody knows."""
        return self._value

    def renew(self, bad: T, make: Callable[[T], T], deadline: Deadline, step: str) -> T:
        """Replaces `bad` by what `make` gives; gives the current value when it is not `bad` any more."""
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise deadline.exceeded(f"{step}: another call is connecting again", Fate.NOT_SENT)
        try:
            if self._value is bad:
                self._value = make(bad)
            return self._value
        finally:
            self._lock.release()
