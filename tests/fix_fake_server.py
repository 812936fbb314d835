"""FakeServer: a scripted server in memory. It speaks real frames of any dialect and counts what it holds.

What it takes and gives back follows PROTOCOL.md sections 5 to 8: a LOOKUP locks the hit prefix, PREPARE and COMMIT of
both directions and FREE change locks as the release does, every request of a session opens it and END forgets it,
UNREGISTER publishes what is reserved. So a test can end with one question: `server.held() == NOTHING`, that is, no
lock, reservation, job or session is left, and nobody else's lock was given back.

Without a script every request is answered as a healthy server does. `server.on(Lookup, silence, late(3.0))` says what
happens to the next LOOKUPs; actions are functions of a `Turn`, and `fix_faults` has them. Time is not known here: a
reply has a delay, and whoever moves the frames (`fix_faults.MemoryTransport`, `session.ports.MessagePort`) keeps it. No
tensor is known either: chunks are bytes, and `pack` and `unpack` say how they stand in an inline payload.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import attrs

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.values import InstanceId, RequestId

Q = TypeVar("Q", bound=p.Request[Any])
ChunkName = tuple[str, str, bytes]
PendingName = tuple[object, ...]

ITEMSIZES: Final = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
PAGE: Final = 4096


@attrs.frozen
class Held:
    """What a server holds on behalf of its clients, and what it lost through them."""

    read_locks: int = 0
    reservations: int = 0
    jobs: int = 0
    sessions: int = 0
    stolen: int = 0
    """Locks of other readers that a FREE gave back."""
    unwritten: int = 0
    """Reserved chunks that UNREGISTER published."""


NOTHING: Final = Held()


@attrs.frozen
class Chunk:
    """One cached chunk: its bytes, or where they are in the pool, and the shape that it was stored with."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes = b""
    slot: p.Slot | None = None


@attrs.frozen
class Delivery:
    """One message to the client, `delay` seconds after its request."""

    frames: list[bytes]
    delay: float = 0.0


@attrs.frozen
class Turn:
    """One request, at the moment its script decides."""

    server: FakeServer
    received: p.ReceivedRequest

    def handle(self) -> p.Reply | None:
        """Does what was asked; None when the server says nothing to it."""
        return self.server.handle(self.received.request)

    def frames(self, reply: p.Reply | None) -> list[bytes]:
        """The frames of a reply."""
        if reply is None:
            return []
        return [bytes(frame) for frame in p.encode_reply(self.server.dialect, self.received, reply)]


Action = Callable[[Turn], list[Delivery]]


def answer(turn: Turn) -> list[Delivery]:
    """What happens without a script."""
    frames = turn.frames(turn.handle())
    return [Delivery(frames)] if frames else []


