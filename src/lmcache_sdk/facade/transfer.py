"""Where a lease meets a geometry: the copies of retrieve and store, and nothing else that touches both siblings.

Takes validated tokens, an open session and what is known of the layout. Everything the server hands out is checked
against the pool, the count that was asked for and the layout before a byte of it is used; what does not fit is a
`RemoteProtocolError`, followed by the clean-up of the lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs
import torch

from lmcache_sdk.errors import LeaseExpiredError, RemoteProtocolError
from lmcache_sdk.layout import (
    TOKEN,
    KVLayout,
    as_chunk,
    batches,
    check_disjoint,
    consecutive,
    copied,
    layout_from_object,
    max_chunks_per_payload,
    new_result,
    pack,
    payload_frame_nbytes,
    read_payload,
    slot_runs,
    unpack,
    write_payload_into,
)
from lmcache_sdk.protocol import InFlight, PayloadForm, PreparedRetrieve, PreparedStore, Slot
from lmcache_sdk.session import (
    BufferPool,
    Deadline,
    Identity,
    Operation,
    ReadLease,
    Reservation,
    Session,
    SharedPool,
    message_buffer,
)
from lmcache_sdk.values import TokenIds

_INLINE_BATCH_NBYTES: Final = 32 * 2**20
"""Bytes of one inline message: bounds what both sides hold besides the tensor."""
_RANGES_AHEAD: Final = 2
"""Inline ranges asked for and not received: the server makes one while it sends another."""
_STORE_BATCH_NBYTES: Final = (32 * 2**20, 256 * 2**20)
"""The fewest and the most bytes of slots reserved at a time. Few large batches are fast: every request costs the server
the whole token list."""
_POOL_SHARE: Final = 32
"""What part of the pool one batch may take, between those: the larger it is, the more a crash can block."""
_BATCHES_AHEAD: Final = 2
"""Batches of a store on their way at a time; what a crash in mid-store can block for the write TTL is that many."""


def _believe() -> None:
    """A miss is what the server says it is."""


@attrs.frozen(eq=False, repr=False)
class Endpoint:
    """Everything a transfer needs besides its arguments."""

    session: Session
    identity: Identity
    read_ttl: float | None
    write_ttl: float | None
    pool_nbytes: int
    """Bytes of the server's first-tier memory; 0 when it does not say."""

    buffers: BufferPool
    """Where the memory of results comes from."""

    @property
    def pool(self) -> SharedPool | None:
        """The server's pool; None on an inline server."""
        return self.session.pool

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
    on_miss: Callable[[], None] = _believe,
) -> int:
    """How many leading chunks of whole-chunk `tokens` are cached; leaves no lock behind.

    `exclusive` waits for other calls on the same tokens, and for what earlier ones still owe. `on_miss` is called
    when there are none, and may raise.
    """
    with endpoint.session.operation(
        step, endpoint.identity, tokens, cache_salt, deadline, exclusive=exclusive
    ) as operation:
        return acquired(endpoint, operation, on_miss).num_chunks


def acquired(endpoint: Endpoint, operation: Operation, on_miss: Callable[[], None]) -> ReadLease:
    """A lease on the cached prefix; its number of chunks may be 0."""
    lease = ReadLease(operation, endpoint.read_ttl, shm=endpoint.pool is not None)
    if not lease.acquire():
        operation.end_early()
        on_miss()
    return lease


def retrieve_prefix(
    endpoint: Endpoint,
    layout: KVLayout | None,
    tokens: TokenIds,
    cache_salt: str,
    deadline: Deadline,
    *,
    step: str = "retrieve",
    out: torch.Tensor | None = None,
    on_miss: Callable[[], None] = _believe,
) -> torch.Tensor | None:
    """The cached prefix `[kv, layer, token, hidden]` on the CPU, or None when nothing is cached.

    Into the first tokens of `out`, which `check_out` has passed, if that is given.
    """

    def once() -> torch.Tensor | None:
        with endpoint.session.operation(
            step, endpoint.identity, tokens, cache_salt, deadline, exclusive=True
        ) as operation:
            lease = acquired(endpoint, operation, on_miss)
            return _read(endpoint, lease, layout, out) if lease.num_chunks else None

    try:
        return once()
    except LeaseExpiredError:
        # cleared, or suspended for longer than the locks live, between lookup and copy: the pair is done once more
        deadline.check(f"{step}: a second try after the locks were lost")
        return once()


