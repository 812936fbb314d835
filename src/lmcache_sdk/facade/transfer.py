"""Where a lease meets a geometry: the copies of retrieve and store, and nothing else that touches both siblings.

Takes validated tokens, an open session and what is known of the layout. Everything the server hands out is checked
against the pool, the count that was asked for and the layout before a byte of it is used; what does not fit is a
`RemoteProtocolError`, followed by the clean-up of the lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import torch

from lmcache_sdk.errors import LeaseExpiredError, RemoteProtocolError
from lmcache_sdk.layout import (
    KVLayout,
    as_chunk,
    batches,
    check_disjoint,
    copied,
    layout_from_object,
    max_chunks_per_payload,
    new_result,
    pack_chunk,
    read_payload,
    slot_view,
    unpack,
    write_payload,
)
from lmcache_sdk.protocol import PayloadForm, PreparedRetrieve, PreparedStore, Slot
from lmcache_sdk.session import Deadline, Identity, Operation, ReadLease, Reservation, Session
from lmcache_sdk.values import TokenIds

_INLINE_BATCH: Final = 64 * 2**20
"""Bytes of one inline message: bounds what both sides hold twice."""
_STORE_BATCH: Final = 64 * 2**20
"""Bytes of slots reserved at once: what a crash in mid-store can block for the write TTL."""


@attrs.frozen
class Endpoint:
    """Everything a transfer needs besides its arguments."""

    session: Session
    identity: Identity
    read_ttl: float | None
    write_ttl: float | None
    pool_nbytes: int
    """Bytes of the server's first-tier memory; 0 when it does not say."""

    @property
    def pool(self) -> memoryview | None:
        """The server's pool; None on an inline server."""
        return None if self.session.pool is None else self.session.pool.buffer

    @property
    def payload_form(self) -> PayloadForm:
        """How tensors travel inline."""
        return self.session.dialect.payload_form


def lookup_chunks(
    endpoint: Endpoint,
    tokens: TokenIds,
    cache_salt: str,
    deadline: Deadline,
    *,
    step: str = "lookup",
    exclusive: bool = False,
) -> int:
    """How many leading chunks of whole-chunk `tokens` are cached; leaves no lock behind.

    `exclusive` waits for other calls on the same tokens, and for what earlier ones still owe.
    """
    with endpoint.session.operation(
        step, endpoint.identity, tokens, cache_salt, deadline, exclusive=exclusive
    ) as operation:
        return ReadLease(operation, endpoint.read_ttl, shm=endpoint.pool is not None).acquire()


def retrieve_prefix(
    endpoint: Endpoint,
    layout: KVLayout | None,
    tokens: TokenIds,
    cache_salt: str,
    deadline: Deadline,
    *,
    step: str = "retrieve",
) -> torch.Tensor | None:
    """The cached prefix `[kv, layer, token, hidden]` on the CPU, or None when nothing is cached."""
    try:
        return _retrieve_once(endpoint, layout, tokens, cache_salt, deadline, step)
    except LeaseExpiredError:
        # cleared, or suspended for longer than the locks live, between lookup and copy: the pair is done once more
        deadline.check(f"{step}: a second try after the locks were lost")
        return _retrieve_once(endpoint, layout, tokens, cache_salt, deadline, step)


def _retrieve_once(
    endpoint: Endpoint, layout: KVLayout | None, tokens: TokenIds, cache_salt: str, deadline: Deadline, step: str
) -> torch.Tensor | None:
    with endpoint.session.operation(step, endpoint.identity, tokens, cache_salt, deadline, exclusive=True) as operation:
        lease = ReadLease(operation, endpoint.read_ttl, shm=endpoint.pool is not None)
        hit = lease.acquire()
        return _read(endpoint, lease, layout, hit) if hit else None


def _read(endpoint: Endpoint, lease: ReadLease, layout: KVLayout | None, hit: int) -> torch.Tensor:
    """Copies the `hit` chunks of a lease into one tensor, batch after batch."""
    result: torch.Tensor | None = None
    chunk_size = endpoint.identity.chunk_size
    first = 0
    while first < hit:
        count = min(hit - first, _read_batch(endpoint, layout))
        entry = lease.prepare(count)
        chunks = _received_chunks(endpoint, lease.received(entry), count)
        learned = _agreed_layout(chunks, layout, chunk_size)
        if result is None:
            result = new_result(learned.chunk_shape(chunk_size), hit, learned.dtype)
        lease.check_alive()
        unpack(chunks, result, first)
        del chunks
        lease.check_alive()
        lease.commit(entry)
        layout, first = learned, first + count
    assert result is not None
    return result


