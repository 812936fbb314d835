"""When an interruption may come: at a wait, and nowhere else.

Python runs signal handlers between any two instructions, and pyzmq runs them inside a call whose message has left or
arrived already. A KeyboardInterrupt there leaves a reservation that nobody knows of, or loses a reply that was taken
off the socket. So a call to the server runs *deferred*: handlers that are Python functions wait, and every wait for the
server opens a window in which they run. Clean-up opens none; it is short.

Only the main thread runs handlers, so elsewhere this does nothing. It nests: the outermost block does the work.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

Handler = Callable[[int, "FrameType | None"], object]

_NAMES: Final = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS: Final = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class _Deferral:
    """The handlers that wait, and what came for them. One for the process, used by the main thread only."""

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}
        self.pending: list[tuple[int, FrameType | None]] = []
        self.active = False

    def begin(self) -> bool:
        """Takes the handlers' place; False when that is done already, or this is not the main thread."""
        if self.active or not _is_main():
            return False
        self.active = True
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self.handlers[number] = handler
                signal.signal(number, self._note)
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending.append((number, frame))

    def end(self) -> None:
        """Puts the handlers back and runs those that were called for; the first that raises ends it."""
        self.active = False
        handlers, self.handlers = self.handlers, {}
        pending, self.pending = self.pending, []
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in pending:
            handlers[number](number, frame)


_deferral: Final = _Deferral()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Nothing interrupts the block but in its windows; what came meanwhile is raised behind it."""
    if not _deferral.begin():
        yield
        return
    try:
        yield
    finally:
        _deferral.end()


@contextlib.contextmanager
def window() -> Iterator[None]:
    """A wait inside a deferred block, where an interruption may come."""
    if not _deferral.active or not _is_main():
        yield
        return
    try:
        _deferral.end()
        yield
    finally:
        _deferral.begin()


def _is_main() -> bool:
    """Whether handlers run in this thread: only there may they be set."""
    return threading.current_thread() is threading.main_thread()