def _read(endpoint: Endpoint, lease: ReadLease, layout: KVLayout | None, out: torch.Tensor | None) -> torch.Tensor:
    """Copies the chunks of a lease into one tensor, range after range; the server makes the next ranges ready
    meanwhile.
    """
    hit = lease.num_chunks
    result = None if out is None else out.narrow(TOKEN, 0, hit * endpoint.identity.chunk_size)
    for first, entry, count in ranges(endpoint, lease, layout):
        prepared = lease.received(entry)
        runs = received_runs(endpoint, prepared, count)
        layout = agreed_layout(runs, layout, endpoint.identity.chunk_size)
        for slot in prepared.slots or ():
            if endpoint.pool is not None:
                endpoint.pool.populate(slot.offset, slot.length, write=False)
        if result is None:
            result = _new_result(endpoint, layout, hit)
        lease.check_alive()
        unpack(runs, result, first)
        del runs, prepared
        lease.check_alive()
        lease.commit(entry)
    assert result is not None
    return result


def ranges(
    endpoint: Endpoint, lease: ReadLease, layout: KVLayout | None
) -> Iterator[tuple[int, InFlight[PreparedRetrieve], int]]:
    """Asks for the chunks of a lease, a few ranges ahead of the one that it gives: `(first_chunk, entry, num_chunks)`.

    From slots all of them at once; inline as many as a message may hold, and before the size of a chunk is known, one.
    """
    hit = lease.num_chunks
    if endpoint.pool is not None:
        yield 0, lease.prepare(hit), hit
        return
    if layout is None:
        yield 0, lease.prepare(1), 1
    asked: deque[tuple[int, InFlight[PreparedRetrieve], int]] = deque()
    first = int(layout is None)
    size = 1 if layout is None else max(1, _INLINE_BATCH_NBYTES // layout.chunk_nbytes(endpoint.identity.chunk_size))
    while first < hit or asked:
        while first < hit and len(asked) < _RANGES_AHEAD:
            count = min(hit - first, size)
            asked.append((first, lease.prepare(count), count))
            first += count
        yield asked.popleft()


def _new_result(endpoint: Endpoint, layout: KVLayout, hit: int) -> torch.Tensor:
    chunk_size = endpoint.identity.chunk_size
    buffer = endpoint.buffers.lend(hit * layout.chunk_nbytes(chunk_size))
    return new_result(layout.chunk_shape(chunk_size), hit, layout.dtype, buffer)


def received_runs(endpoint: Endpoint, prepared: PreparedRetrieve, count: int) -> list[torch.Tensor]:
    """The chunks of a reply as tensors `[chunk, kv, layer, token, hidden]` on the pool or on the message."""
    chunk_size = endpoint.identity.chunk_size
    if endpoint.pool is not None:
        where = "prepare_retrieve.context.slots"
        slots = prepared.slots
        if slots is None or len(slots) != count:
            found = "no slots" if slots is None else f"{len(slots)} slots"
            raise RemoteProtocolError(f"{where}: {found} for {count} chunks", path=where)
        check_disjoint(slots, where)
        return slot_runs(endpoint.pool.buffer, slots, chunk_size, where)
    if prepared.slots is not None:
        raise RemoteProtocolError(
            "prepare_retrieve: slots from a server without a pool", path="prepare_retrieve.context"
        )
    payload = memoryview(prepared.data)
    tensors = read_payload(payload, endpoint.payload_form, num_tensors=count, max_nbytes=len(payload))
    return [
        as_chunk(tensor, chunk_size, f"prepare_retrieve.data[{index}]").unsqueeze(0)
        for index, tensor in enumerate(tensors)
    ]


def agreed_layout(runs: Sequence[torch.Tensor], layout: KVLayout | None, chunk_size: int) -> KVLayout:
    """The layout that every chunk has; a chunk that differs from the engine's, or from the first, is refused."""
    expected = layout or layout_from_object(tuple(runs[0].shape[1:]), runs[0].dtype, chunk_size)
    shape = expected.chunk_shape(chunk_size)
    index = 0
    for run in runs:
        if tuple(run.shape[1:]) != shape or run.dtype != expected.dtype:
            raise RemoteProtocolError(
                f"prepare_retrieve: chunk {index} is {list(run.shape[1:])} {run.dtype}, but the model's cache holds "
                f"{list(shape)} {expected.dtype} [kv, layer, token, hidden]; another client may have stored it with a "
                "wrong layout",
                path="prepare_retrieve",
            )
        index += run.size(0)
    return expected


# ---- store ----------------------------------------------------------------------------------------------------------

_STORE_SLOTS: Final = "prepare_store.context.slots"


class KVSlotWriter:
    """A `SlotWriter`: copies a range of chunks of one tensor into slots of the pool."""

    def __init__(
        self, kv: torch.Tensor, first_chunk: int, num_chunks: int, layout: KVLayout, chunk_size: int, pool: SharedPool
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
        check_disjoint(slots, _STORE_SLOTS)
        expected = self._layout.chunk_shape(self._chunk_size)
        index = 0
        for run in self._runs(slots):
            if tuple(run.shape[1:]) != expected or run.dtype != self._layout.dtype:
                found, wanted = f"{list(run.shape[1:])} {run.dtype}", f"{list(expected)} {self._layout.dtype}"
                where = f"{_STORE_SLOTS}[{index}]"
                raise RemoteProtocolError(f"{where}: {found}, expected {wanted}", path=where)
            index += run.size(0)

    def write(self, prepared: PreparedStore) -> None:
        """Fills every slot."""
        slots = prepared.slots or ()
        for slot in slots:
            self._pool.populate(slot.offset, slot.length, write=True)
        start = 0
        for index, num_chunks in consecutive(prepared.chunk_indices):
            first = self._first_chunk + index
            for run in self._runs(slots[start : start + num_chunks]):
                pack(self._kv, first, run)
                first += run.size(0)
            start += num_chunks

    def _runs(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        return slot_runs(self._pool.buffer, slots, self._chunk_size, _STORE_SLOTS)

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
    pool = None if inline else endpoint.pool
    if pool is None:
        yield from _write_inline(endpoint, operation, layout, kv, first_chunk, num_chunks)
        return
    chunk_size = endpoint.identity.chunk_size
    prepared: deque[Reservation] = deque()
    committed: deque[Reservation] = deque()
    fewest, most = _STORE_BATCH_NBYTES
    limit = min(max(fewest, pool.size // _POOL_SHARE), most)
    for offset, count in batches(num_chunks, layout.chunk_nbytes(chunk_size), limit):
        reservation = Reservation(operation, first_chunk + offset, count, endpoint.write_ttl)
        reservation.prepare(KVSlotWriter(kv, first_chunk + offset, count, layout, chunk_size, pool))
        prepared.append(reservation)
        if len(prepared) == _BATCHES_AHEAD:
            prepared[0].fill()
            committed.append(prepared.popleft())
            if len(committed) == _BATCHES_AHEAD:
                yield committed.popleft().verdict()
    for reservation in prepared:
        reservation.fill()
    for reservation in (*committed, *prepared):
        yield reservation.verdict()


def _write_inline(
    endpoint: Endpoint, operation: Operation, layout: KVLayout, kv: torch.Tensor, first_chunk: int, num_chunks: int
) -> Iterator[tuple[int, ...]]:
    """The same in messages: one is written while the server takes the one before; their memory is used again, also by
    the next store.
    """
    chunk_size, form = endpoint.identity.chunk_size, endpoint.payload_form
    nbytes = layout.chunk_nbytes(chunk_size)
    limit = min(_INLINE_BATCH_NBYTES, max_chunks_per_payload(layout, chunk_size) * nbytes)
    sent: deque[tuple[Reservation, memoryview]] = deque()
    free: list[memoryview] = []
    buffers = endpoint.buffers
    for offset, count in batches(num_chunks, nbytes, limit):
        if len(sent) == _BATCHES_AHEAD:
            reservation, frame = sent.popleft()
            yield reservation.verdict()
            free.append(frame)  # answered: the server has all of it
        size = payload_frame_nbytes(layout, chunk_size, count, form)
        frame = free.pop() if free and len(free[-1]) == size else buffers.take_message(size) or message_buffer(size)
        write_payload_into(frame, kv, layout, chunk_size, first_chunk + offset, count, form)
        reservation = Reservation(operation, first_chunk + offset, count, endpoint.write_ttl)
        reservation.send_inline(frame)
        sent.append((reservation, frame))
    for reservation, frame in sent:
        yield reservation.verdict()
        free.append(frame)
    buffers.keep_messages(sorted(free, key=len)[-_BATCHES_AHEAD:])
