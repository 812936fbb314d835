"""After every test: no thread, no child process, no socket, pipe or event descriptor, and no shared memory mapping more
than before it.

What is compared is this process as the kernel shows it, so a leak in a C extension counts too. Closing may take a
moment (a ZeroMQ context reaps its sockets, a server thread notices that its client left), so a difference is looked at
again for `GRACE` seconds, and garbage is collected before it is believed. A test that failed is not judged: its
traceback holds what it opened. A fixture of a wider scope is there before the test, and so counts as before.

`@pytest.mark.may_leak("why")` opts a test out.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import pytest

GRACE: Final = 5.0
"""Seconds a resource has to go away; only a leak, or a slow machine, ever waits that long."""

_WATCHED: Final = ("socket:", "pipe:", "anon_inode:", "/dev/shm/", "/memfd:")
_SHARED: Final = b"/dev/shm/"
_FAILED: Final = pytest.StashKey[bool]()


@attrs.frozen
class Snapshot:
    """What this process holds at one instant. Entries are texts that name one resource and say what it is."""

    held: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        """Reads the process as it is now."""
        return cls(held=frozenset((*_threads(), *_children(), *_descriptors(), *_mappings())))


def leaked_since(before: Snapshot, grace: float = GRACE) -> list[str]:
    """What is held now and was not held at `before`, after giving it `grace` seconds to go away."""
    end = time.monotonic() + grace
    pause = 0.001
    while leaked := Snapshot.take().held - before.held:
        gc.collect()
        if time.monotonic() >= end:
            return sorted(leaked & Snapshot.take().held)
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    return []


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Errors in teardown when the test leaves something behind."""
    before = Snapshot.take()
    yield
    node: pytest.Item = request.node
    if node.stash.get(_FAILED, False) or node.get_closest_marker("may_leak"):
        return
    leaked = leaked_since(before)
    if leaked:
        pytest.fail("left behind: " + "; ".join(leaked), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remembers that a test failed or was cut short, for `no_leaks`."""
    report = yield
    if isinstance(report, pytest.TestReport) and not report.passed:
        item.stash[_FAILED] = True
    return report


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        # a daemon thread that Python itself made for a foreign caller goes when that caller does
        if not isinstance(thread, threading._DummyThread):
            yield f"thread {thread.name} ({thread.ident})"


def _children() -> Iterator[str]:
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:  # the thread ended while we looked
            continue
        for pid in pids:
            yield f"child process {pid}"


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(_WATCHED):
            yield f"descriptor {name} {target}"


def _mappings() -> Iterator[str]:
    maps = Path("/proc/self/maps").read_bytes()
    if _SHARED not in maps:  # thousands of lines, read twice for each test: split only when there is something
        return
    for line in maps.splitlines():
        if _SHARED in line:
            place, _, rest = line.decode().partition(" ")
            yield f"mapping {place} of {rest[rest.index(_SHARED.decode()) :]}"
