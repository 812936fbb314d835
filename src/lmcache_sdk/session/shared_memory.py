"""The server's pool mapped here by shm_open + mmap; never created, never unlinked, never shown to the resource
tracker.

Takes the name and size of a registration's reply. Refuses a name that is a path, a segment that is missing or whose
size is not the one announced: a pool that cannot be seen must not turn into a silent fallback, because an shm server
answers retrieves with slots only (FAULTS.md 13.1 to 13.3). `multiprocessing.shared_memory` is not used: its tracker
deletes segments that this process only attached.
"""

from __future__ import annotations

import _posixshmem
import ctypes
import mmap
import os
import re
from typing import Final

from lmcache_sdk.errors import ConnectError, Fate, RemoteProtocolError
from lmcache_sdk.values import override

_NAME: Final = re.compile(r"lmcache_l1_pool_[A-Za-z0-9_.\-]{1,200}")
"""The server adds this prefix to whatever name it was started with (PROTOCOL.md section 10)."""
_HOW_TO_SHARE: Final = (
    "The server hands out slots in shared memory, so this process must see the same /dev/shm: run it on the server's "
    "host; in containers share it (docker: --ipc=host, or --ipc=container:SERVER; Kubernetes: one emptyDir of medium "
    "Memory mounted at /dev/shm in both). Or start the server with --shm-name '' to send tensors inline"
)

_LIBC: Final = ctypes.CDLL(None)
_BLOCK: Final = 2**20
"""Bytes whose pages are faulted in together."""
_READABLE: Final = 1
_WRITABLE: Final = 2
_ADVICE: Final = {_READABLE: 22, _WRITABLE: 23}
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE, which the mmap module does not name yet."""


class SharedPool:
    """The mapping of the server's first-tier pool.

    `buffer` is a writable view of the whole of it. Tensors made on it keep the mapping alive: `close` unmaps only
    when none is left, and otherwise leaves it to the last of them, because unmapping under a live view is a
    segmentation fault.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name: str = name
        self.size: int = size
        if not _NAME.fullmatch(name):
            raise RemoteProtocolError(
                f"register.shm_name: not the name of a pool: {name[:80]!r}", path="register.shm_name"
            )
        if size <= 0:
            raise RemoteProtocolError(
                f"register.pool_size: expected more than 0, got {size}", path="register.pool_size"
            )
        fd = _open(name)
        try:
            found = os.fstat(fd)
            if found.st_size != size:
                raise ConnectError(
                    f"the server announces a pool of {size} bytes, but the segment /dev/shm/{name} seen here has "
                    f"{found.st_size}: it belongs to another server. {_HOW_TO_SHARE}",
                    fate=Fate.ANSWERED,
                )
            self.inode: tuple[int, int] = (found.st_dev, found.st_ino)
            self._mapping: mmap.mmap | None = _map(fd, size, name)
        finally:
            os.close(fd)
        self.buffer: memoryview = memoryview(self._mapping)
        self._populated = bytearray(-(-size // _BLOCK))
        """What is known of each block: 0, _READABLE or _WRITABLE."""

    def populate(self, offset: int, length: int, *, write: bool) -> None:
        """Faults the pages of a range in, all at once, where that has not been done: page by page, while bytes are
        copied, it takes several times as long. On a kernel before 5.14 it does nothing.
        """
        wanted = _WRITABLE if write else _READABLE
        first, end = offset // _BLOCK, -(-(offset + length) // _BLOCK)
        mapping = self._mapping
        block = first
        while mapping is not None and block < end:
            if self._populated[block] >= wanted:
                block += 1
                continue
            start = block
            while block < end and self._populated[block] < wanted:
                block += 1
            self._populated[start:block] = bytes((wanted,)) * (block - start)
            _advise(mapping, start * _BLOCK, min(block * _BLOCK, self.size) - start * _BLOCK, _ADVICE[wanted])

    def close(self) -> None:
        """Unmaps if no tensor is left on the mapping; otherwise the last one does it."""
        # Only the references are dropped: a tensor keeps the view it was made on alive, but not the buffer's export, so
        # mmap.close() would succeed under it.
        self.buffer, self._mapping = memoryview(b""), None

    @override
    def __repr__(self) -> str:
        return f"<SharedPool {self.name} {self.size} bytes>"


def _advise(mapping: mmap.mmap, offset: int, length: int, advice: int) -> None:
    """madvise(2) without holding the interpreter's lock, as mmap.madvise does; an advice that is not taken is none."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    _LIBC.madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(length), ctypes.c_int(advice))


def unproven(name: str) -> ConnectError:
    """The error for a segment that has the right name and size and still is not the server's."""
    return ConnectError(
        f"the segment /dev/shm/{name} seen here is not the server's: bytes that the server wrote into its pool did "
        f"not show up. {_HOW_TO_SHARE}",
        fate=Fate.ANSWERED,
    )


def _map(fd: int, size: int, name: str) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        raise ConnectError(
            f"the server's pool /dev/shm/{name} of {size} bytes cannot be mapped: {error}", fate=Fate.ANSWERED
        ) from error


def _open(name: str) -> int:
    try:
        return _posixshmem.shm_open(f"/{name}", os.O_RDWR | getattr(os, "O_CLOEXEC", 0), mode=0o600)
    except FileNotFoundError as error:
        raise ConnectError(
            f"the server's pool /dev/shm/{name} does not exist here. {_HOW_TO_SHARE}", fate=Fate.ANSWERED
        ) from error
    except PermissionError as error:
        raise ConnectError(
            f"the server's pool /dev/shm/{name} may not be opened by this user: the server creates it for its own "
            "user only (mode 0600); run this process as that user",
            fate=Fate.ANSWERED,
        ) from error
    except OSError as error:
        raise ConnectError(
            f"the server's pool /dev/shm/{name} cannot be opened: {error}. {_HOW_TO_SHARE}", fate=Fate.ANSWERED
        ) from error
