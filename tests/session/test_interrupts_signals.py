"""Deferred signals: none is lost, all handlers are back afterwards, and a call that waits is interrupted at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.session import Reservation
from lmcache_sdk.session.interrupts import deferred, window
from tests.fix_fake_server import NOTHING, Delivery
from tests.fix_faults import late
from tests.session.desk import WRITE_TTL, Writer, chunk_bytes, store_slots
from tests.session.office import Office
from tests.session.test_session_sockets import Branch

INT, ONE, TWO = signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals whose own handlers ran, in order. Every handler is as before at the end."""
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in (ONE, TWO)}
    yield came
    for number in (ONE, TWO):
        assert signal.getsignal(number) is note
        signal.signal(number, before[number])
    assert signal.getsignal(INT) is signal.default_int_handler


def in_block(*numbers: int) -> None:
    with deferred():
        for number in numbers:
            signal.raise_signal(number)


def test_handlers_run_behind_the_block_in_the_order_of_their_signals(heard: list[int]) -> None:
    with deferred():
        for number in (ONE, TWO, ONE):
            signal.raise_signal(number)
        assert heard == []
    assert heard == [ONE, TWO, ONE]


@pytest.mark.parametrize("numbers", [(INT, ONE), (ONE, INT), (INT, INT, TWO)])
def test_no_signal_is_lost_when_the_handler_of_another_raises(heard: list[int], numbers: Sequence[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        in_block(*numbers)
    assert heard == [number for number in numbers if number != INT]


def test_a_window_lets_in_what_waits_and_what_comes(heard: list[int]) -> None:
    with deferred():
        signal.raise_signal(ONE)
        with window():
            assert heard == [ONE]
            signal.raise_signal(TWO)
            assert heard == [ONE, TWO]
        signal.raise_signal(ONE)
        assert heard == [ONE, TWO]
    assert heard == [ONE, TWO, ONE]


def test_handlers_wait_again_behind_a_window_that_was_interrupted(heard: list[int]) -> None:
    with deferred():
        with pytest.raises(KeyboardInterrupt), window():
            signal.raise_signal(INT)
        signal.raise_signal(ONE)
        assert heard == []
    assert heard == [ONE]


def test_handlers_are_back_whatever_the_block_raises(heard: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), deferred():
        print(1 // 0)
    signal.raise_signal(ONE)
    assert heard == [ONE]


def test_a_window_without_a_block_changes_nothing(heard: list[int]) -> None:
    with window():
        signal.raise_signal(ONE)
        assert heard == [ONE]


def test_signals_that_python_does_not_handle_stay_so() -> None:
    previous = signal.signal(ONE, signal.SIG_IGN)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    try:
        with deferred():
            assert signal.getsignal(ONE) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(ONE, previous)
        signal.signal(signal.SIGHUP, hangup)


def test_another_thread_defers_nothing(heard: list[int]) -> None:
    """Only the main thread runs handlers, and only it may set them."""
    errors: list[BaseException] = []
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with deferred(), window():
                inside.set()
                leave.wait(5)
        except BaseException as error:  # noqa: BLE001  # handed to the test
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(5)
    signal.raise_signal(ONE)
    assert heard == [ONE]
    leave.set()
    thread.join(5)
    assert errors == []


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_an_interruption_between_two_messages_waits_for_the_end_of_a_call_that_never_waits(office: Office) -> None:
    office.cache(2)
    take = office.server.take

    def interrupted(frames: Sequence[bytes]) -> list[Delivery]:
        if len(office.server.requests) == 1:  # the first of the call; one was the registration
            signal.raise_signal(INT)
        return take(frames)

    office.server.take = interrupted  # type: ignore[method-assign]  # a spy
    with pytest.raises(KeyboardInterrupt):
        office.look()
    assert office.server.held() == NOTHING and office.server.names()[-1] == "EndSession"


def test_an_interruption_in_the_middle_of_a_copy_finds_it_whole(office: Office) -> None:
    writer = Writer(office)
    write = writer.write

    def interrupted(prepared: p.PreparedStore) -> None:
        signal.raise_signal(INT)
        write(prepared)

    writer.write = interrupted  # type: ignore[method-assign]  # a spy
    with pytest.raises(KeyboardInterrupt), office.call("store") as operation:
        store_slots(Reservation(operation, 0, 3, WRITE_TTL, clock=office.clock), writer)
    assert office.published() == [chunk_bytes(index) for index in range(3)]
    assert office.server.held() == NOTHING and writer.writes == 1


@pytest.fixture
def branch() -> Iterator[Branch]:
    made = Branch()
    with made.port:
        made.open()
        yield made
        made.session.close()


@pytest.fixture
def control_c() -> Iterator[None]:
    """Somebody presses Ctrl-C in a moment."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), INT))
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("kind", [p.Lookup, p.QueryPrefetchStatus, p.PrepareRetrieve])
def test_a_wait_is_interrupted_at_once_and_what_is_held_is_given_back(
    branch: Branch, control_c: None, kind: type[p.Request[object]]
) -> None:
    branch.server.on(kind, late(0.7))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        branch.read()
    assert time.monotonic() - began < 5
    branch.session.close()
    assert branch.server.held() == NOTHING and branch.server.instances == {}


def test_a_store_that_is_interrupted_while_it_waits_is_completed(branch: Branch, control_c: None) -> None:
    branch.server.on(p.PrepareStore, late(0.7))
    with pytest.raises(KeyboardInterrupt):
        branch.store(Writer(branch))
    branch.session.close()
    assert branch.published()[-3:] == [chunk_bytes(index) for index in range(3)]
    assert branch.server.held() == NOTHING and branch.server.instances == {}


def test_a_pause_is_interrupted_at_once(branch: Branch, control_c: None) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        branch.session.pause(30)
    assert time.monotonic() - began < 5
