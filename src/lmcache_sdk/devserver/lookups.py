"""LOOKUP, its result, FREE_LOOKUP_LOCKS and END_SESSION.

Each method is the handler of one operation: it gives the reply or raises `RefusedError`, which the client never hears
of. The order of the steps in them matters: what was done before the refusal stays done.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_sdk.devserver.core import Core, object_names, ranks
from lmcache_sdk.devserver.hashing import whole_chunk_hashes
from lmcache_sdk.devserver.sessions import LookupJob, RefusedError, Session
from lmcache_sdk.protocol import (
    EndSession,
    FreeLookupLocks,
    IPCCacheServerKey,
    Lookup,
    PrefetchStatus,
    QueryPrefetchStatus,
    Void,
    WaitPrefetchStatus,
)
from lmcache_sdk.values import RequestId


class LookupHandlers:
    """The four operations around a lookup."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._behaviour = core.behaviour

    def lookup(self, request: Lookup) -> Void:
        """Locks the objects of the hit prefix and leaves the result as a job."""
        core, key = self._core, request.key
        with core.lock:
            if core.layouts.find((key.model_name, key.world_size)) is None:
                core.jobs[key.request_id] = LookupJob(0)
                return Void()
            times = self._readers(key, request.tp_size)
            end = key.end if self._behaviour.lookup_heeds_end else None
            hashes = whole_chunk_hashes(key.token_ids.big_endian(), core.chunk_size, 0, end)
            if not hashes:
                core.jobs[key.request_id] = LookupJob(0)
                return Void()
            session = core.open_session(key)
            session.packed_tokens = key.token_ids.big_endian()
            session.key = key
            if self._behaviour.lookup_resets_hit:
                session.hit_chunks = None
            first = self._first_chunk(key, len(hashes))
            core.objects.touch(object_names(key, hashes[:first]))
            core.jobs[key.request_id] = LookupJob(first + self._lock_prefix(key, hashes[first:], times))
        return Void()

    def _readers(self, key: IPCCacheServerKey, tp_size: int) -> int:
        """How many locks each object gets."""
        if not self._core.dialect.readers_required:
            return tp_size if tp_size > 1 and tp_size > key.world_size else 1
        if key.num_kv_readers < 1:
            raise RefusedError("num_kv_readers is missing")
        return key.num_kv_readers

    def _first_chunk(self, key: IPCCacheServerKey, num_chunks: int) -> int:
        if not self._behaviour.lookup_heeds_start:
            return 0
        return min(max(0, key.start // self._core.chunk_size), num_chunks)

    def _lock_prefix(self, key: IPCCacheServerKey, hashes: Sequence[bytes], times: int) -> int:
        """Locks what is there without a gap; how many whole chunks that is."""
        objects, per_chunk = self._core.objects, max(1, len(ranks(key)))
        counted = per_chunk if self._behaviour.counts_ranks_by_key else max(1, key.world_size)
        names = object_names(key, hashes)
        found = objects.lock_for_reading(names, times)
        num_found = found.index(False) if False in found else len(found)
        num_chunks = num_found // counted
        kept = num_chunks * counted if self._behaviour.lookup_drops_partial_chunks else num_found
        locked = [name for name, there in zip(names[kept:], found[kept:], strict=True) if there]
        objects.unlock_after_reading(locked, times)
        return num_chunks

    # ---- the result --------------------------------------------------------------------------------------------------

    def query_status(self, request: QueryPrefetchStatus) -> PrefetchStatus:
        """Gives a lookup's result, once; 0 for a request that has none."""
        with self._core.lock:
            return PrefetchStatus(ready_chunks=self._take_result(request.request_id))

    def wait_status(self, request: WaitPrefetchStatus) -> PrefetchStatus:
        """The same: there is no second tier here that could keep it waiting."""
        with self._core.lock:
            return PrefetchStatus(ready_chunks=self._take_result(request.request_id))

    def _take_result(self, request_id: RequestId) -> int:
        core = self._core
        job = core.jobs.pop(request_id, None)
        if job is None:
            return 0
        if self._behaviour.status_opens_session:
            core.sessions.open(request_id, core.chunk_size).hit_chunks = job.hit_chunks
        return job.hit_chunks

    # ---- giving locks back -------------------------------------------------------------------------------------------

    def free_locks(self, request: FreeLookupLocks) -> Void:
        """Releases the locks of a range, as far as the release can tell that they are there."""
        with self._core.lock:
            if self._core.dialect.free_needs_live_session:
                self._free_recorded(request)
            else:
                self._free_range(request)
        return Void()

    def _free_range(self, request: FreeLookupLocks) -> None:
        """Up to 0.5.5: the range of the key, clipped to the hit where one was recorded."""
        core, key = self._core, request.key
        if core.dialect.readers_required and key.start >= key.end:
            return
        hashes = whole_chunk_hashes(key.token_ids.big_endian(), core.chunk_size, key.start, key.end)
        if not hashes and not core.dialect.readers_required:
            return
        hit = core.open_session(key).hit_chunks if core.dialect.free_clips_to_hit else None
        self._release(key, hashes, key.start // core.chunk_size, hit, request.tp_size)

    def _free_recorded(self, request: FreeLookupLocks) -> None:
        """From 0.5.6: only what the session knows that the lookup locked."""
        core, key = self._core, request.key
        if key.start >= key.end and not request.extra_ranges:
            return
        session = core.open_session(key)
        if session.hit_chunks is None:
            self._take_result(key.request_id)
        if session.hit_chunks is None:
            return
        for start, end, hit in self._recorded_ranges(request, session, session.hit_chunks):
            hashes = whole_chunk_hashes(key.token_ids.big_endian(), core.chunk_size, start, end)
            self._release(key, hashes, start // core.chunk_size, hit, request.tp_size)

    def _recorded_ranges(self, request: FreeLookupLocks, session: Session, hit: int) -> Sequence[tuple[int, int, int]]:
        key, found = request.key, []
        if key.start < key.end:
            looked_up = session.key if self._behaviour.lookup_heeds_start else None
            start = key.start if looked_up is None else max(key.start, looked_up.start)
            found.append((start, key.end, hit))
        for start, end in request.extra_ranges:
            if start < end:
                found.append((start, end, end // self._core.chunk_size))
        return found

    def _release(
        self, key: IPCCacheServerKey, hashes: Sequence[bytes], first: int, hit: int | None, tp_size: int
    ) -> None:
        """Releases the chunks that begin at `first`, not beyond `hit`."""
        if not hashes:
            return
        self._check_layout(key)
        if hit is not None:
            last = min(hit, first + len(hashes))
            hashes = hashes[max(0, first) - first : max(0, last - first)]
        names = object_names(key, hashes)
        if names:
            self._core.objects.unlock_after_reading(names, self._readers(key, tp_size))

    def _check_layout(self, key: IPCCacheServerKey) -> None:
        known = self._core.layouts.find((key.model_name, key.world_size))
        if known is None and self._behaviour.release_needs_layout:
            raise RefusedError("the model's last registration has left")

    def end_session(self, request: EndSession) -> Void:
        """Forgets the session and marks its chunks as used; no lock is released by it."""
        core = self._core
        with core.lock:
            session = core.sessions.close(request.request_id)
            if session is None or session.key is None:
                return Void()
            hashes = session.chunk_hashes(core.chunk_size, 0, None, end_is_checked=False)
            self._check_layout(session.key)
            core.objects.touch(object_names(session.key, hashes))
        return Void()
