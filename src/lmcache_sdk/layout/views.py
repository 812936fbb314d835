"""(offset, length) in a buffer -> a tensor on those bytes, made only after every number was checked.

Numbers come from a peer: each violation is a `RemoteProtocolError` that names the field. A tensor on a buffer is a
view: it keeps the memoryview it was made from alive, and whoever unmaps the memory behind it must wait for that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import torch

from lmcache_sdk.errors import RemoteProtocolError, UnknownLayoutError
from lmcache_sdk.layout.axes import KV, OBJECT_RANK, TOKEN
from lmcache_sdk.layout.dtypes import dtype_from_name, itemsize
from lmcache_sdk.protocol import Slot

MAX_RANK: Final = 16
_MAX_DIMENSION: Final = 2**40
_MAX_NBYTES: Final = 2**50


def slot_view(
    pool: memoryview, *, offset: int, length: int, shape: Sequence[int], dtype_name: str, path: str = "slot"
) -> torch.Tensor:
    """The tensor of one slot of the pool; nothing is copied, so what is written to it is in the pool."""
    for name, value in (("offset", offset), ("length", length)):
        if type(value) is not int or value < 0:
            raise _wrong(f"{path}.{name}", f"expected a count of bytes, got {str(value)[:40]}")
    dtype = dtype_of(dtype_name, f"{path}.dtype")
    nbytes = shape_nbytes(shape, dtype, f"{path}.shape")
    if nbytes != length:
        raise _wrong(f"{path}.length", f"{length}, but {list(shape)} of {dtype_name} takes {nbytes} bytes")
    if offset % itemsize(dtype):
        raise _wrong(f"{path}.offset", f"{offset} is not a multiple of the {itemsize(dtype)} bytes of {dtype_name}")
    if offset + length > pool.nbytes:
        raise _wrong(f"{path}.offset", f"{offset} + {length} bytes end outside the pool of {pool.nbytes}")
    return tensor_on(pool.cast("B")[offset : offset + length], dtype, shape)


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
    found = list(tensor.shape)
    chunk = tensor.unsqueeze(KV) if tensor.dim() == OBJECT_RANK - 1 else tensor
    if chunk.dim() != OBJECT_RANK or chunk.size(KV) not in (1, 2):
        raise _wrong(f"{path}.shape", f"{found} is not [kv, layer, token, hidden] with 1 or 2 planes")
    if chunk.size(TOKEN) != chunk_size:
        raise _wrong(f"{path}.shape", f"{found} does not hold a chunk of {chunk_size} tokens")
    return chunk


def check_disjoint(slots: Sequence[Slot], path: str = "slots") -> None:
    """Refuses slots of which two share a byte: filling one would destroy the other."""
    order = sorted(range(len(slots)), key=lambda index: slots[index].offset)
    for before, after in itertools.pairwise(order):
        if slots[before].offset + slots[before].length > slots[after].offset:
            raise _wrong(f"{path}[{after}].offset", f"{slots[after].offset} lies inside slot {before}")


def _wrong(path: str, problem: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{path}: {problem}", path=path)
