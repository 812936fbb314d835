"""The pool: one buffer that all cached chunks live in, handed out in pieces aligned to pages, first fit.

With a name the buffer is a POSIX shared-memory file, made with mode 0600 and removed on closing if it is still ours;
without one it is anonymous memory. Pieces are not zeroed: whoever gets one sees what its last owner left there. A batch
of pieces is one allocation, given whole or not at all.
"""

from __future__ import annotations

import bisect
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import torch

from lmcache_sdk.errors import UsageError
from lmcache_sdk.values import override

_log = logging.getLogger("lmcache_sdk.devserver")

PAGE: Final = 4096
NAME_PREFIX: Final = "lmcache_l1_pool_"
_SHM: Final = Path("/dev/shm")


def full_name(name: str) -> str:
    """The name of the file that a server started with `name` makes."""
    bare = name.lstrip("/")
    return bare if bare.startswith(NAME_PREFIX) else f"{NAME_PREFIX}{bare}"


@attrs.frozen
class Piece:
    """Where one chunk lies in the pool, and what it is read as."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class FreeList:
    """The free ranges of a buffer, sorted, none touching another."""

    def __init__(self, size: int) -> None:
        self._ranges: list[tuple[int, int]] = [(0, size)] if size else []

    def take(self, size: int) -> int | None:
        """The offset of the first free range that is large enough, cut off its front; None when there is none."""
        for index, (offset, length) in enumerate(self._ranges):
            if length >= size:
                self._ranges[index : index + 1] = [(offset + size, length - size)] if length > size else []
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Frees a range and joins it with its neighbours."""
        index = bisect.bisect_left(self._ranges, (offset, 0))
        end = offset + size
        first, last = index, index
        if index < len(self._ranges) and self._ranges[index][0] == end:
            end += self._ranges[index][1]
            last += 1
        if index and sum(self._ranges[index - 1]) == offset:
            offset = self._ranges[index - 1][0]
            first -= 1
        self._ranges[first:last] = [(offset, end - offset)]

    @property
    def nbytes(self) -> int:
        """How much is free."""
        return sum(length for _, length in self._ranges)


class Pool:
    """The buffer and what of it is in use. Not thread-safe: the server's lock guards it."""

    def __init__(self, size: int, shm_name: str = "") -> None:
        """Makes the buffer. A file of that name is replaced, as a server does that comes back after it was killed."""
        if size < PAGE:
            raise UsageError(f"the pool needs at least {PAGE} bytes, got {size}")
        self.size = size
        self.shm_name: str = full_name(shm_name) if shm_name else ""
        if "/" in self.shm_name:
            raise UsageError(f"shm_name must not contain '/': {shm_name!r}")
        self._inode: int | None = None
        # the tensor holds the mapping, which goes with the last tensor on it: torch does not keep mmap.close()
        # from unmapping what a tensor still looks at
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map(), dtype=torch.uint8)
        self._free = FreeList(size // PAGE * PAGE)
        self.used_nbytes: int = 0

    def _map(self) -> mmap.mmap:
        if not self.shm_name:
            return mmap.mmap(-1, self.size)
        (_SHM / self.shm_name).unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(_SHM / self.shm_name, flags, 0o600)
        try:
            os.ftruncate(descriptor, self.size)
            self._inode = os.fstat(descriptor).st_ino
            return mmap.mmap(descriptor, self.size)
        except BaseException:
            (_SHM / self.shm_name).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, count: int) -> list[Piece] | None:
        """`count` pieces of one shape side by side; None when no free range holds them all."""
        nbytes = dtype.itemsize
        for size in shape:
            if size < 1:
                raise UsageError(f"not a shape: {list(shape)}")
            nbytes *= size
        stride = -(-nbytes // PAGE) * PAGE
        offset = self._free.take(stride * count) if count else None
        if offset is None:
            return None
        self.used_nbytes += stride * count
        return [Piece(offset + index * stride, nbytes, tuple(shape), dtype) for index in range(count)]

    def free(self, piece: Piece) -> None:
        """Gives a piece back."""
        stride = -(-piece.nbytes // PAGE) * PAGE
        self._free.give_back(piece.offset, stride)
        self.used_nbytes -= stride

    def tensor(self, piece: Piece) -> torch.Tensor:
        """A tensor on the piece's bytes."""
        if self._bytes is None:
            raise UsageError("the pool is closed")
        return self._bytes[piece.offset : piece.offset + piece.nbytes].view(piece.dtype).view(piece.shape)

    def close(self) -> None:
        """Removes the file if it is still the one made here; the memory goes with the last tensor on it."""
        self._bytes = None
        if self._inode is not None:
            path = _SHM / self.shm_name
            try:
                if path.stat().st_ino == self._inode:
                    path.unlink()
            except FileNotFoundError:
                _log.debug("pool: %s was removed by somebody else", self.shm_name)
            self._inode = None

    @override
    def __repr__(self) -> str:
        return f"<Pool {self.shm_name or 'anonymous'} {self.used_nbytes} of {self.size} used>"
