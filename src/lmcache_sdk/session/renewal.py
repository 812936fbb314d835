"""One value that many threads use and any of them may replace when it has gone bad, once for all.

Who replaces it claims that under the lock, makes the new value outside of it, and publishes it.
"""

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
        self._changed = threading.Condition()
        self._making = False

    @property
    def current(self) -> T:
        """The value that is good now, as far as anybody knows."""
        return self._value

    def renew(self, bad: T, make: Callable[[T], T], deadline: Deadline, step: str) -> T:
        """Replaces `bad` by what `make` gives; gives the current value when it is not `bad` any more."""
        with self._changed:
            while self._making:
                if not self._changed.wait(deadline.remaining()):
                    raise deadline.exceeded(f"{step}: another call is connecting again", Fate.NOT_SENT)
            if self._value is not bad:
                return self._value
            self._making = True
        fresh = bad
        try:
            fresh = make(bad)
        finally:
            with self._changed:
                self._value, self._making = fresh, False
                self._changed.notify_all()
        return fresh
