"""The straight-line client: what the server and the wire cost whatever a client does. A floor, not a library.

It sends the requests that the work needs and those that the issue on faults demands, in the best order that a client
can have, and nothing else: no checks, no deadlines, nothing that is ready for a failure. It is a lower bound, so it is
given what no user's client has: payloads are made before the clock starts, results go into memory that is warm, and no
tensor is made of a payload. As ours, it holds no lock when a call returns (it waits for COMMIT_RETRIEVE and for
FREE_LOOKUP_LOCKS), and leaves the answer to END_SESSION to the next call.

Where a goal against the official SDK is out of its reach too, the goal is out of reach (`figures.Line.held_by_floor`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import Any, Final
from uuid import uuid4

import msgspec
import torch
import zmq

from benchmarks.straight_memory import MappedPool, fresh
from benchmarks.straight_wire import Http, Wire
from lmcache_sdk.layout import (
    KVLayout,
    as_chunk,
    batches,
    dtype_name,
    max_chunks_per_payload,
    read_payload,
)
from lmcache_sdk.protocol import (
    CommitRetrieve,
    CommitStore,
    EndSession,
    FreeLookupLocks,
    IPCCacheServerKey,
    Lookup,
    PrepareRetrieve,
    PrepareStore,
    QueryPrefetchStatus,
    Register,
    Registered,
    Registration,
    Unregister,
    dialect_of_server,
    parse_version,
)
from lmcache_sdk.session import new_instance_id, private_model_name
from lmcache_sdk.values import InstanceId, RequestId, TokenIds
from tests.layout.frames import frame_of

BATCH: Final = 32 * 2**20
"""Bytes of one inline message, as in ours."""
AHEAD: Final = 2
"""Inline messages on their way, as in ours."""
_PAUSE: Final = 0.0001
_CANARY: Final = KVLayout(num_layers=1, planes=1, hidden_dim=1, dtype=torch.uint8)


class _Slot(msgspec.Struct):
    offset: int


class _Slots(msgspec.Struct):
    slots: list[_Slot] = []


class _Prepared(msgspec.Struct):
    """Of the answer to a PREPARE what a copy needs."""

    context: _Slots


class _Payload(msgspec.Struct):
    data: memoryview


_prepared: Final = msgspec.msgpack.Decoder(_Prepared)
_payload: Final = msgspec.msgpack.Decoder(_Payload)


class StraightContext:
    """See the module, and `side.Context`."""

    def __init__(self, url: str, http_url: str, model: str, *, fresh_results: bool) -> None:
        self._url = url
        self._model = model
        self._fresh_results = fresh_results
        self._frames: list[tuple[int, int, zmq.Frame]] = []
        self._frames_of: torch.Tensor | None = None
        self._http = Http(http_url)
        self._dialect = dialect_of_server(parse_version(self._http.get("/lmc_version"), "lmc_version"))
        self._http.get("/config")
        status = msgspec.json.decode(self._http.get("/status"))
        self._chunk: int = status["chunk_size"]
        entries = status["cache_context_meta"].values()
        self._layout = KVLayout.from_status(next(entry for entry in entries if entry["model_name"] == model))
        self._nbytes = self._layout.chunk_nbytes(self._chunk)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._idle: list[Wire] = []
        """One for each thread that was in a call at the same time."""
        self._pool: MappedPool | None = None
        with self._wire() as wire:
            self._instance_id, registered = self._register(wire, private_model_name(), self._layout)
            reply = msgspec.msgpack.decode(wire.answer(registered)[0], type=Registered)
            if reply.shm_name:
                self._pool = MappedPool(reply, self._layout, self._chunk)
                self._prove(wire, self._pool)

    @contextmanager
    def _wire(self) -> Iterator[Wire]:
        try:
            wire = self._idle.pop()
        except IndexError:
            wire = Wire(self._context, self._url, self._dialect)
        yield wire
        self._idle.append(wire)

    def _register(self, wire: Wire, name: str, layout: KVLayout) -> tuple[InstanceId, bytes]:
        registration = Registration(
            instance_id=new_instance_id(),
            model_name=name,
            world_size=1,
            block_size=layout.tokens_per_block,
            num_layers=layout.num_layers,
            hidden_dim_size=layout.hidden_dim,
            dtype_str=dtype_name(layout.dtype),
            use_mla=layout.one_plane,
            num_physical_slots=layout.slots_per_chunk(self._chunk),
        )
        return registration.instance_id, wire.send(Register(registration=registration))

    def _prove(self, wire: Wire, pool: MappedPool) -> None:
        """The canary: bytes that the server writes must show up in the segment that is mapped here."""
        name, written = private_model_name(), os.urandom(self._chunk)
        kv = torch.frombuffer(bytearray(written), dtype=torch.uint8).view(1, 1, self._chunk, 1)
        ids, request_id = TokenIds(int.from_bytes(os.urandom(3), "big") for _ in range(self._chunk)), _request_id()
        key = self._key(ids, request_id, model=name)
        instance_id, _ = self._register(wire, name, _CANARY)
        frame = frame_of(kv, _CANARY, self._chunk, 0, 1, self._dialect.payload_form)
        wire.call(CommitStore(key=key, instance_id=instance_id, data=frame, framed=True))
        assert self._find(wire, self._key(ids, request_id, None, model=name)) == 1, "the canary was not found"
        (offset,) = _offsets(wire.call(PrepareRetrieve(key=key, instance_id=instance_id)))
        assert pool.bytes_at(offset, self._chunk) == written, "another pool"
        wire.send(CommitRetrieve(key=key, instance_id=instance_id))
        wire.call(EndSession(request_id=request_id))
        wire.send(Unregister(instance_id=instance_id))

    # ---- the calls --------------------------------------------------------------------------------------------------

    def expect(self, tokens: list[int], kv: torch.Tensor | None = None) -> None:
        """Makes the payloads of what will be stored."""
        if kv is not None and self._pool is None and self._frames_of is not kv:
            form, limit = self._dialect.payload_form, max_chunks_per_payload(self._layout, self._chunk) * self._nbytes
            self._frames, self._frames_of = [], kv
            for first, count in batches(len(tokens) // self._chunk, self._nbytes, min(BATCH, limit)):
                frame = frame_of(kv, self._layout, self._chunk, first, count, form)
                self._frames.append((first, count, zmq.Frame(frame, copy=True)))

    def _key(
        self,
        ids: TokenIds,
        request_id: RequestId,
        worker_id: int | None = 0,
        *,
        model: str = "",
        first: int = 0,
        count: int | None = None,
    ) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=model or self._model,
            world_size=1,
            worker_id=worker_id,
            token_ids=ids,
            start=first * self._chunk,
            end=len(ids) if count is None else (first + count) * self._chunk,
            request_id=request_id,
        )

    def _find(self, wire: Wire, key: IPCCacheServerKey) -> int:
        """LOOKUP and its question in one go; how many chunks."""
        wire.send(Lookup(key=key))
        while not (found := wire.call(QueryPrefetchStatus(request_id=key.request_id))):
            time.sleep(_PAUSE)
        chunks: int = msgspec.msgpack.decode(found[0])
        return chunks

    def lookup(self, tokens: list[int]) -> int:
        """LOOKUP and QUERY_PREFETCH_STATUS, FREE_LOOKUP_LOCKS and END_SESSION."""
        ids, request_id = TokenIds(tokens), _request_id()
        key = self._key(ids, request_id, None)
        with self._wire() as wire:
            chunks = self._find(wire, key)
            if chunks:
                wire.call(FreeLookupLocks(key=self._key(ids, request_id, None, count=chunks)))
            wire.send(EndSession(request_id=request_id))
        return chunks * self._chunk

    def retrieve(self, tokens: list[int], out: torch.Tensor | None) -> object:
        """A tensor, or the payloads as they came; of a miss None, and a status that was asked for after it."""
        ids, request_id = TokenIds(tokens), _request_id()
        with self._wire() as wire:
            chunks = self._find(wire, self._key(ids, request_id, None))
            if not chunks:
                wire.send(EndSession(request_id=request_id))
                self._http.get("/status")
                return None
            if self._pool is None:
                received = self._received(wire, ids, request_id, chunks)
                wire.send(EndSession(request_id=request_id))
                return received
            key = self._key(ids, request_id, count=chunks)
            offsets = _offsets(wire.call(PrepareRetrieve(key=key, instance_id=self._instance_id)))
            result = self._result(wire, chunks) if out is None else out
            for slots, place in self._pool.pairs(offsets, result, write=False):
                place.copy_(slots)
            wire.call(CommitRetrieve(key=key, instance_id=self._instance_id))
            wire.send(EndSession(request_id=request_id))
        return result

    def _received(self, wire: Wire, ids: TokenIds, request_id: RequestId, chunks: int) -> list[tuple[int, memoryview]]:
        """The ranges that ours asks for, as many ahead."""
        asked: deque[tuple[int, bytes]] = deque()
        received: list[tuple[int, memoryview]] = []
        for first, count in batches(chunks, self._nbytes, BATCH):
            if len(asked) == AHEAD:
                received.append((asked[0][0], wire.bulk_answer(asked.popleft()[1])))
            key = self._key(ids, request_id, first=first, count=count)
            asked.append((count, wire.send(PrepareRetrieve(key=key, instance_id=self._instance_id))))
        received.extend((count, wire.bulk_answer(uid)) for count, uid in asked)
        return received

    def opened(self, found: Any) -> torch.Tensor | None:
        """The payloads as a tensor, which the floor does not pay for."""
        if not isinstance(found, list):
            return found  # type: ignore[no-any-return]  # a tensor or None
        parts = []
        for count, frame in found:
            data = _payload.decode(frame).data
            form = self._dialect.payload_form
            parts.extend(read_payload(data, form, num_tensors=count, max_nbytes=len(data)))
        return torch.cat([as_chunk(part, self._chunk) for part in parts], dim=2)

    def store(self, kv: torch.Tensor, tokens: list[int]) -> bool:
        """Everything prepared, written and committed at once; inline the payloads that were made beforehand."""
        ids, request_id = TokenIds(tokens), _request_id()
        with self._wire() as wire:
            if self._pool is None:
                stored = self._sent(wire, ids, request_id)
            else:
                key = self._key(ids, request_id)
                offsets = _offsets(wire.call(PrepareStore(key=key, instance_id=self._instance_id)))
                assert len(offsets) == len(ids) // self._chunk, "the server has no slots for it"
                for slots, place in self._pool.pairs(offsets, kv, write=True):
                    slots.copy_(place)
                (answer,) = wire.call(CommitStore(key=key, instance_id=self._instance_id))
                stored = msgspec.msgpack.decode(answer, type=bool)
            wire.send(EndSession(request_id=request_id))
        return stored

    def _sent(self, wire: Wire, ids: TokenIds, request_id: RequestId) -> bool:
        """A server without a pool answers true also when it had no room, and for what was cached already (PROTOCOL.md
        section 6): a LOOKUP before tells what was there, one behind it what is. No client that says the truth is
        spared them.
        """
        sent: deque[bytes] = deque()
        whole = self._key(ids, request_id, None)
        if found := self._find(wire, whole):
            wire.call(FreeLookupLocks(key=self._key(ids, request_id, None, count=found)))
        for first, count, frame in self._frames:
            if len(sent) == AHEAD:
                wire.answer(sent.popleft())
            key = self._key(ids, request_id, first=first, count=count)
            sent.append(wire.send(CommitStore(key=key, instance_id=self._instance_id), frame))
        for uid in sent:
            wire.answer(uid)
        chunks = self._find(wire, whole)
        wire.call(FreeLookupLocks(key=whole))
        return chunks * self._chunk == len(ids)

    def _result(self, wire: Wire, chunks: int) -> torch.Tensor:
        planes, layers, size, hidden = self._layout.chunk_shape(self._chunk)
        shape = (planes, layers, chunks * size, hidden)
        if self._fresh_results:
            return fresh(shape, self._layout.dtype)
        if wire.warm is None or wire.warm.shape != shape:
            wire.warm = fresh(shape, self._layout.dtype)
        return wire.warm

    def view(self, tokens: list[int]) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Nobody asks for it: a view of ours is held against its own round trips."""
        raise NotImplementedError("not offered")

    def close(self) -> None:
        """Leaves nothing on the server."""
        for wire in self._idle:
            wire.call(EndSession(request_id=_request_id()))  # answered behind those that nobody has waited for
        with self._wire() as wire:
            wire.call(Unregister(instance_id=self._instance_id))
        for wire in self._idle:
            wire.close()
        self._http.close()
        self._context.term()
        if self._pool is not None:
            self._pool.close()


def _request_id() -> RequestId:
    return RequestId(uuid4().hex)


def _offsets(answer: Sequence[bytes]) -> list[int]:
    return [slot.offset for slot in _prepared.decode(answer[0]).context.slots]


class Straight:
    """See `side.Side`."""

    def connect(self, url: str, http_url: str, model: str, recycle_bytes: int | None) -> StraightContext:
        """Connects; with `recycle_bytes` 0 every result is in fresh memory, otherwise all in the same."""
        return StraightContext(url, http_url, model, fresh_results=recycle_bytes == 0)

    def version(self) -> str:
        """Of the library whose codec it uses."""
        return version("lmcache-sdk")


SIDE: Final = Straight()
