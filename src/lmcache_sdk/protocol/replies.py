"""The kinds of reply, both directions: what follows the two header frames, and the struct it becomes.

A decoder takes the third frame, or None when there was none, and returns the struct or raises `RemoteProtocolError`.
Types are strict (a bool is not a count) and counts are bounded; whether they fit the request is checked where the
request is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.protocol import messages as m
from lmcache_sdk.protocol.rules import ReplyForm

T = TypeVar("T")

MAX_CHUNKS: Final = 2**22
"""More chunks than any answer can hold: 2**32 tokens in the smallest chunks. Bounds what a reply can claim."""
MAX_RANK: Final = 16
"""The rank limit that 0.5.7's own envelope sets (PROTOCOL.md section 4.2)."""

_encode: Final = msgspec.msgpack.encode


class _WireContext(msgspec.Struct, omit_defaults=True):
    slots: list[m.Slot] | None = None
    chunk_indices: list[int] | None = None


class _WirePreparedStore(msgspec.Struct):
    context: _WireContext


class _WirePreparedRetrieve(msgspec.Struct):
    success: bool
    data: memoryview
    context: _WireContext


class _WireRegistered(msgspec.Struct):
    shm_name: str
    pool_size: int
    null_block_id: int = 0


def strict_decoder(kind: type[T], what: str) -> Callable[[m.Buffer | None], T]:
    """A decoder of one frame into `kind`; a missing frame is a violation too."""
    decoder = msgspec.msgpack.Decoder(kind, strict=True)

    def decode(frame: m.Buffer | None) -> T:
        if frame is None:
            raise RemoteProtocolError(f"{what}: the reply has no payload frame", path=what)
        try:
            return decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise RemoteProtocolError(f"{what}: {error}", path=what) from error

    return decode


_bool: Final = strict_decoder(bool, "reply")
_text: Final = strict_decoder(str, "noop")
_chunk_size: Final = strict_decoder(int, "chunk_size")
_ready_chunks: Final = strict_decoder(int, "prefetch_status")
_names: Final = strict_decoder(tuple[str, ...], "get_experimental")
_registered: Final = strict_decoder(_WireRegistered, "register")
_prepared_store: Final = strict_decoder(_WirePreparedStore, "prepare_store")
_prepared_retrieve: Final = strict_decoder(_WirePreparedRetrieve, "prepare_retrieve")


def _decode_void(frame: m.Buffer | None) -> m.Void:
    if frame is not None:
        raise RemoteProtocolError("reply: expected two frames, got a payload frame", path="reply")
    return m.Void()


def _bounded(value: int, path: str, high: int) -> int:
    if not 0 <= value <= high:
        raise RemoteProtocolError(f"{path}: expected 0 to {high}, got {value}", path=path)
    return value


def _decode_prefetch(frame: m.Buffer | None) -> m.PrefetchStatus:
    if frame is None:
        return m.PrefetchStatus(ready_chunks=None)
    return m.PrefetchStatus(ready_chunks=_bounded(_ready_chunks(frame), "prefetch_status", MAX_CHUNKS))


def _decode_registered(frame: m.Buffer | None) -> m.Registered:
    wire = _registered(frame)
    _bounded(wire.pool_size, "register.pool_size", 2**63 - 1)
    return m.Registered(wire.shm_name, wire.pool_size, wire.null_block_id)


def _checked_slots(slots: Sequence[m.Slot], path: str) -> tuple[m.Slot, ...]:
    _bounded(len(slots), f"{path}.context.slots", MAX_CHUNKS)
    for index, slot in enumerate(slots):
        where = f"{path}.context.slots[{index}]"
        _bounded(slot.offset, f"{where}.offset", 2**63 - 1)
        _bounded(slot.length, f"{where}.length", 2**63 - 1)
        if not 1 <= len(slot.shape) <= MAX_RANK or any(not 1 <= size < 2**48 for size in slot.shape):
            raise RemoteProtocolError(f"{where}.shape: not a shape: {slot.shape}", path=f"{where}.shape")
    return tuple(slots)


