"""When an interruption may come: at a wait, and nowhere else.

Python runs signal handlers between any two instructions, and pyzmq runs them inside a call whose message has left or
arrived already. A KeyboardInterrupt there leaves a reservation that nobody knows of, or loses a reply that was taken
off the socket. So a call to the server runs *deferred*: handlers that are Python functions wait, and every wait for the
server opens a window in which they run. Clean-up opens none; it is short.

Only the main thread runs handlers, so elsewhere this does nothing. It nests: the outermost block does the work.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
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
        self.interruption: BaseException | None = None
        """What a handler raised while the handlers were being exchanged."""
        self.active: bool = False

    def begin(self) -> bool:
        """Takes the handlers' place; False when that is done already, or this is not the main thread."""
        if self.active or not _is_main():
            return False
        # an interruption before the first handler is exchanged leaves things as they were; `active` comes last
        self._exchange(self._defer, list(_SIGNALS))
        self.active = True
        return True

    def resume(self) -> None:
        """Begins again behind a window, whatever comes meanwhile."""
        while not self.active:
            try:
                self.begin()
            except BaseException as error:  # noqa: BLE001  # raised again by `end`
                self.interruption = error

    def _defer(self, number: int) -> None:
        handler = signal.getsignal(number)
        if callable(handler) and handler != self._note:
            self.handlers[number] = handler
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending.append((number, frame))

    def _restore(self, number: int) -> None:
        signal.signal(number, self.handlers[number])

    def _exchange(self, one: Callable[[int], None], numbers: list[int]) -> None:
        """Does `one` for every number, whatever the handlers that are in place meanwhile raise."""
        while numbers:
            try:
                while numbers:
                    one(numbers[-1])
                    numbers.pop()
            except BaseException as error:  # noqa: BLE001  # raised again by `end`
                self.interruption = error

    def end(self) -> None:
        """Puts the handlers back and runs all that were called for; what the first of them raised goes on then."""
        self._exchange(self._restore, list(self.handlers))
        handlers, self.handlers, self.active = self.handlers, {}, False
        # only now: until the last handler was back, another call for it could come
        pending, self.pending = self.pending, []
        interruption, self.interruption = self.interruption, None
        for number, frame in pending:
            try:
                handlers[number](number, frame)
            except BaseException as error:  # noqa: BLE001  # a SIGTERM must not get lost behind a SIGINT
                interruption = interruption or error
        if interruption is not None:
            raise interruption


_deferral: Final = _Deferral()


class deferred:  # noqa: N801  # used as a function is
    """Nothing interrupts the block but in its windows; what came meanwhile is raised behind it.

    Classes, not generators: an interruption inside contextlib would leave a generator to the collector, which would
    defer again at some later time.
    """

    __slots__ = ("_mine",)

    def __enter__(self) -> None:
        self._mine: bool = _deferral.begin()

    def __exit__(self, *_: object) -> None:
        if self._mine:
            _deferral.end()


class window:  # noqa: N801  # used as a function is
    """A wait inside a deferred block, where an interruption may come."""

    __slots__ = ("_mine",)

    def __enter__(self) -> None:
        self._mine: bool = _deferral.active and _is_main()
        if self._mine:
            try:
                _deferral.end()
            except BaseException:
                _deferral.resume()
                raise

    def __exit__(self, *_: object) -> None:
        if self._mine:
            _deferral.resume()


def _is_main() -> bool:
    """Whether handlers run in this thread: only there may they be set."""
    return threading.current_thread() is threading.main_thread()
