"""One call at a time per key, whose waiting ends by its deadline or by a close."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lmcache_sdk.errors import DeadlineExceededError, Fate, SessionClosedError, UsageError
from lmcache_sdk.session import Deadline
from lmcache_sdk.session.gate import KeyGate


def made_gate(check: Callable[[], None] = lambda: None) -> tuple[KeyGate, threading.Condition]:
    condition = threading.Condition()
    return KeyGate(condition, check), condition


@contextlib.contextmanager
def running(*targets: Callable[[], object]) -> Iterator[list[threading.Thread]]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@contextlib.contextmanager
def held_elsewhere(gate: KeyGate, key: str) -> Iterator[None]:
    """Another thread holds the key for the time of the block."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with gate.hold(key, Deadline.after(1), "x"):
            held.set()
            over.wait(10)

    with running(hold):
        assert held.wait(5)
        yield
        over.set()


def test_a_thread_that_would_wait_for_itself_is_told() -> None:
    gate, _ = made_gate()
    with gate.hold("a", Deadline.after(1), "view"):
        with pytest.raises(UsageError, match=r"^retrieve: this thread"), gate.hold("a", Deadline.after(9), "retrieve"):
            pytest.fail("two at a time")
        with gate.hold("b", Deadline.after(1), "x"):
            pass
    with gate.hold("a", Deadline.after(0.0), "x"):
        pass


def test_a_key_of_a_thread_that_has_ended_is_waited_for() -> None:
    """A view can be entered in one thread and left in another; the id of a thread that has ended is used again."""
    gate, _ = made_gate()
    with contextlib.ExitStack() as stack:
        first = threading.Thread(target=lambda: stack.enter_context(gate.hold("a", Deadline.after(1), "view")))
        first.start()
        first.join(10)
        errors: list[BaseException] = []

        def call() -> None:
            try:
                with gate.hold("a", Deadline.after(0.01), "retrieve"):
                    pass
            except (DeadlineExceededError, UsageError) as error:
                errors.append(error)

        for _ in range(200):
            with running(call) as [thread]:
                pass
            assert isinstance(errors[-1], DeadlineExceededError)
            if thread.ident == first.ident:
                break
        else:
            pytest.fail("the id of the thread was not used again")
    with gate.hold("a", Deadline.after(0.0), "x"):
        pass


def test_another_key_passes() -> None:
    gate, _ = made_gate()
    with gate.hold("a", Deadline.after(1), "x"), gate.hold("b", Deadline.after(1), "x"):
        pass


def test_the_same_key_passes_afterwards_also_after_an_error() -> None:
    gate, _ = made_gate()
    with pytest.raises(KeyError), gate.hold("a", Deadline.after(1), "x"):
        raise KeyError
    with gate.hold("a", Deadline.after(0.0), "x"):
        pass


def test_waiting_ends_at_the_deadline_and_nothing_was_sent() -> None:
    gate, _ = made_gate()
    with held_elsewhere(gate, "a"):
        with pytest.raises(DeadlineExceededError) as caught, gate.hold("a", Deadline.after(0.02), "store"):
            pytest.fail("two at a time")
        assert caught.value.fate is Fate.NOT_SENT
        assert caught.value.step.startswith("store: ")


def test_a_waiter_that_gave_up_leaves_the_key_to_others() -> None:
    gate, _ = made_gate()
    late = pytest.raises(DeadlineExceededError)
    with held_elsewhere(gate, "a"), late, gate.hold("a", Deadline.after(0.01), "x"):
        pass
    with gate.hold("a", Deadline.after(0.0), "x"):
        pass


def test_never_two_at_a_time_and_everybody_gets_a_turn() -> None:
    gate, _ = made_gate()
    inside: list[int] = []
    most: list[int] = []

    def enter() -> None:
        for _ in range(25):
            with gate.hold("a", Deadline.after(10), "x"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0)
                inside.pop()

    with running(*[enter] * 8):
        pass
    assert len(most) == 200 and max(most) == 1


def test_a_close_ends_the_waiting() -> None:
    closed = threading.Event()

    def check() -> None:
        if closed.is_set():
            raise SessionClosedError("closed")

    gate, condition = made_gate(check)
    caught: list[BaseException] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            with gate.hold("a", Deadline.after(10), "x"):
                pass
        except SessionClosedError as error:
            caught.append(error)

    with gate.hold("a", Deadline.after(1), "x"), running(wait) as [thread]:
        waiting.wait(5)
        while thread.is_alive():  # it may not wait yet: notified until it does
            with condition:
                closed.set()
                condition.notify_all()
            thread.join(0.01)
    assert len(caught) == 1