def _decode_prepared_store(frame: m.Buffer | None) -> m.PreparedStore:
    context = _prepared_store(frame).context
    if context.slots is None:
        if context.chunk_indices is not None:
            raise RemoteProtocolError(
                "prepare_store.context: chunk_indices without slots", path="prepare_store.context"
            )
        return m.PreparedStore(slots=None, chunk_indices=())
    slots = _checked_slots(context.slots, "prepare_store")
    indices = tuple(context.chunk_indices or ())
    where = "prepare_store.context.chunk_indices"
    if len(indices) != len(slots):
        raise RemoteProtocolError(f"{where}: {len(slots)} slots, {len(indices)} indices", path=where)
    if any(after <= before for before, after in zip((-1, *indices), indices, strict=False)):
        raise RemoteProtocolError(f"{where}: not strictly increasing from 0", path=where)
    return m.PreparedStore(slots=slots, chunk_indices=indices)


def _decode_prepared_retrieve(frame: m.Buffer | None) -> m.PreparedRetrieve:
    wire = _prepared_retrieve(frame)
    slots = None if wire.context.slots is None else _checked_slots(wire.context.slots, "prepare_retrieve")
    if not wire.success and (slots or len(wire.data)):
        raise RemoteProtocolError("prepare_retrieve: a miss that carries data", path="prepare_retrieve.success")
    if slots is not None and len(wire.data):
        raise RemoteProtocolError("prepare_retrieve: both slots and inline data", path="prepare_retrieve.data")
    return m.PreparedRetrieve(success=wire.success, data=wire.data, slots=slots)


def _encode_prefetch(reply: m.PrefetchStatus) -> bytes | None:
    return None if reply.ready_chunks is None else _encode(reply.ready_chunks)


def _slot_map(slot: m.Slot) -> dict[str, object]:
    return {"offset": slot.offset, "length": slot.length, "shape": slot.shape, "dtype": slot.dtype}


def _encode_prepared_store(reply: m.PreparedStore) -> bytes:
    if reply.slots is None:
        return _encode({"context": {}})
    slots = [_slot_map(slot) for slot in reply.slots]
    return _encode({"context": {"slots": slots, "chunk_indices": reply.chunk_indices}})


def _encode_prepared_retrieve(reply: m.PreparedRetrieve) -> bytes:
    context = {} if reply.slots is None else {"slots": [_slot_map(slot) for slot in reply.slots]}
    return _encode({"success": reply.success, "data": reply.data, "context": context})


VOID: Final = ReplyForm[m.Void](_decode_void, lambda _: None)
PREFETCH: Final = ReplyForm[m.PrefetchStatus](_decode_prefetch, _encode_prefetch)
REGISTERED: Final = ReplyForm[m.Registered](
    _decode_registered, lambda reply: _encode({"shm_name": reply.shm_name, "pool_size": reply.pool_size})
)
REGISTERED_NULL_BLOCK: Final = ReplyForm[m.Registered](_decode_registered, _encode)
PREPARED_STORE: Final = ReplyForm[m.PreparedStore](_decode_prepared_store, _encode_prepared_store)
PREPARED_RETRIEVE: Final = ReplyForm[m.PreparedRetrieve](_decode_prepared_retrieve, _encode_prepared_retrieve)
COMMITTED: Final = ReplyForm[m.Committed](lambda f: m.Committed(_bool(f)), lambda reply: _encode(reply.success))
CHUNK_SIZE: Final = ReplyForm[m.ChunkSize](
    lambda f: m.ChunkSize(_bounded(_chunk_size(f), "chunk_size", 2**32)), lambda reply: _encode(reply.num_tokens)
)
EXPERIMENTAL: Final = ReplyForm[m.Experimental](lambda f: m.Experimental(_names(f)), lambda reply: _encode(reply.names))
PONG: Final = ReplyForm[m.Pong](lambda f: m.Pong(_bool(f)), lambda reply: _encode(reply.alive))
NOOP: Final = ReplyForm[m.NoopAnswer](lambda f: m.NoopAnswer(_text(f)), lambda reply: _encode(reply.text))