class FakeServer:
    """See the module. `pool` makes it a shared-memory server whose slots lie in that buffer."""

    def __init__(
        self,
        release: str = "0.5.6",
        *,
        chunk_size: int = 4,
        pool: memoryview | None = None,
        shm_name: str = "",
        pack: Callable[[list[Chunk]], bytes] | None = None,
        unpack: Callable[[memoryview, int], list[bytes]] | None = None,
    ) -> None:
        self.dialect = p.dialect_named(release)
        self.chunk_size = chunk_size
        self.pool = pool
        self.shm_name = shm_name
        self.changed = threading.Condition()
        """Held while a request is taken, notified after each."""
        self.requests: list[p.Request[Any]] = []
        self.malformed: list[str] = []
        self.objects: dict[ChunkName, Chunk] = {}
        self.read_locks: Counter[ChunkName] = Counter()
        self.instances: dict[InstanceId, p.Registration] = {}
        self.sessions: dict[RequestId, int | None] = {}
        """Live sessions, and the hit that each has recorded."""
        self.patience = 0.0
        """Seconds in which last words may come, when there is a network in between."""
        self.full = False
        """Nothing can be allocated."""
        self._pack = pack or _join
        self._unpack = unpack or _split
        self._jobs: dict[RequestId, list[ChunkName]] = {}
        self._reading: dict[PendingName, list[ChunkName]] = {}
        self._writing: dict[PendingName, dict[ChunkName, Chunk]] = {}
        self._script: dict[type[p.Request[Any]], deque[Action]] = defaultdict(deque)
        self._always: dict[type[p.Request[Any]], Action] = {}
        self._stolen = 0
        self._unwritten = 0
        self._next_slot = 0

    # ---- what tests do -----------------------------------------------------------------------------------------------

    def on(self, kind: type[p.Request[Any]], *actions: Action) -> None:
        """Says what happens to the next requests of a kind, one action each."""
        self._script[kind].extend(actions)

    def always(self, kind: type[p.Request[Any]], action: Action) -> None:
        """Says what happens to every request of a kind that has no other action."""
        self._always[kind] = action

    def cache(
        self, tokens: Sequence[int], chunks: Iterable[Chunk], *, model: str = "m", salt: str = "", first: int = 0
    ) -> None:
        """Puts chunks of a token sequence into the cache, as another client would have."""
        for index, chunk in enumerate(chunks, first):
            self.objects[chunk_name(model, salt, tokens[: (index + 1) * self.chunk_size])] = self._placed(chunk)

    def held(self) -> Held:
        """What it holds. Clients do not wait for the answers to their last words, so it listens for them first."""
        with self.changed:
            self.changed.wait_for(lambda: not (self.sessions or self.read_locks.total()), self.patience)
            return Held(
                read_locks=self.read_locks.total(),
                reservations=sum(map(len, self._writing.values())),
                jobs=len(self._jobs),
                sessions=len(self.sessions),
                stolen=self._stolen,
                unwritten=self._unwritten,
            )

    def asked(self, kind: type[Q]) -> list[Q]:
        """The requests of a kind that came."""
        return [request for request in self.requests if isinstance(request, kind)]

    def names(self) -> list[str]:
        """The kinds of all requests that came, in order."""
        return [type(request).__name__ for request in self.requests]

    def wait_until(self, happened: Callable[[], bool], seconds: float = 5.0) -> None:
        """Waits until requests have made it true (real sockets only)."""
        with self.changed:
            assert self.changed.wait_for(happened, seconds), f"did not happen; requests: {self.names()}"

    # ---- the wire ----------------------------------------------------------------------------------------------------

    def take(self, frames: Sequence[bytes]) -> list[Delivery]:
        """Takes one message; gives what goes back."""
        with self.changed:
            try:
                received = p.decode_request(self.dialect, frames)
            except RemoteProtocolError as error:
                self.malformed.append(str(error))
                return []
            kind = type(received.request)
            self.requests.append(received.request)
            script = self._script[kind]
            action = script.popleft() if script else self._always.get(kind, answer)
            deliveries = action(Turn(self, received))
            self.changed.notify_all()
            return deliveries

    def handle(self, request: p.Request[Any]) -> p.Reply | None:
        """Does what a request asks; None when the release would not answer."""
        match request:
            case p.Lookup():
                return self._lookup(request.key)
            case p.QueryPrefetchStatus() | p.WaitPrefetchStatus():
                return self._query(request.request_id)
            case p.FreeLookupLocks():
                return self._free(request.key)
            case p.EndSession():
                self.sessions.pop(request.request_id, None)
                return p.Void()
            case p.Register():
                self.instances.setdefault(request.registration.instance_id, request.registration)
                return p.Registered(self.shm_name, 0 if self.pool is None else self.pool.nbytes)
            case p.Unregister():
                return self._unregister(request.instance_id)
            case p.PrepareStore() | p.CommitStore() | p.PrepareRetrieve() | p.CommitRetrieve():
                return self._transfer(request)
            case _:
                return self._small_talk(request)

    # ---- lookups -----------------------------------------------------------------------------------------------------

    def _lookup(self, key: p.IPCCacheServerKey) -> p.Reply:
        hit: list[ChunkName] = []
        for name in self._names(key, 0, len(key.token_ids)):
            if name not in self.objects:
                break
            hit.append(name)
        self.read_locks.update(hit)
        self._jobs[key.request_id] = hit
        self.sessions[key.request_id] = None
        return p.Void()

    def _query(self, request_id: RequestId) -> p.Reply:
        hit = self._jobs.pop(request_id, None)
        if hit is not None and (request_id in self.sessions or self.dialect.free_clips_to_hit):
            self.sessions[request_id] = len(hit)
        return p.PrefetchStatus(ready_chunks=0 if hit is None else len(hit))

    def _free(self, key: p.IPCCacheServerKey) -> p.Reply:
        names = self._names(key, key.start, key.end)
        recorded = self.sessions.get(key.request_id)
        if self.dialect.free_needs_live_session:
            job = self._jobs.pop(key.request_id, None)
            if key.request_id not in self.sessions:
                names = []
            elif job is not None:
                names = [name for name in names if name in job]
            else:
                names = names[: max(0, (recorded or 0) - key.start // self.chunk_size)]
        elif self.dialect.free_clips_to_hit:
            self.sessions.setdefault(key.request_id, None)
            if recorded is not None:
                names = names[: max(0, recorded - key.start // self.chunk_size)]
        for name in names:
            self._unlock(name)
        return p.Void()

    def _unlock(self, name: ChunkName) -> None:
        if self.read_locks[name]:
            self.read_locks[name] -= 1
        else:
            self._stolen += 1

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def _transfer(
        self, request: p.PrepareStore | p.CommitStore | p.PrepareRetrieve | p.CommitRetrieve
    ) -> p.Reply | None:
        registration = self.instances.get(request.instance_id)
        key = request.key
        if registration is None or key.worker_id is None:
            return None
        self.sessions.setdefault(key.request_id, None)
        names = self._names(key, key.start, key.end)
        pending = (request.instance_id, key.model_name, key.token_ids, key.start, key.end, key.cache_salt)
        if isinstance(request, p.PrepareStore):
            return self._prepare_store(names, pending, registration)
        if isinstance(request, p.CommitStore):
            return self._commit_store(names, pending, registration, memoryview(request.data))
        if isinstance(request, p.PrepareRetrieve):
            return self._prepare_retrieve(names, pending)
        for name in self._reading.pop(pending, []):
            self._unlock(name)
        return p.Committed(success=True)

    def _prepare_store(self, names: list[ChunkName], pending: PendingName, registration: p.Registration) -> p.Reply:
        if self.pool is None:
            return p.PreparedStore(slots=None, chunk_indices=())
        new = {} if self.full else {i: name for i, name in enumerate(names) if self._is_free(name)}
        made = {name: self._placed(Chunk(*self._shape(registration))) for name in new.values()}
        if made:
            self._writing[pending] = made
        slots = tuple(chunk.slot for chunk in made.values() if chunk.slot is not None)
        return p.PreparedStore(slots=slots, chunk_indices=tuple(new))

    def _commit_store(
        self, names: list[ChunkName], pending: PendingName, registration: p.Registration, data: memoryview
    ) -> p.Reply:
        if not data:
            made = self._writing.pop(pending, {})
            self.objects.update(made)
            return p.Committed(success=bool(made))
        for name, piece in zip(names, self._unpack(data, len(names)), strict=True):
            if self._is_free(name) and not self.full:
                self.objects[name] = self._placed(Chunk(*self._shape(registration), data=piece))
        return p.Committed(success=True)

    def _prepare_retrieve(self, names: list[ChunkName], pending: PendingName) -> p.Reply:
        if not all(name in self.objects and self.read_locks[name] for name in names):
            for name in names:
                self.read_locks[name] = max(0, self.read_locks[name] - 1)
            return p.PreparedRetrieve(success=False, data=b"", slots=None)
        chunks = [self.objects[name] for name in names]
        if self.pool is None:
            for name in names:
                self._unlock(name)
            return p.PreparedRetrieve(success=True, data=self._pack(chunks), slots=None)
        self._reading[pending] = names
        return p.PreparedRetrieve(
            success=True, data=b"", slots=tuple(chunk.slot for chunk in chunks if chunk.slot is not None)
        )

    def _unregister(self, instance_id: InstanceId) -> p.Reply:
        self.instances.pop(instance_id, None)
        for pending in [pending for pending in self._writing if pending[0] == instance_id]:
            made = self._writing.pop(pending)
            self._unwritten += len(made)
            self.objects.update(made)
        for pending in [pending for pending in self._reading if pending[0] == instance_id]:
            for name in self._reading.pop(pending):
                self._unlock(name)
        return p.Void()

    def _small_talk(self, request: p.Request[Any]) -> p.Reply | None:
        match request:
            case p.Clear():
                self.objects.clear()
                return p.Void()
            case p.GetChunkSize() | p.NegotiateChunkSize():
                return p.ChunkSize(self.chunk_size)
            case p.Ping():
                return p.Pong(alive=True)
            case p.Noop():
                return p.NoopAnswer("OK")
            case p.GetExperimental():
                return p.Experimental(())
            case _:
                return None

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _is_free(self, name: ChunkName) -> bool:
        return name not in self.objects and not any(name in made for made in self._writing.values())

    def _names(self, key: p.IPCCacheServerKey, start: int, end: int) -> list[ChunkName]:
        tokens, size = key.token_ids.to_list(), self.chunk_size
        return [
            chunk_name(key.model_name, key.cache_salt, tokens[: (index + 1) * size])
            for index in range(start // size, end // size)
        ]

    def _shape(self, registration: p.Registration) -> tuple[tuple[int, ...], str]:
        rows = registration.num_physical_slots or self.chunk_size
        shape = (registration.num_layers, rows, registration.hidden_dim_size)
        return (shape if registration.use_mla else (2, *shape)), registration.dtype_str

    def _placed(self, chunk: Chunk) -> Chunk:
        """The chunk with a place in the pool, where its bytes go; itself on an inline server."""
        if self.pool is None:
            return chunk
        nbytes = ITEMSIZES[chunk.dtype]
        for size in chunk.shape:
            nbytes *= size
        offset = self._next_slot
        self._next_slot += -(-nbytes // PAGE) * PAGE
        self.pool[offset : offset + len(chunk.data)] = chunk.data
        return attrs.evolve(chunk, data=b"", slot=p.Slot(offset, nbytes, chunk.shape, chunk.dtype))


def chunk_name(model: str, salt: str, prefix: Sequence[int]) -> ChunkName:
    """What a chunk is found by: everything up to its end."""
    return (model, salt, b"".join(token.to_bytes(4, "big") for token in prefix))


def _join(chunks: list[Chunk]) -> bytes:
    return b"".join(chunk.data for chunk in chunks)


def _split(data: memoryview, count: int) -> list[bytes]:
    """A payload of equal chunks side by side."""
    size = len(data) // count
    return [bytes(data[index * size : (index + 1) * size]) for index in range(count)]
