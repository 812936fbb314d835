"""The state of one server: pool, objects, sessions, jobs, registrations, and what several operations do with them.

Handlers run in several threads. Whatever reads or changes the state holds `lock`; copying tensors does not, as on the
real server, so that a large transfer keeps nobody else waiting.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import attrs

from lmcache_sdk.devserver.behaviours import Behaviour
from lmcache_sdk.devserver.engines import PlayedEngine
from lmcache_sdk.devserver.objects import ObjectName, ObjectStore
from lmcache_sdk.devserver.pool import Pool
from lmcache_sdk.devserver.registry import Instance, InstanceTable, LayoutTable
from lmcache_sdk.devserver.sessions import LookupJob, RefusedError, Session, SessionTable
from lmcache_sdk.devserver.settings import Settings
from lmcache_sdk.protocol import Dialect, IPCCacheServerKey
from lmcache_sdk.values import InstanceId, RequestId

MAX_SALT_CHARACTERS: Final = 128
MAX_RANKS: Final = 4096
MAX_CHUNKS: Final = 2**22
"""What a key claims is bounded before anything is made of it; the real server would compute with it for hours."""
_FIRST_ENGINE_ID: Final = 7
_SALT_REFUSES: Final = frozenset("@/\\\x00")

PendingName = tuple[object, ...]


@attrs.frozen(kw_only=True)
class Held:
    """What a server holds on behalf of its clients."""

    read_locks: int
    """Counted: two locks on one object are two."""
    write_reservations: int
    sessions: int
    jobs: int
    registrations: frozenset[int]
    pending_stores: int
    pending_retrieves: int


class Core:
    """The state."""

    def __init__(self, settings: Settings) -> None:
        self.lock: AbstractContextManager[bool] = threading.RLock()
        self.settings = settings
        self.dialect: Dialect = settings.dialect
        self.behaviour: Behaviour = settings.behaviour
        self.chunk_size: int = settings.chunk_size
        self.chunk_size_chosen = False
        self.server_id: str = str(uuid.uuid4())
        self.pool: Pool = Pool(settings.l1_size_bytes, settings.pool_name)
        self.objects: ObjectStore = ObjectStore(
            self.pool,
            settings.clock,
            read_ttl=settings.read_ttl,
            write_ttl=settings.write_ttl,
            staged=self.behaviour.writes_are_staged,
        )
        self.sessions: SessionTable = SessionTable(settings.clock, settings.session_ttl)
        self.jobs: dict[RequestId, LookupJob] = {}
        self.instances: InstanceTable = InstanceTable(settings.clock, reap=settings.reap, grace=settings.grace)
        self.layouts: LayoutTable = LayoutTable()
        self.engines: dict[int, PlayedEngine] = {}
        self.pending_stores: dict[PendingName, list[ObjectName]] = {}
        self.pending_retrieves: dict[PendingName, list[ObjectName]] = {}

    # ---- keys --------------------------------------------------------------------------------------------------------

    def check_key(self, key: IPCCacheServerKey) -> None:
        """Refuses a salt that no object may carry (the real server does so while it decodes) and absurd numbers."""
        if key.world_size > MAX_RANKS or key.end // self.chunk_size > MAX_CHUNKS:
            raise RefusedError("more ranks or chunks than this imitation counts")
        if len(key.cache_salt) > MAX_SALT_CHARACTERS or _SALT_REFUSES.intersection(key.cache_salt):
            raise RefusedError("cache_salt is too long or has a forbidden character")

    def open_session(self, key: IPCCacheServerKey) -> Session:
        """The session of the key's request."""
        return self.sessions.open(key.request_id, self.chunk_size)

    def names_of_session(self, key: IPCCacheServerKey) -> list[ObjectName]:
        """The objects of the key's range, by the hashes that its session has: those of the tokens that came first."""
        session = self.open_session(key)
        session.packed_tokens = key.token_ids.big_endian()
        if session.key is None and self.behaviour.store_names_session:
            session.key = every_rank(key)
        hashes = session.chunk_hashes(self.chunk_size, key.start, key.end, end_is_checked=self.behaviour.end_is_checked)
        if key.worker_id is None:
            raise RefusedError("a transfer needs a worker id")
        return object_names(key, hashes)

    # ---- instances ---------------------------------------------------------------------------------------------------

    def instance(self, instance_id: InstanceId) -> Instance:
        """A registered instance."""
        found = self.instances.find(instance_id)
        if found is None:
            raise RefusedError(f"instance {instance_id} is not registered")
        return found

    def remove_instance(self, instance_id: InstanceId) -> None:
        """Takes an instance out: what it reserved is published as it is, what it was reading is unlocked."""
        gone = self.instances.remove(instance_id)
        if gone is None:
            return
        for pending, finish in (
            (self.pending_stores, self.objects.finish_write),
            (self.pending_retrieves, self.objects.unlock_after_reading),
        ):
            for name in [name for name in pending if name[0] == instance_id]:
                finish(pending.pop(name))
        self.layouts.remove(gone.layout_name)

    def reap(self) -> None:
        """Removes the instances that have been silent for too long."""
        for instance_id in self.instances.silent():
            self.remove_instance(instance_id)

    # ---- upkeep ------------------------------------------------------------------------------------------------------

    def evict(self) -> int:
        """One look of the eviction: above the watermark a share of the objects goes; how many went."""
        if self.pool.used_nbytes < self.settings.eviction_watermark * self.pool.size:
            return 0
        known = self.objects.num_evictable_by_age
        return self.objects.evict(max(1, int(known * self.settings.eviction_ratio)) if known else 0)

    def play(self, engine: PlayedEngine) -> int:
        """Plays one more engine; the id under which /status shows it."""
        engine_id = max(self.engines, default=_FIRST_ENGINE_ID - 1) + 1
        self.engines[engine_id] = engine
        self.layouts.add(engine.layout_name, engine.stored_shape(self.behaviour, self.chunk_size))
        return engine_id

    def stop_playing(self, model_name: str) -> None:
        """Ends the playing of every engine of a model."""
        for engine_id in [found for found, engine in self.engines.items() if engine.model_name == model_name]:
            self.layouts.remove(self.engines.pop(engine_id).layout_name)

    def held(self) -> Held:
        """What clients hold now."""
        counts = self.objects.counts()
        return Held(
            read_locks=counts.read_locks,
            write_reservations=counts.write_locked,
            sessions=len(self.sessions),
            jobs=len(self.jobs),
            registrations=frozenset(instance_id for instance_id, _ in self.instances.items()),
            pending_stores=len(self.pending_stores),
            pending_retrieves=len(self.pending_retrieves),
        )

    def close(self) -> None:
        """Gives the memory back."""
        with self.lock:
            self.pool.close()


