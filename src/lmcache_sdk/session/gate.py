"""One call at a time per key: what two threads may not do to the same tokens at once.

The server keys pending transfers by (instance, key) and not by request: of two stores of the same tokens, the
second's COMMIT would publish the first's half-written slots, and of two retrieves only one gives its locks back
(PROTOCOL.md section 6). Waiting counts against the caller's deadline, and a close of the session ends it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator

from lmcache_sdk.errors import Fate, UsageError
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.session.interrupts import window
from lmcache_sdk.session.process import OwnProcess


class KeyGate:
    """Mutual exclusion by key. `check` is called after every wait and raises to end it."""

    def __init__(self, condition: threading.Condition, check: Callable[[], None]) -> None:
        self._condition = condition
        self._check = check
        self._held: dict[Hashable, threading.Thread] = {}
        """Keys, and the thread that began to hold each; by the object, because ids are used again."""
        self._process = OwnProcess()

    @contextlib.contextmanager
    def hold(self, key: Hashable, deadline: Deadline, step: str) -> Iterator[None]:
        """Holds the key for the time of a block; raises UsageError when this thread holds it already."""
        with self._condition:
            while key in self._held:
                if self._held[key] is threading.current_thread():
                    raise UsageError(
                        f"{step}: this thread is inside a view of the same tokens, and would wait for itself; leave "
                        "the view first"
                    )
                with window():
                    woken = self._condition.wait(deadline.remaining())
                if not woken and key in self._held:
                    raise deadline.exceeded(f"{step}: another call of this context on the same tokens", Fate.NOT_SENT)
                self._check()
            self._held[key] = threading.current_thread()
        try:
            yield
        finally:
            if self._process.here:  # in a forked child a thread that is not there may hold the lock for ever
                self._let_go(key)

    def _let_go(self, key: Hashable) -> None:
        with self._condition:
            self._held.pop(key, None)
            self._condition.notify_all()
