"""Forked children, in which a test runs something, and locks that somebody holds while it forks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

import pytest

CHILD_SECONDS: Final = 30.0
"""Only a child that hangs lives that long."""


def in_child(work: Callable[[], object]) -> int:
    """Runs something in a forked child; its exit code, 0 when nothing was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks of threads, which this tests
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001  # the parent sees the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child did not end")


@contextlib.contextmanager
def held_by_another_thread(lock: AbstractContextManager[object]) -> Iterator[None]:
    """A lock that a thread holds for the time of the block; in a child that is forked there, for ever."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    try:
        yield
    finally:
        over.set()
        thread.join(10)