def every_rank(key: IPCCacheServerKey) -> IPCCacheServerKey:
    """The same key for all ranks."""
    fields = {name: getattr(key, name) for name in key.__struct_fields__}
    return IPCCacheServerKey(**{**fields, "worker_id": None})


def ranks(key: IPCCacheServerKey) -> Sequence[int]:
    """The worker ids that a key means."""
    return range(key.world_size) if key.worker_id is None else (key.worker_id,)


def object_names(key: IPCCacheServerKey, hashes: Iterable[bytes]) -> list[ObjectName]:
    """One name per chunk and rank, ranks innermost. A model name with "@" is refused as soon as there is one."""
    size = key.world_size
    kv_ranks = [size << 24 | worker << 16 | size << 8 | worker for worker in ranks(key)]
    names = [ObjectName(chunk, key.model_name, rank, key.cache_salt) for chunk in hashes for rank in kv_ranks]
    if names and "@" in key.model_name:
        raise RefusedError("model_name must not contain '@'")
    return names


def pending_name(instance_id: InstanceId, key: IPCCacheServerKey) -> PendingName:
    """What a transfer in flight is found by. The request id is not in it."""
    return (
        instance_id,
        key.model_name,
        key.world_size,
        key.worker_id,
        key.token_ids,
        key.start,
        key.end,
        key.cache_salt,
    )
