"""(offset, length) in a buffer -> a tensor on those bytes, made only after every number was checked.

Numbers come from a peer: each violation is a `RemoteProtocolError` that names the field. A tensor on a buffer is a
view: it keeps the memoryview it was made from alive, and whoever unmaps the memory behind it must wait for that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import torch

from lmcache_sdk.errors import RemoteProtocolError, UnknownLayoutError
from lmcache_sdk.layout.axes import KV, OBJECT_RANK, TOKEN
from lmcache_sdk.layout.dtypes import dtype_from_name, itemsize
from lmcache_sdk.protocol import Slot

MAX_RANK: Final = 16
_MAX_DIMENSION: Final = 2**40
_MAX_NBYTES: Final = 2**50


def slot_runs(pool: memoryview, slots: Sequence[Slot], chunk_size: int, path: str = "slots") -> list[torch.Tensor]:
    """Consecutive slots as few tensors `[chunk, kv, layer, token, hidden]` on the pool: neighbours of one kind at one
    distance from each other are one tensor, which can be copied in one piece. Every number is checked; that no two
    overlap is the caller's to check. Nothing is copied: what is written to them is in the pool.
    """
    runs: list[torch.Tensor] = []
    memory = pool.cast("B")
    start = 0
    kind: _Kind | None = None
    for index, slot in enumerate(slots):
        if kind is None or slot.shape != kind.shape or slot.dtype != kind.dtype_name:
            if kind is not None:
                runs.extend(_joined(memory, slots[start:index], kind))
            kind, start = _kind_of(slot, chunk_size, f"{path}[{index}]"), index
        if not _fits(slot, kind, pool.nbytes):
            _check_place(pool.nbytes, slot.offset, slot.length, kind.nbytes, kind.itemsize, f"{path}[{index}]")
    if kind is not None:
        runs.extend(_joined(memory, slots[start:], kind))
    return runs


@attrs.frozen(eq=False, repr=False)
class _Kind:
    """What consecutive slots have in common."""

    shape: tuple[int, ...]
    dtype_name: str
    dtype: torch.dtype
    itemsize: int
    nbytes: int
    chunk_shape: tuple[int, ...]


def _kind_of(slot: Slot, chunk_size: int, path: str) -> _Kind:
    dtype = dtype_of(slot.dtype, f"{path}.dtype")
    nbytes = shape_nbytes(slot.shape, dtype, f"{path}.shape")
    shape = _chunk_shape(tuple(slot.shape), chunk_size, path)
    return _Kind(tuple(slot.shape), slot.dtype, dtype, itemsize(dtype), nbytes, shape)


def _fits(slot: Slot, kind: _Kind, pool_nbytes: int) -> bool:
    """What `_check_place` says in words, fast: a long prefix has thousands of slots."""
    return (
        type(slot.offset) is type(slot.length) is int
        and slot.length == kind.nbytes
        and 0 <= slot.offset <= pool_nbytes - kind.nbytes
        and not slot.offset % kind.itemsize
    )


def _joined(memory: memoryview, slots: Sequence[Slot], kind: _Kind) -> Iterator[torch.Tensor]:
    """Checked slots of one kind, cut where the distance to the next one changes or turns back."""
    inner = [math.prod(kind.chunk_shape[axis + 1 :]) for axis in range(len(kind.chunk_shape))]
    start = 0
    while start < len(slots):
        offset, end, distance = slots[start].offset, start + 1, kind.nbytes
        if end < len(slots) and slots[end].offset > offset:
            distance = slots[end].offset - offset
        while end < len(slots) and slots[end].offset - slots[end - 1].offset == distance:
            end += 1
        count = ((end - start - 1) * distance + kind.nbytes) // kind.itemsize
        whole = tensor_on(memory[offset : offset + count * kind.itemsize], kind.dtype, [count])
        yield whole.as_strided((end - start, *kind.chunk_shape), (distance // kind.itemsize, *inner))
        start = end


def _check_place(pool_nbytes: int, offset: int, length: int, nbytes: int, itemsize_: int, path: str) -> None:
    for name, value in (("offset", offset), ("length", length)):
        if type(value) is not int or value < 0:
            raise _wrong(f"{path}.{name}", f"expected a count of bytes, got {str(value)[:40]}")
    if nbytes != length:
        raise _wrong(f"{path}.length", f"{length}, but its shape and dtype take {nbytes} bytes")
    if offset % itemsize_:
        raise _wrong(f"{path}.offset", f"{offset} is not a multiple of the {itemsize_} bytes of its dtype")
    if offset + length > pool_nbytes:
        raise _wrong(f"{path}.offset", f"{offset} + {length} bytes end outside the pool of {pool_nbytes}")


def tensor_on(buffer: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor on the whole buffer, whose length the caller has compared with the shape.

    Read-only memory is copied first: torch can make a writable tensor of it, but warns about that in a way that can
    only be silenced for the whole process.
    """
    writable = memoryview(bytearray(buffer)) if buffer.readonly else buffer
    return torch.frombuffer(writable, dtype=dtype).view(tuple(shape))


def dtype_of(name: str, path: str) -> torch.dtype:
    """The dtype of a peer's name for it."""
    try:
        return dtype_from_name(name)
    except UnknownLayoutError as error:
        raise _wrong(path, str(error)) from error


def shape_nbytes(shape: Sequence[object], dtype: torch.dtype, path: str) -> int:
    """Bytes that a peer's shape takes, every axis checked and bounded."""
    if not 1 <= len(shape) <= MAX_RANK:
        raise _wrong(path, f"expected 1 to {MAX_RANK} axes, got {len(shape)}")
    sizes = [size for size in shape if type(size) is int and 1 <= size <= _MAX_DIMENSION]
    if len(sizes) != len(shape):
        raise _wrong(path, f"expected positive integers up to {_MAX_DIMENSION}")
    nbytes = math.prod(sizes) * itemsize(dtype)
    if nbytes > _MAX_NBYTES:
        raise _wrong(path, f"{sizes} is larger than any memory")
    return nbytes


def as_chunk(tensor: torch.Tensor, chunk_size: int, path: str = "object") -> torch.Tensor:
    """The object as `[kv, layer, token, hidden]`: clients store one plane without the first axis, engines with it."""
    return tensor.view(_chunk_shape(tuple(tensor.shape), chunk_size, path))


def _chunk_shape(shape: tuple[int, ...], chunk_size: int, path: str) -> tuple[int, ...]:
    found = (1, *shape) if len(shape) == OBJECT_RANK - 1 else shape
    if len(found) != OBJECT_RANK or found[KV] not in (1, 2):
        raise _wrong(f"{path}.shape", f"{list(shape)} is not [kv, layer, token, hidden] with 1 or 2 planes")
    if found[TOKEN] != chunk_size:
        raise _wrong(f"{path}.shape", f"{list(shape)} does not hold a chunk of {chunk_size} tokens")
    return found


def check_disjoint(slots: Sequence[Slot], path: str = "slots") -> None:
    """Refuses slots of which two share a byte: filling one would destroy the other."""
    order = sorted(range(len(slots)), key=lambda index: slots[index].offset)
    for before, after in itertools.pairwise(order):
        if slots[before].offset + slots[before].length > slots[after].offset:
            raise _wrong(f"{path}[{after}].offset", f"{slots[after].offset} lies inside slot {before}")


def _wrong(path: str, problem: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{path}: {problem}", path=path)
