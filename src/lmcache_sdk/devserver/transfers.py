"""PREPARE and COMMIT, both directions.

On a server with a shared pool PREPARE hands out slots and COMMIT settles them; on an inline server the bytes travel in
the messages. COMMIT_STORE with bytes works on both. What is in flight is found by instance and key, without the request
id, so two transfers with an equal key on one instance are one to the server (PROTOCOL.md section 6). Tensors are copied
outside the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_sdk.devserver.core import Core, pending_name
from lmcache_sdk.devserver.objects import CachedObject, ObjectName
from lmcache_sdk.devserver.payloads import read_chunks, write_chunks
from lmcache_sdk.devserver.registry import Instance
from lmcache_sdk.devserver.sessions import RefusedError
from lmcache_sdk.layout import dtype_name
from lmcache_sdk.protocol import (
    CommitRetrieve,
    CommitStore,
    Committed,
    IPCCacheServerKey,
    PreparedRetrieve,
    PreparedStore,
    PrepareRetrieve,
    PrepareStore,
    Slot,
)
from lmcache_sdk.values import InstanceId

_MISS = PreparedRetrieve(success=False, data=b"", slots=None)


def _slot(entry: CachedObject) -> Slot:
    piece = entry.piece
    return Slot(offset=piece.offset, length=piece.nbytes, shape=piece.shape, dtype=dtype_name(piece.dtype))


class TransferHandlers:
    """The four operations of a transfer."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._shared = bool(core.pool.shm_name)

    def _instance(self, instance_id: InstanceId) -> Instance:
        found = self._core.instance(instance_id)
        if found.num_groups > 1:
            raise RefusedError("transfers of several groups are not imitated")
        return found

    # ---- store -------------------------------------------------------------------------------------------------------

    def prepare_store(self, request: PrepareStore) -> PreparedStore:
        """Reserves slots for the chunks that nobody has; an inline server reserves nothing yet."""
        core, key = self._core, request.key
        with core.lock:
            instance = self._instance(request.instance_id)
            if request.skipped_chunks:
                raise RefusedError("skipped_chunks belong to a registration of several groups")
            reply = PreparedStore(slots=None, chunk_indices=())
            if self._shared:
                reply = self._reserve(request, instance)
            core.open_session(key).storing = True
        return reply

    def _reserve(self, request: PrepareStore, instance: Instance) -> PreparedStore:
        names = self._core.names_of_session(request.key)
        reserved = self._core.objects.reserve_write(names, instance.layout)
        if reserved:
            self._core.pending_stores[pending_name(request.instance_id, request.key)] = list(reserved)
        indices = tuple(index for index, name in enumerate(names) if name in reserved)
        slots = tuple(_slot(reserved[names[index]]) for index in indices)
        return PreparedStore(slots=slots, chunk_indices=indices)

    def commit_store(self, request: CommitStore) -> Committed:
        """Publishes what was reserved, or takes the bytes that came along."""
        core, key = self._core, request.key
        with core.lock:
            instance = self._instance(request.instance_id)
            session = core.open_session(key)
            was_prepared, session.storing = session.storing, False
        if self._shared and not len(request.data):
            success = self._publish(request.instance_id, key)
        else:
            success = self._store_inline(request, instance)
        if success and was_prepared:
            with core.lock:
                core.names_of_session(key)  # for its log line; a key that it refuses is not answered after all
        return Committed(success=success)

    def _publish(self, instance_id: InstanceId, key: IPCCacheServerKey) -> bool:
        with self._core.lock:
            names = self._core.pending_stores.pop(pending_name(instance_id, key), None)
            self._core.objects.finish_write(names or ())
        return names is not None

    def _store_inline(self, request: CommitStore, instance: Instance) -> bool:
        core = self._core
        with core.lock:
            names = core.names_of_session(request.key)
        chunks = read_chunks(request.data, core.dialect.payload_form)
        if core.behaviour.inline_is_strict:
            self._check_chunks(chunks, len(names), instance)
        with core.lock:
            reserved = core.objects.reserve_write(names, instance.layout)
        written = self._copy(names, chunks, reserved)
        with core.lock:
            core.objects.finish_write(written)
        return len(written) == len(reserved)

    def _check_chunks(self, chunks: Sequence[torch.Tensor], count: int, instance: Instance) -> None:
        fits = all(chunk.shape == instance.layout.shape and chunk.dtype is instance.layout.dtype for chunk in chunks)
        if len(chunks) != count or not fits:
            raise RefusedError("the chunks do not fit the registration")

    def _copy(
        self, names: Sequence[ObjectName], chunks: Sequence[torch.Tensor], reserved: dict[ObjectName, CachedObject]
    ) -> list[ObjectName]:
        """Copies what has the right shape; another dtype is converted, without a word."""
        written = []
        for name, chunk in zip(names, chunks, strict=False):
            if name in reserved and chunk.shape == reserved[name].piece.shape:
                self._core.pool.tensor(reserved[name].piece).copy_(chunk)
                written.append(name)
        return written

    # ---- retrieve ----------------------------------------------------------------------------------------------------

    def prepare_retrieve(self, request: PrepareRetrieve) -> PreparedRetrieve:
        """Gives all chunks of the range or none; a miss unlocks those that were there."""
        core, key = self._core, request.key
        with core.lock:
            self._instance(request.instance_id)
            names = core.names_of_session(key)
            found = core.objects.read_locked(names)
            hit = bool(found) and all(name in found for name in names)
            if not hit:
                core.objects.unlock_after_reading(found)
            elif self._shared:
                core.pending_retrieves[pending_name(request.instance_id, key)] = list(names)
        reply = _MISS
        if hit and self._shared:
            reply = PreparedRetrieve(success=True, data=b"", slots=tuple(_slot(found[name]) for name in names))
        elif hit:
            reply = self._read_inline(names, found)
        with core.lock:
            core.open_session(key).retrieving = True
        return reply

    def _read_inline(self, names: Sequence[ObjectName], found: dict[ObjectName, CachedObject]) -> PreparedRetrieve:
        core = self._core
        try:
            chunks = [core.pool.tensor(found[name].piece) for name in names]
            data = write_chunks(chunks, core.dialect.payload_form)
        finally:
            with core.lock:
                core.objects.unlock_after_reading(names)
        return PreparedRetrieve(success=True, data=memoryview(data), slots=None)

    def commit_retrieve(self, request: CommitRetrieve) -> Committed:
        """Unlocks what a PREPARE_RETRIEVE of this key has handed out; true whether there was one or not."""
        core, key = self._core, request.key
        with core.lock:
            self._instance(request.instance_id)
            session = core.open_session(key)
            was_prepared, session.retrieving = session.retrieving, False
            names = core.pending_retrieves.pop(pending_name(request.instance_id, key), ())
            core.objects.unlock_after_reading(names)
            if was_prepared:
                core.names_of_session(key)
        return Committed(success=True)
