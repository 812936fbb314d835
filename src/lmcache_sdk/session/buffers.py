"""Memory for results, used again once the caller has dropped it: the page faults of a fresh tensor of hundreds of
megabytes cost several times what filling it costs.

A buffer is lent as a memoryview; whoever makes a tensor on it keeps that view alive, and when the last tensor goes the
view goes, and the buffer is idle again. An idle buffer is marked so that the kernel takes its pages when memory is
short (MADV_FREE), costs no page fault when it is lent again, and is dropped when there are more idle bytes than the
pool may keep. Private anonymous memory: a forked child gets a copy, as of any tensor.

No view is ever lent twice at a time: a buffer comes back by the death of its view only.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final

import attrs

from lmcache_sdk.values import override

_HUGE_PAGE: Final = 2 * 2**20
MIN_NBYTES: Final = _HUGE_PAGE
"""Smaller results come from torch's allocator, which is as good for them."""
_MAX_WASTE: Final = 2
"""How many times larger than asked for an idle buffer may be."""


@attrs.frozen(eq=False, repr=False)
class _Lent:
    """A buffer that somebody uses, and the reference that tells when it is not used any more."""

    mapping: mmap.mmap
    watch: weakref.ref[memoryview]


class BufferPool:
    """The result buffers of one context. Thread-safe; `max_idle_nbytes` 0 lends nothing."""

    def __init__(self, max_idle_nbytes: int) -> None:
        self._max_idle_nbytes = max_idle_nbytes
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        """The last one was used last."""
        self._lent: dict[int, _Lent] = {}
        self._returned: deque[int] = deque()
        """Keys of buffers whose views have died. Views die anywhere, also inside a block that holds the lock, so their
        callbacks take no lock; they append here, and whoever holds the lock next sorts them in."""
        self._next_key = 0
        self._messages: list[memoryview] = []
        """Of the last inline store: what is written into zmq's own messages needs no copy."""

    def lend(self, nbytes: int) -> memoryview | None:
        """Writable memory of exactly that many bytes, with any content; None when it should come from elsewhere."""
        if self._max_idle_nbytes == 0 or nbytes < MIN_NBYTES:
            return None
        with self._lock:
            self._sort_in()
            mapping = self._take(nbytes) or _new_mapping(nbytes)
            key, self._next_key = self._next_key, self._next_key + 1
            view = memoryview(mapping)[:nbytes]
            self._lent[key] = _Lent(mapping, weakref.ref(view, lambda _: self._note_return(key)))
            return view

    def _take(self, nbytes: int) -> mmap.mmap | None:
        fitting = [mapping for mapping in self._idle if nbytes <= len(mapping) <= _MAX_WASTE * _whole_pages(nbytes)]
        if not fitting:
            return None
        best = min(reversed(fitting), key=len)
        self._idle.remove(best)
        return best

    def _note_return(self, key: int) -> None:
        self._returned.append(key)
        if self._lock.acquire(blocking=False):  # whoever holds it now may have sorted in already: the next one does
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            mapping = self._lent.pop(self._returned.popleft()).mapping
            with contextlib.suppress(OSError):  # a kernel that cannot keeps the pages, as any allocator does
                mapping.madvise(mmap.MADV_FREE)
            self._idle.append(mapping)
        while sum(map(len, self._idle)) > self._max_idle_nbytes:
            self._idle.pop(0)

    def keep_messages(self, messages: Sequence[memoryview]) -> None:
        """Keeps the memory of inline stores, in the place of what was kept before: nobody else may have it any more."""
        with self._lock:
            self._messages = list(messages) if sum(map(len, messages)) <= self._max_idle_nbytes else []

    def take_message(self, nbytes: int) -> memoryview | None:
        """Kept memory of exactly that many bytes, with any content."""
        with self._lock:
            for index, message in enumerate(self._messages):
                if len(message) == nbytes:
                    return self._messages.pop(index)
        return None

    def close(self) -> None:
        """Drops what is idle, and what is lent once it comes back."""
        with self._lock:
            self._max_idle_nbytes = 0
            self._messages.clear()
            self._sort_in()

    @property
    def idle_nbytes(self) -> int:
        """Bytes of the buffers that wait to be lent again."""
        with self._lock:
            self._sort_in()
            return sum(map(len, self._idle))

    @override
    def __repr__(self) -> str:
        return f"<BufferPool {len(self._lent)} lent {len(self._idle)} idle>"


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE


def _new_mapping(nbytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, _whole_pages(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