def _read_batch(endpoint: Endpoint, layout: KVLayout | None) -> int:
    """Chunks of one PREPARE_RETRIEVE: all of them from slots; inline as many as a message may hold."""
    if endpoint.pool is not None:
        return 2**31
    if layout is None:
        return 1  # the first object tells its size
    return max(1, _INLINE_BATCH // layout.chunk_nbytes(endpoint.identity.chunk_size))


def _received_chunks(endpoint: Endpoint, prepared: PreparedRetrieve, count: int) -> list[torch.Tensor]:
    """The chunks of a reply as tensors `[kv, layer, token, hidden]` on the pool or on the message."""
    chunk_size = endpoint.identity.chunk_size
    if endpoint.pool is None:
        if prepared.slots is not None:
            raise RemoteProtocolError(
                "prepare_retrieve: slots from a server without a pool", path="prepare_retrieve.context"
            )
        payload = memoryview(prepared.data)
        tensors = read_payload(payload, endpoint.payload_form, num_tensors=count, max_nbytes=len(payload))
    else:
        slots = prepared.slots
        if slots is None or len(slots) != count:
            found = "no slots" if slots is None else f"{len(slots)} slots"
            raise RemoteProtocolError(
                f"prepare_retrieve.context.slots: {found} for {count} chunks", path="prepare_retrieve.context.slots"
            )
        check_disjoint(slots, "prepare_retrieve.context.slots")
        return [
            _on_pool(endpoint.pool, slot, chunk_size, f"prepare_retrieve.context.slots[{index}]")
            for index, slot in enumerate(slots)
        ]
    return [as_chunk(tensor, chunk_size, f"prepare_retrieve.data[{index}]") for index, tensor in enumerate(tensors)]


def _on_pool(pool: memoryview, slot: Slot, chunk_size: int, path: str) -> torch.Tensor:
    """A slot as `[kv, layer, token, hidden]` on the pool."""
    view = slot_view(pool, offset=slot.offset, length=slot.length, shape=slot.shape, dtype_name=slot.dtype, path=path)
    return as_chunk(view, chunk_size, path)


def _agreed_layout(chunks: Sequence[torch.Tensor], layout: KVLayout | None, chunk_size: int) -> KVLayout:
    """The layout that every chunk has; a chunk that differs from the engine's, or from the first, is refused."""
    expected = layout or layout_from_object(tuple(chunks[0].shape), chunks[0].dtype, chunk_size)
    shape = expected.chunk_shape(chunk_size)
    for index, chunk in enumerate(chunks):
        if tuple(chunk.shape) != shape or chunk.dtype != expected.dtype:
            raise RemoteProtocolError(
                f"prepare_retrieve: chunk {index} is {list(chunk.shape)} {chunk.dtype}, but the model's cache holds "
                f"{list(shape)} {expected.dtype} [kv, layer, token, hidden]; another client may have stored it with a "
                "wrong layout",
                path="prepare_retrieve",
            )
    return expected


# ---- store ----------------------------------------------------------------------------------------------------------


class KVSlotWriter:
    """A `SlotWriter`: copies a range of chunks of one tensor into slots of the pool."""

    def __init__(
        self, kv: torch.Tensor, first_chunk: int, num_chunks: int, layout: KVLayout, chunk_size: int, pool: memoryview
    ) -> None:
        self._kv = kv
        self._first_chunk = first_chunk
        self._num_chunks = num_chunks
        self._layout = layout
        self._chunk_size = chunk_size
        self._pool = pool

    def check(self, prepared: PreparedStore) -> None:
        """Raises RemoteProtocolError unless every slot has the bytes, the dtype and the shape of a chunk."""
        slots = prepared.slots or ()
        check_disjoint(slots, "prepare_store.context.slots")
        expected = self._layout.chunk_shape(self._chunk_size)
        for index, slot in enumerate(slots):
            where = f"prepare_store.context.slots[{index}]"
            view = _on_pool(self._pool, slot, self._chunk_size, where)
            if tuple(view.shape) != expected or view.dtype != self._layout.dtype:
                found, wanted = f"{list(view.shape)} {view.dtype}", f"{list(expected)} {self._layout.dtype}"
                raise RemoteProtocolError(f"{where}: {found}, expected {wanted}", path=where)

    def write(self, prepared: PreparedStore) -> None:
        """Fills every slot."""
        for slot, index in zip(prepared.slots or (), prepared.chunk_indices, strict=True):
            out = _on_pool(self._pool, slot, self._chunk_size, "prepare_store.context.slots")
            pack_chunk(self._kv, self._first_chunk + index, self._chunk_size, out)

    def snapshot(self) -> KVSlotWriter:
        """The same range of a copy that nobody else has."""
        size = self._chunk_size
        start, end = self._first_chunk * size, (self._first_chunk + self._num_chunks) * size
        copy = copied(self._kv[:, :, start:end])
        return KVSlotWriter(copy, 0, self._num_chunks, self._layout, size, self._pool)


def write_range(
    endpoint: Endpoint,
    operation: Operation,
    layout: KVLayout,
    kv: torch.Tensor,
    first_chunk: int,
    num_chunks: int,
    *,
    inline: bool = False,
) -> Iterator[tuple[int, ...]]:
    """Stores chunks [first, first + num) of `kv`, batch after batch; yields the chunks that each batch published.

    `inline` sends the bytes in the message even to a server with a pool, which every release takes (PROTOCOL.md
    section 6).
    """
    chunk_size = endpoint.identity.chunk_size
    nbytes = layout.chunk_nbytes(chunk_size)
    pool = None if inline else endpoint.pool
    if pool is not None:
        limit = _STORE_BATCH
    else:
        limit = min(_INLINE_BATCH, max_chunks_per_payload(layout, chunk_size) * nbytes)
    for offset, count in batches(num_chunks, nbytes, limit):
        first = first_chunk + offset
        reservation = Reservation(operation, first, count, endpoint.write_ttl)
        if pool is None:
            reservation.store_inline(write_payload(kv, layout, chunk_size, first, count, endpoint.payload_form))
        else:
            reservation.store_slots(KVSlotWriter(kv, first, count, layout, chunk_size, pool))
        yield reservation.written
