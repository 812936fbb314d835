"""When an interruption may come: at a wait, and nowhere else.

Python runs signal handlers between any two instructions, and pyzmq runs them inside a call whose message has left or
arrived already. A KeyboardInterrupt there leaves a reservation that nobody knows of, or loses a reply that was taken
off the socket. So a call to the server runs *deferred*: handlers that are Python functions wait, and every wait for the
server opens a window in which they run. Clean-up opens none; it is short.

Only the main thread runs handlers, so elsewhere this does nothing. It nests: the outermost block does the work.
"""

from __future__ import annotations

import _signal
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

Handler = Callable[[int, "FrameType | None"], object]

_NAMES: Final = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS: Final = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class _Note:
    """Stands in for one handler. A handler that runs in a window can get hold of it, as what was in place before it,
    and call it or put it back at any later time: then it is that handler and nothing else.
    """

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler: Handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _deferral.note(self, number, frame)


class _Deferral:
    """The handlers that wait, and what came for them. One for the process, used by the main thread only."""

    def __init__(self) -> None:
        self.notes: dict[int, _Note] = {}
        """What stands in the handlers' places now."""
        self.pending: list[tuple[_Note, int, FrameType | None]] = []
        self.interruption: BaseException | None = None
        """What a handler raised while the handlers were being exchanged."""
        self.active: bool = False
        self.open: bool = False
        """Whether a window is open: handlers run at once."""

    def begin(self) -> bool:
        """Takes the handlers' place; False when that is done already, or this is not the main thread."""
        if self.active or not _is_main():
            return False
        # an interruption before the first handler is exchanged leaves things as they were; `active` comes last
        self._exchange(self._defer, list(_SIGNALS))
        self.active = True
        return True

    def _defer(self, number: int) -> None:
        handler = _signal.getsignal(number)
        if isinstance(handler, _Note):
            if self.notes.get(number) is handler:
                return
            handler = handler.handler
        if callable(handler):
            self.notes[number] = note = _Note(handler)
            _signal.signal(number, note)

    def note(self, note: _Note, number: int, frame: FrameType | None) -> None:
        """A signal came, or somebody calls an old stand-in."""
        if self.notes.get(number) is not note:
            note.handler(number, frame)
        elif not self.open:
            self.pending.append((note, number, frame))
        else:
            # closed before the handler runs: if it raises, the clean-up that follows is not to be interrupted again
            self.open = False
            self._run(note, number, frame)
            self.reopen()

    def _run(self, note: _Note, number: int, frame: FrameType | None) -> None:
        try:
            note.handler(number, frame)
        finally:
            if self.active:  # it may have put another handler in its place, which has to wait as well
                self._exchange(self._defer, list(_SIGNALS))

    def _restore(self, number: int) -> None:
        if _signal.getsignal(number) is self.notes[number]:  # a handler may have put another in its place
            _signal.signal(number, self.notes[number].handler)

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
        self.open = False
        self._exchange(self._restore, list(self.notes))
        self.notes, self.active = {}, False
        interruption, self.interruption = self.interruption, None
        # only now: until the last handler was back, another call for it could come
        self._run_pending(interruption)

    def reopen(self) -> None:
        """Opens a window, after what was called for until now; one that was interrupted is closed."""
        try:
            self._run_pending(None)
            self.open = True
            self._run_pending(None)  # what came between the two
        except BaseException:
            self.open = False
            raise

    def _run_pending(self, interruption: BaseException | None) -> None:
        pending, self.pending = self.pending, []
        for note, number, frame in pending:
            try:
                self._run(note, number, frame)
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

    __slots__ = ("_in_window", "_mine")

    def __enter__(self) -> None:
        self._mine: bool = _deferral.begin()
        # a handler that runs in a window may call the library, too
        self._in_window: bool = not self._mine and _deferral.open and _is_main()
        if self._in_window:
            _deferral.open = False

    def __exit__(self, *_: object) -> None:
        if self._mine:
            _deferral.end()
        elif self._in_window:
            _deferral.reopen()


class window:  # noqa: N801  # used as a function is
    """A wait inside a deferred block, where an interruption may come."""

    __slots__ = ("_mine",)

    def __enter__(self) -> None:
        self._mine: bool = _deferral.active and not _deferral.open and _is_main()
        if self._mine:
            _deferral.reopen()

    def __exit__(self, *_: object) -> None:
        if self._mine:
            _deferral.open = False


def _is_main() -> bool:
    """Whether handlers run in this thread: only there may they be set."""
    return threading.current_thread() is threading.main_thread()
