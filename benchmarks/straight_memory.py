"""The memory of the straight-line client: the mapped pool in as few tensors as there can be, and results."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from lmcache_sdk.layout import KVLayout
from lmcache_sdk.protocol import Registered
from lmcache_sdk.session import SharedPool


def runs(offsets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Slots that follow each other at one distance, which one copy takes: `(first, how many, distance)`."""
    first = 0
    while first < len(offsets):
        end, distance = first + 1, 0
        if end < len(offsets):
            distance = max(0, offsets[end] - offsets[first])
        while distance and end < len(offsets) and offsets[end] - offsets[end - 1] == distance:
            end += 1
        yield first, end - first, distance
        first = end


def fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose pages nobody has touched; huge ones, which is the cheapest that there is."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class MappedPool:
    """The server's pool, as slots of one layout."""

    def __init__(self, registered: Registered, layout: KVLayout, chunk_size: int) -> None:
        self._pool = SharedPool(registered.shm_name, registered.pool_size)
        self._whole = torch.frombuffer(self._pool.buffer, dtype=layout.dtype)
        self._shape = layout.chunk_shape(chunk_size)
        self._strides = torch.empty(self._shape, device="meta").stride()
        self._nbytes = layout.chunk_nbytes(chunk_size)

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        """A copy of some of it."""
        return bytes(self._pool.buffer[offset : offset + nbytes])

    def pairs(
        self, offsets: Sequence[int], kv: torch.Tensor, *, write: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """`[chunk, kv, layer, token, hidden]` on the pool and the same of the tensor, for as few copies as can be."""
        planes, layers, tokens, hidden = kv.shape
        chunks = kv.view(planes, layers, len(offsets), tokens // len(offsets), hidden).movedim(2, 0)
        itemsize = self._whole.dtype.itemsize
        for first, count, distance in runs(offsets):
            start = offsets[first]
            # as ours: page by page, while bytes are copied, it takes longer; where it was done it does nothing
            self._pool.populate(start, (count - 1) * distance + self._nbytes, write=write)
            strides = (distance // itemsize, *self._strides)
            slots = self._whole.as_strided((count, *self._shape), strides, start // itemsize)
            yield slots, chunks[first : first + count]

    def close(self) -> None:
        """Unmaps it."""
        del self._whole
        self._pool.close()
