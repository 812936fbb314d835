"""The pool: pieces do not overlap, nothing is lost, a batch is given whole or not at all, nothing is zeroed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_sdk.devserver import unique_shm_name
from lmcache_sdk.devserver.pool import PAGE, FreeList, Pool, full_name
from lmcache_sdk.errors import UsageError

SIZE = 64 * PAGE


@given(st.lists(st.one_of(st.integers(1, 9), st.none()), max_size=60))
@settings(deadline=None)
def test_free_ranges_stay_apart_and_nothing_is_lost(steps: list[int | None]) -> None:
    """A number takes that many pages, None gives the oldest piece back."""
    free, held = FreeList(SIZE), list[tuple[int, int]]()
    for step in steps:
        if step is None:
            if held:
                free.give_back(*held.pop(0))
        else:
            offset = free.take(step * PAGE)
            if offset is not None:
                held.append((offset, step * PAGE))
        assert free.nbytes + sum(size for _, size in held) == SIZE
        ends = 0
        for offset, size in sorted(held):
            assert offset >= ends
            ends = offset + size
        assert ends <= SIZE
    for offset, size in held:
        free.give_back(offset, size)
    assert free.take(SIZE) == 0, "the ranges did not join again"


def test_first_fit() -> None:
    free = FreeList(SIZE)
    first, second, third = (free.take(4 * PAGE) for _ in range(3))
    assert (first, second, third) == (0, 4 * PAGE, 8 * PAGE)
    free.give_back(0, 4 * PAGE)
    assert free.take(5 * PAGE) == 12 * PAGE
    assert free.take(4 * PAGE) == 0


def test_a_batch_is_whole_or_nothing() -> None:
    pool = Pool(8 * PAGE)
    try:
        assert pool.allocate((1024,), torch.float32, 9) is None
        assert pool.used_nbytes == 0
        pieces = pool.allocate((1000,), torch.float32, 8)
        assert pieces is not None
        assert [piece.offset for piece in pieces] == [index * PAGE for index in range(8)]
        assert {piece.nbytes for piece in pieces} == {4000}
        assert pool.used_nbytes == 8 * PAGE
        assert pool.allocate((1,), torch.uint8, 1) is None
        assert pool.allocate((1,), torch.uint8, 0) is None
        pool.free(pieces[3])
        assert pool.used_nbytes == 7 * PAGE
        assert pool.allocate((1,), torch.uint8, 2) is None
        assert pool.allocate((1,), torch.uint8, 1) is not None
    finally:
        pool.close()


@pytest.mark.parametrize("shape", [(0,), (-1,), (2, -3)])
def test_absurd_shapes_are_refused(shape: tuple[int, ...]) -> None:
    pool = Pool(SIZE)
    try:
        assert pool.allocate((2**62, 2**62), torch.float32, 1) is None
        with pytest.raises(UsageError):
            pool.allocate(shape, torch.float32, 1)
        assert pool.used_nbytes == 0
    finally:
        pool.close()


def test_pieces_are_not_zeroed() -> None:
    pool = Pool(SIZE)
    try:
        for value in (7, 9):
            pieces = pool.allocate((100,), torch.int32, 1)
            assert pieces is not None
            before = pool.tensor(pieces[0])[0].item()
            assert before == (0 if value == 7 else 7)
            pool.tensor(pieces[0]).fill_(value)
            pool.free(pieces[0])
    finally:
        pool.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.float64])
def test_every_dtype_is_a_view_of_the_same_bytes(dtype: torch.dtype) -> None:
    pool = Pool(SIZE)
    try:
        pieces = pool.allocate((2, 3, 5), dtype, 2)
        assert pieces is not None
        view = pool.tensor(pieces[1])
        assert view.dtype is dtype
        assert view.shape == (2, 3, 5)
        view.copy_(torch.ones(2, 3, 5))
        assert pool.tensor(pieces[1]).float().sum() == 30
    finally:
        pool.close()


def test_the_shared_file_is_private_and_goes() -> None:
    name = unique_shm_name()
    pool = Pool(SIZE, name)
    path = Path("/dev/shm", pool.shm_name)
    try:
        assert pool.shm_name == f"lmcache_l1_pool_{name}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_size == SIZE
    finally:
        pool.close()
    assert not path.exists()


def test_a_file_that_is_no_longer_ours_is_let_be() -> None:
    name = unique_shm_name()
    old = Pool(SIZE, name)
    new = Pool(SIZE, name)
    path = Path("/dev/shm", new.shm_name)
    try:
        old.close()
        assert path.exists(), "a server that comes back has made a new file under the old name"
    finally:
        new.close()
    assert not path.exists()


def test_closing_with_a_live_tensor_does_not_pull_the_memory_away() -> None:
    pool = Pool(SIZE)
    pieces = pool.allocate((10,), torch.float32, 1)
    assert pieces is not None
    view = pool.tensor(pieces[0])
    pool.close()
    view.fill_(3)
    assert view.sum() == 30
    with pytest.raises(UsageError):
        pool.tensor(pieces[0])


def test_names() -> None:
    assert full_name("x") == full_name("/x") == full_name("lmcache_l1_pool_x") == "lmcache_l1_pool_x"
    with pytest.raises(UsageError):
        Pool(SIZE, "a/b")
    with pytest.raises(UsageError):
        Pool(PAGE - 1)
    assert not os.path.exists("/dev/shm/lmcache_l1_pool_a")
