"""Result memory: lent once at a time, back when the last tensor on it is gone, never more idle than allowed."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

import pytest

from lmcache_sdk.session.buffers import MIN_NBYTES, BufferPool

MIB = 2**20


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_small_results_and_a_pool_that_is_switched_off_lend_nothing() -> None:
    assert BufferPool(0).lend(64 * MIB) is None
    assert BufferPool(64 * MIB).lend(MIN_NBYTES - 1) is None


def test_a_buffer_has_the_bytes_asked_for_and_is_writable() -> None:
    view = BufferPool(64 * MIB).lend(3 * MIB + 5)
    assert view is not None and view.nbytes == 3 * MIB + 5
    view[-1] = 7
    assert view[-1] == 7


def test_a_dropped_buffer_is_lent_again_and_one_in_use_never() -> None:
    pool = BufferPool(64 * MIB)
    first, second = pool.lend(4 * MIB), pool.lend(4 * MIB)
    assert first is not None and second is not None
    places = {address(first), address(second)}
    assert len(places) == 2 and pool.idle_nbytes == 0
    kept = address(second)
    del first
    assert pool.idle_nbytes == 4 * MIB
    third = pool.lend(4 * MIB)
    assert third is not None and address(third) in places - {kept}
    assert pool.idle_nbytes == 0


def test_an_alias_of_the_view_keeps_the_memory() -> None:
    """Tensors hold the view itself; torch never slices it."""
    pool = BufferPool(64 * MIB)
    view = pool.lend(4 * MIB)
    assert view is not None
    alias = view
    del view
    assert pool.idle_nbytes == 0
    del alias
    assert pool.idle_nbytes == 4 * MIB


def test_the_smallest_that_fits_is_taken_and_none_much_too_large() -> None:
    pool = BufferPool(256 * MIB)
    held = [pool.lend(size * MIB) for size in (64, 8, 10)]
    places = [address(view) for view in held if view is not None]
    held.clear()
    assert pool.idle_nbytes == 82 * MIB
    taken = pool.lend(6 * MIB)
    assert taken is not None and address(taken) == places[1]
    fresh = pool.lend(4 * MIB)
    assert fresh is not None and address(fresh) not in places


def test_no_more_is_kept_idle_than_allowed_and_the_newest_stays() -> None:
    pool = BufferPool(10 * MIB)
    views = [pool.lend(4 * MIB) for _ in range(4)]
    last = views[3]
    assert last is not None
    place = address(last)
    del last
    while views:
        views.pop(0)
    assert pool.idle_nbytes == 8 * MIB
    again = pool.lend(4 * MIB)
    assert again is not None and address(again) == place


def test_a_closed_pool_keeps_nothing_and_what_is_lent_stays_valid() -> None:
    pool = BufferPool(64 * MIB)
    idle, used = pool.lend(4 * MIB), pool.lend(4 * MIB)
    assert used is not None
    used[0] = 9
    del idle
    pool.close()
    assert pool.idle_nbytes == 0 and used[0] == 9
    assert pool.lend(4 * MIB) is None
    del used
    assert pool.idle_nbytes == 0


def test_a_pool_that_is_gone_leaves_the_buffer_to_its_user() -> None:
    pool = BufferPool(64 * MIB)
    view = pool.lend(4 * MIB)
    assert view is not None
    view[0] = 5
    del pool
    gc.collect()
    assert view[0] == 5


def test_a_view_that_dies_while_the_pool_is_busy_comes_back_later() -> None:
    pool = BufferPool(64 * MIB)
    view = pool.lend(4 * MIB)
    with pool._lock:  # as when the collector runs inside lend()
        del view
    assert pool.idle_nbytes == 4 * MIB


def test_many_threads_never_share_a_buffer() -> None:
    pool = BufferPool(64 * MIB)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            view = pool.lend(2 * MIB)
            assert view is not None
            view[0], view[-1] = number, number
            if (view[0], view[-1]) != (number, number):
                wrong.append(number)
            del view

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and "0 lent" in repr(pool)
    assert pool.idle_nbytes <= 8 * 2 * MIB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_writes_to_a_copy() -> None:
    view = BufferPool(64 * MIB).lend(4 * MIB)
    assert view is not None
    view[0] = 1
    child = os.fork()
    if child == 0:
        view[0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert view[0] == 1


def test_the_memory_of_messages_is_kept_within_the_limit() -> None:
    pool = BufferPool(1000)
    first, second = memoryview(bytearray(400)), memoryview(bytearray(600))
    pool.keep_messages([first, second])
    assert pool.take_message(500) is None
    assert pool.take_message(600) is second and pool.take_message(600) is None
    pool.keep_messages([memoryview(bytearray(1001))])
    assert pool.take_message(1001) is None and pool.take_message(400) is None
    pool.keep_messages([first])
    pool.close()
    assert pool.take_message(400) is None
