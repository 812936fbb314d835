"""An interruption comes at a wait: elsewhere it would lose a reply, or a reservation that then gets published."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk.devserver import DevServer, PlayedEngine, unique_shm_name
from lmcache_sdk.session.interrupts import deferred, window

CHUNKS = 8


class AlarmError(Exception):
    """What the handler raises."""


@pytest.fixture(autouse=True)
def alarms() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_it_waits_for_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(AlarmError), deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGALRM)
        done = True
    assert done


def test_it_comes_in_a_window() -> None:
    passed = False
    with pytest.raises(AlarmError), deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGALRM)
        with window():
            passed = True
    assert not passed


def test_blocks_nest_and_handlers_come_back() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with deferred():
        with deferred():
            assert signal.getsignal(signal.SIGALRM) != handler
        assert signal.getsignal(signal.SIGALRM) != handler
        with window():
            pass
        assert signal.getsignal(signal.SIGALRM) != handler
    assert signal.getsignal(signal.SIGALRM) == handler


def test_in_a_window_it_comes_at_once_and_closes_the_window() -> None:
    went_on = False

    def wait() -> None:
        nonlocal went_on
        with window():
            signal.raise_signal(signal.SIGALRM)
            went_on = True

    with deferred():
        with pytest.raises(AlarmError):
            wait()
        signal.raise_signal(signal.SIGALRM)  # clean-up: it has to wait again
        with pytest.raises(AlarmError), window():
            pass
    assert not went_on


def test_a_handler_that_returns_leaves_the_window_open() -> None:
    rung: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, _: rung.append(number))
    with deferred():
        signal.raise_signal(signal.SIGALRM)
        assert rung == []
        with window():
            assert len(rung) == 1
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGALRM)
            assert len(rung) == 3
        signal.raise_signal(signal.SIGALRM)
        assert len(rung) == 3
    assert len(rung) == 4


def test_a_handler_may_put_another_in_its_place() -> None:
    """As one does that lets a second Ctrl-C end the process."""
    later: list[int] = []

    def replace(number: int, frame: FrameType | None) -> None:
        signal.signal(number, lambda number_, _: later.append(number_))

    signal.signal(signal.SIGALRM, replace)
    with deferred(), window():
        signal.raise_signal(signal.SIGALRM)
    signal.raise_signal(signal.SIGALRM)
    assert later == [signal.SIGALRM]


def test_what_was_there_before_can_be_called_by_what_replaces_it() -> None:
    """A handler that chains to the one before it, as many do, and is put in place while a call waits."""
    rung: list[str] = []

    def first(number: int, _: FrameType | None) -> None:
        rung.append("first")
        if len(rung) > 1:
            return
        before = signal.getsignal(number)

        def chained(number_: int, frame: FrameType | None) -> None:
            rung.append("chained")
            assert callable(before)
            before(number_, frame)

        signal.signal(number, chained)

    signal.signal(signal.SIGALRM, first)
    with deferred(), window():
        signal.raise_signal(signal.SIGALRM)
    signal.raise_signal(signal.SIGALRM)
    with deferred(), window():
        signal.raise_signal(signal.SIGALRM)
    assert rung == ["first", "chained", "first", "chained", "first"]


def test_a_handler_that_is_put_back_later_is_the_one_that_was_there() -> None:
    rung: list[int] = []
    kept: list[Callable[[int, FrameType | None], object]] = []

    def ring(number: int, _: FrameType | None) -> None:
        rung.append(number)
        before = signal.signal(number, signal.SIG_IGN)
        assert callable(before)
        kept.append(before)

    def put_back() -> None:
        signal.signal(signal.SIGALRM, kept.pop())

    signal.signal(signal.SIGALRM, ring)
    with deferred(), window():
        signal.raise_signal(signal.SIGALRM)
    put_back()
    signal.raise_signal(signal.SIGALRM)
    assert len(rung) == 2
    put_back()
    with deferred():
        signal.raise_signal(signal.SIGALRM)
        assert len(rung) == 2
    assert len(rung) == 3


def test_a_handler_put_in_place_in_a_window_waits_as_the_first_one() -> None:
    """A second Ctrl-C that ends the process does it between two waits, too, and not in the middle of one's clean-up."""
    second = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, lambda number, _: bool(signal.signal(number, second)))
    passed = False
    with pytest.raises(AlarmError), deferred():  # noqa: PT012
        with window():
            signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGALRM)
        passed = True
    assert passed


def test_a_call_inside_a_handler_is_deferred_as_any_other() -> None:
    order: list[str] = []

    def calls(number: int, frame: FrameType | None) -> None:
        with deferred():
            if len(order) < 3:
                order.append("begin")
                signal.raise_signal(signal.SIGALRM)
                order.append("end")

    signal.signal(signal.SIGALRM, calls)
    with deferred(), window():
        signal.raise_signal(signal.SIGALRM)
    assert order == ["begin", "end", "begin", "end"]


@pytest.mark.parametrize("shm_name", [unique_shm_name(), ""], ids=["shm", "inline"])
def test_interrupted_calls_leave_nothing_and_publish_nothing_wrong(shm_name: str) -> None:
    engine = PlayedEngine(model_name="m", num_layers=2, num_kv_heads=1, head_dim=16)
    chooser = random.Random(7)
    with DevServer(models=[engine], shm_name=shm_name, l1_size_bytes=2**28) as server:
        with lmc_sdk.connect(server.url, server.http_url, "m", 10.0) as ctx:
            kv = torch.randn(2, 2, CHUNKS * ctx.chunk_size, 16).to(torch.bfloat16)
            began = time.perf_counter()
            ctx.store(kv, range(kv.shape[2]))
            usual = time.perf_counter() - began
            interrupted = 0
            for turn in range(1, 61):
                tokens = range(turn * 10_000, turn * 10_000 + kv.shape[2])
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, chooser.uniform(0.0002, usual))
                        ctx.store(kv, tokens)
                        ctx.retrieve(tokens)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may still ring here
                except AlarmError:
                    interrupted += 1
                found = ctx.retrieve(tokens)
                assert found is None or torch.equal(found, kv[:, :, : found.shape[2]])
            assert interrupted > 10
            end = time.monotonic() + 2.0  # nobody has waited for the answer to the last END_SESSION
            while (held := server.held()).sessions and time.monotonic() < end:
                time.sleep(0.001)
            assert (held.read_locks, held.write_reservations, held.sessions) == (0, 0, 0)
        assert server.held().registrations == frozenset()
