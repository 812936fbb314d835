"""What is cached: objects by name, their locks, and the two ways in which releases reserve a write.

Up to 0.5.5 a reservation is an object that is write-locked; when the lock's time passes, the object is readable with
whatever its bytes are. From 0.5.6 it is staged apart, invisible until it is committed; when its time passes, the next
writer of the same object is handed the same bytes. `staged` chooses. Not thread-safe: the server's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import attrs
import torch

from lmcache_sdk.devserver.clocks import Clock
from lmcache_sdk.devserver.locks import ExpiringLock
from lmcache_sdk.devserver.pool import PAGE, Piece, Pool
from lmcache_sdk.values import override

MAX_READERS: Final = 128
"""More locks than this are never taken or released at once."""


@attrs.frozen
class ObjectName:
    """What names an object: neither the request, nor its configuration, nor dtype or shape."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    cache_salt: str


@attrs.frozen
class StoredShape:
    """The shape and dtype that an instance's objects are allocated with."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.define(eq=False)
class CachedObject:
    """One object: its bytes and its two locks."""

    piece: Piece
    write_lock: ExpiringLock
    read_lock: ExpiringLock


@attrs.frozen(kw_only=True)
class ObjectCounts:
    """The numbers of /status."""

    total: int
    write_locked: int
    read_locked: int
    staged: int
    staged_nbytes: int
    read_locks: int
    """All locks of all objects together."""


class ObjectStore:
    """The objects of a pool."""

    def __init__(self, pool: Pool, clock: Clock, *, read_ttl: float, write_ttl: float, staged: bool) -> None:
        self.pool = pool
        self.read_ttl = read_ttl
        self.write_ttl = write_ttl
        self._clock = clock
        self._staged = staged
        self._objects: dict[ObjectName, CachedObject] = {}
        self._staging: dict[ObjectName, CachedObject] = {}
        self._recency: OrderedDict[ObjectName, None] = OrderedDict()

    # ---- writing -----------------------------------------------------------------------------------------------------

    def reserve_write(self, names: Sequence[ObjectName], layout: StoredShape) -> dict[ObjectName, CachedObject]:
        """Reserves the objects that nobody has or writes; those that need memory get it together or not at all."""
        reserved: dict[ObjectName, CachedObject] = {}
        missing: list[ObjectName] = []
        for name in dict.fromkeys(names):
            if name in self._objects:
                continue
            staged = self._staging.get(name)
            if staged is None:
                missing.append(name)
            elif not staged.write_lock.held:
                staged.write_lock.acquire()
                reserved[name] = staged
        pieces = self.pool.allocate(layout.shape, layout.dtype, len(missing))
        if pieces is not None:
            for name, piece in zip(missing, pieces, strict=True):
                reserved[name] = self._reserve(name, piece)
        return {name: reserved[name] for name in names if name in reserved}

    def _reserve(self, name: ObjectName, piece: Piece) -> CachedObject:
        write_lock = ExpiringLock(self._clock, self.write_ttl)
        made = CachedObject(piece, write_lock, ExpiringLock(self._clock, self.read_ttl))
        write_lock.acquire()
        if self._staged:
            self._staging[name] = made
            self._recency[name] = None
        else:
            self._objects[name] = made
        return made

    def finish_write(self, names: Iterable[ObjectName]) -> None:
        """Publishes what is still reserved; a reservation whose time has passed, or that was cleared, is let be."""
        published = []
        for name in names:
            entry = (self._staging if self._staged else self._objects).get(name)
            if entry is None or not entry.write_lock.held:
                continue
            entry.write_lock.release()
            if self._staged:
                del self._staging[name]
                self._objects[name] = entry
            published.append(name)
        for name in reversed(published):
            self._recency[name] = None
            self._recency.move_to_end(name)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def lock_for_reading(self, names: Iterable[ObjectName], times: int) -> list[bool]:
        """Takes read locks on each object that is readable; which ones were."""
        times = min(max(times, 1), MAX_READERS)
        found = []
        for name in names:
            entry = self._objects.get(name)
            readable = entry is not None and not entry.write_lock.held
            if entry is not None and readable:
                entry.read_lock.acquire(times)
            found.append(readable)
        return found

    def read_locked(self, names: Iterable[ObjectName]) -> dict[ObjectName, CachedObject]:
        """Those of the objects that somebody holds a read lock on. Whose lock it is cannot be told."""
        found = {}
        for name in names:
            entry = self._objects.get(name)
            if entry is not None and entry.read_lock.held:
                found[name] = entry
        return found

    def unlock_after_reading(self, names: Iterable[ObjectName], times: int = 1) -> None:
        """Gives read locks back; objects that are gone or not locked are passed over."""
        times = min(max(times, 1), MAX_READERS)
        for name in names:
            entry = self._objects.get(name)
            if entry is not None and not entry.write_lock.held:
                entry.read_lock.release(times)

    def touch(self, names: Sequence[ObjectName]) -> None:
        """Marks objects as used just now, the first of them last to go."""
        for name in reversed(names):
            if name in self._recency:
                self._recency.move_to_end(name)

    # ---- making room -------------------------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Removes up to `count` unlocked objects, the least recently used first; how many went."""
        chosen: list[ObjectName] = []
        for name in self._recency:
            if len(chosen) >= count:
                break
            if self._evictable(name):
                chosen.append(name)
        return sum(self._remove(name) for name in chosen)

    def _evictable(self, name: ObjectName) -> bool:
        entry, staged = self._objects.get(name), self._staging.get(name)
        if entry is not None:
            return not entry.read_lock.held and not entry.write_lock.held
        return staged is not None and not staged.write_lock.held

    def _remove(self, name: ObjectName) -> bool:
        entry = self._objects.pop(name, None) or self._staging.pop(name, None)
        self._recency.pop(name, None)
        if entry is not None:
            self.pool.free(entry.piece)
        return entry is not None

    @property
    def num_evictable_by_age(self) -> int:
        """How many objects the least-recently-used order knows."""
        return len(self._recency)

    def clear(self, *, force: bool) -> None:
        """Removes everything; without `force` it keeps what is locked."""
        for name in [*self._objects, *self._staging]:
            if force or self._unlocked(name):
                self._remove(name)

    def _unlocked(self, name: ObjectName) -> bool:
        entry = self._objects.get(name) or self._staging[name]
        return not entry.read_lock.held and not entry.write_lock.held

    def expire_locks(self) -> None:
        """Ends every lock, as if its time had passed."""
        for entry in [*self._objects.values(), *self._staging.values()]:
            entry.read_lock.expire()
            entry.write_lock.expire()

    def counts(self) -> ObjectCounts:
        """The numbers of this moment."""
        objects, staged = self._objects.values(), self._staging.values()
        return ObjectCounts(
            total=len(objects) + len(staged),
            write_locked=sum(entry.write_lock.held for entry in [*objects, *staged]),
            read_locked=sum(entry.read_lock.held for entry in objects),
            staged=len(staged),
            staged_nbytes=sum(-(-entry.piece.nbytes // PAGE) * PAGE for entry in staged),
            read_locks=sum(entry.read_lock.count for entry in objects),
        )

    @override
    def __repr__(self) -> str:
        return f"<ObjectStore {len(self._objects)} objects, {len(self._staging)} staged>"
