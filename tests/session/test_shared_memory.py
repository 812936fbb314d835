"""The pool's mapping: refused names, sizes and segments; views that outlive it; nothing unlinked, nothing tracked."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from lmcache_sdk.errors import ConnectError, RemoteProtocolError
from lmcache_sdk.session import SharedPool, unproven

SHM: Final = Path("/dev/shm")
SIZE: Final = 3 * 4096


def descriptors_of(path: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [target for target in found if target == str(path)]


@pytest.fixture
def segment() -> Iterator[Path]:
    """A file as a server makes it; deleted afterwards, if the test let it live."""
    path = SHM / f"lmcache_l1_pool_test_{secrets.token_hex(6)}"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    path.chmod(0o600)
    yield path
    path.unlink(missing_ok=True)


def mappings_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_it_maps_the_whole_segment_both_ways(segment: Path) -> None:
    pool = SharedPool(segment.name, SIZE)
    try:
        assert pool.buffer.nbytes == SIZE and not pool.buffer.readonly
        assert bytes(pool.buffer[:4]) == b"\x00\x01\x02\x03"
        pool.buffer[4096:4100] = b"here"
        assert segment.read_bytes()[4096:4100] == b"here"
        with segment.open("r+b") as file:
            file.write(b"there")
        assert bytes(pool.buffer[:5]) == b"there"
    finally:
        pool.close()


def test_it_knows_which_file_it_has_mapped(segment: Path) -> None:
    pool = SharedPool(segment.name, SIZE)
    found = segment.stat()
    assert pool.inode == (found.st_dev, found.st_ino)
    assert repr(pool) == f"<SharedPool {segment.name} {SIZE} bytes>"
    pool.close()


def test_close_unmaps_and_leaves_the_file(segment: Path) -> None:
    pool = SharedPool(segment.name, SIZE)
    assert mappings_of(segment) == 1
    pool.close()
    pool.close()
    assert mappings_of(segment) == 0 and descriptors_of(segment) == []
    assert segment.exists() and segment.stat().st_size == SIZE


def test_a_view_outlives_the_close(segment: Path) -> None:
    """Unmapping under a live tensor is a segmentation fault: the last view takes the mapping with it."""
    pool = SharedPool(segment.name, SIZE)
    view = pool.buffer[256:512].cast("B")
    pool.close()
    assert bytes(view[:3]) == b"\x00\x01\x02"
    view[0:4] = b"late"
    assert segment.read_bytes()[256:260] == b"late"
    assert mappings_of(segment) == 1
    del view
    assert mappings_of(segment) == 0 and descriptors_of(segment) == []  # a closed pool object may live on
    assert pool.name == segment.name


@pytest.mark.parametrize(
    "name",
    [
        *("", "lmcache_l1_pool_", "pool", "../../etc/passwd", "lmcache_l1_pool_/x", "lmcache_l1_pool_../x"),
        *(
            "/lmcache_l1_pool_x",
            "lmcache_l1_pool_x\x00",
            "lmcache_l1_pool_x\n",
            "lmcache_l1_pool_\u00e9",
            "xlmcache_l1_pool_x",
        ),
        "lmcache_l1_pool_" + 300 * "x",
    ],
)
def test_a_name_that_no_server_gives_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        SharedPool(name, SIZE)
    assert caught.value.path == "register.shm_name"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_no_pool_has_is_refused(segment: Path, size: int) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        SharedPool(segment.name, size)
    assert caught.value.path == "register.pool_size"


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 4096, 2**45, 2**63 - 1])
def test_a_segment_of_another_size_belongs_to_another_server(segment: Path, size: int) -> None:
    with pytest.raises(ConnectError, match=r"another server.*/dev/shm.*--ipc=host") as caught:
        SharedPool(segment.name, size)
    assert str(size) in str(caught.value) and str(SIZE) in str(caught.value)
    assert mappings_of(segment) == 0


def test_a_missing_segment_says_how_to_share() -> None:
    with pytest.raises(ConnectError, match=r"does not exist here.*--ipc=host.*--shm-name ''"):
        SharedPool("lmcache_l1_pool_nowhere_" + secrets.token_hex(6), SIZE)


def test_a_segment_of_another_user_says_so(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: str, flags: int, mode: int = 0) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("_posixshmem.shm_open", deny)
    with pytest.raises(ConnectError, match=r"as that user"):
        SharedPool(segment.name, SIZE)


def test_another_failure_is_translated_too(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, flags: int, mode: int = 0) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("_posixshmem.shm_open", fail)
    with pytest.raises(ConnectError, match=r"Too many open files") as caught:
        SharedPool(segment.name, SIZE)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_segment_that_cannot_be_mapped_leaves_no_descriptor(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("lmcache_sdk.session.shared_memory.mmap.mmap", fail)
    with pytest.raises(ConnectError, match=r"Cannot allocate memory"):
        SharedPool(segment.name, SIZE)
    assert descriptors_of(segment) == []


@pytest.mark.slow
def test_the_end_of_the_process_leaves_the_segment(segment: Path) -> None:
    """Python's own SharedMemory would have its resource tracker delete what this process only attached."""
    program = (
        "import sys; from lmcache_sdk.session import SharedPool; SharedPool(sys.argv[1], int(sys.argv[2])).buffer[0]"
    )
    run = subprocess.run([sys.executable, "-c", program, segment.name, str(SIZE)], timeout=60, check=False)
    assert run.returncode == 0
    assert segment.exists()


def test_the_error_of_a_pool_that_is_not_the_servers() -> None:
    error = unproven("lmcache_l1_pool_x")
    assert isinstance(error, ConnectError)
    assert "/dev/shm/lmcache_l1_pool_x" in str(error) and "--ipc=host" in str(error)
