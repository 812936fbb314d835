"""What every execution is held to, whatever the input: no import, no file, no code, bounded time, bounded memory.

A target's `check(data)` says what may come out; this module says what may not happen on the way. `Guard.run` is cheap
enough for every execution; `Guard.run_traced` also measures the peak of memory and is for samples and for tests.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Final

MAX_SECONDS: Final = 1.0
"""CPU time of one execution. Wall time is asked first, for it is cheaper; alone it would measure other processes."""
PEAK_AROUND: Final = 64 * 2**10
PEAK_PER_BYTE: Final = 128
"""An empty list or map is 64 bytes in memory, its place on the stack 8 more, and one byte in the payload."""

_FORBIDDEN: Final = ("import", "open", "exec", "compile", "code.__new__", "function.__new__", "marshal.loads")
_FORBIDDEN_FAMILIES: Final = (
    *("builtins.", "ctypes.", "ftplib.", "glob.", "http.", "mmap.", "os.", "pathlib.", "pickle.", "resource."),
    *("shutil.", "signal.", "socket.", "sqlite3.", "subprocess.", "tempfile.", "urllib.", "webbrowser."),
)


class Marks:
    """What an input reached that shows in no branch of the library: a dialect, a kind, a format in a table.

    A fuzzer keeps one input for each number that is hit, as it does for each branch.
    """

    COUNT: Final = 4096

    def __init__(self) -> None:
        self.hit: Callable[[int], object] = abs
        """Does nothing until the fuzzer puts its counters here."""


MARKS: Final = Marks()


class Violation(BaseException):
    """A promise was broken. Not an Exception: code under test must not be able to catch it."""


class _Watch:
    """The one audit hook of the process: the interpreter has no way to take one out again."""

    def __init__(self) -> None:
        self.armed = False
        self.events: list[str] = []
        self._hooked = False

    def hook(self) -> None:
        if not self._hooked:
            self._hooked = True
            sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.armed and (event in _FORBIDDEN or event.startswith(_FORBIDDEN_FAMILIES)):
            self.events.append(f"{event} {str(arguments)[:200]}")
            raise Violation(self.events[0])


_WATCH: Final = _Watch()


class Guard:
    """Watches one target."""

    def __init__(self, check: Callable[[bytes], None]) -> None:
        self._check = check
        _WATCH.hook()

    def warm_up(self, inputs: list[bytes]) -> None:
        """Runs inputs unwatched: what is imported and compiled on first use is done once, by legal input."""
        for data in inputs:
            self._check(data)

    def run(self, data: bytes) -> None:
        """One execution; raises whatever is wrong."""
        began = time.perf_counter()
        _WATCH.events.clear()
        _WATCH.armed = True
        try:
            self._check(data)
        finally:
            _WATCH.armed = False
        if _WATCH.events:
            raise Violation(f"swallowed: {_WATCH.events.pop()}")
        if time.perf_counter() - began > MAX_SECONDS:
            self._measure(data)

    def _measure(self, data: bytes) -> None:
        began = time.thread_time()
        self._check(data)
        spent = time.thread_time() - began
        if spent > MAX_SECONDS:
            raise Violation(f"{spent:.1f} s of CPU time for {len(data)} bytes")

    def run_traced(self, data: bytes) -> None:
        """The same with the peak of memory measured; several times slower."""
        tracemalloc.start()
        try:
            self.run(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak > PEAK_AROUND + PEAK_PER_BYTE * len(data):
            raise Violation(f"{peak} bytes of memory for {len(data)} bytes")
