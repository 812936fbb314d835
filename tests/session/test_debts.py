"""What calls could not give back: kept with its channel, worked on by whoever comes next, by one at a time."""

from __future__ import annotations

import threading

import pytest

from lmcache_sdk.errors import DeadlineExceededError, Fate, StoreRejectedError
from lmcache_sdk.session import Deadline, Operation
from lmcache_sdk.session.debts import DebtBook
from tests.fix_faults import FakeClock
from tests.session.desk import Desk
from tests.session.test_operation import Debt


class Book:
    """A book, and what came back from it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.back: list[Operation] = []
        self.book = DebtBook(self.changed, self.back.append)

    def add(self, key: object, *answers: bool, stuck: str = "", transfer_open: bool = True) -> tuple[Operation, Debt]:
        debt = Debt(list(answers), stuck=stuck, transfer_open=transfer_open)
        operation = Desk().operation
        operation.owe(debt)
        self.book.add(key, operation)
        return operation, debt


def fail(deadline: Deadline) -> bool:
    raise ZeroDivisionError


@pytest.fixture
def kept() -> Book:
    return Book()


def test_an_empty_book_owes_nothing(kept: Book) -> None:
    assert kept.book.settle(Deadline.after(0)) and len(kept.book) == 0
    kept.book.settle_key("a", Deadline.after(0), "x")


def test_a_debt_stays_until_it_is_settled(kept: Book) -> None:
    operation, debt = kept.add("a", False, False, True)
    assert not kept.book.settle(Deadline.after(0)) and not kept.book.settle(Deadline.after(0))
    assert len(kept.book) == 1 and kept.back == []
    assert kept.book.settle(Deadline.after(0))
    assert len(kept.book) == 0 and kept.back == [operation] and debt.asked == 3


def test_one_debt_does_not_keep_the_others(kept: Book) -> None:
    kept.add("a", False)
    operation, _ = kept.add("b", True)
    assert not kept.book.settle(Deadline.after(0))
    assert kept.back == [operation] and len(kept.book) == 1


def test_a_call_on_the_same_tokens_waits_for_them(kept: Book, clock: FakeClock) -> None:
    kept.add("a", False, False, True)
    kept.book.settle_key("a", Deadline.after(10), "store")
    assert len(kept.book) == 0


def test_a_call_on_other_tokens_does_not_wait(kept: Book, clock: FakeClock) -> None:
    kept.add("a")
    kept.book.settle_key("b", Deadline.after(10), "store")
    assert len(kept.book) == 1


def test_what_is_no_transfer_does_not_keep_the_same_tokens(kept: Book, clock: FakeClock) -> None:
    """Locks of an earlier lookup belong to another session: nothing of theirs meets this call's."""
    kept.add("a", transfer_open=False)
    kept.book.settle_key("a", Deadline.after(10), "store")
    assert len(kept.book) == 1


def test_waiting_ends_at_the_deadline_and_nothing_was_sent(kept: Book) -> None:
    operation, debt = kept.add("a")
    debt.work = lambda deadline: threading.Event().wait(deadline.remaining())
    with pytest.raises(DeadlineExceededError) as caught:
        kept.book.settle_key("a", Deadline.after(0.1), "store")
    assert caught.value.fate is Fate.NOT_SENT and caught.value.step.startswith("store: an earlier call")
    assert len(kept.book) == 1 and kept.back == [] and operation.owing


def test_what_only_time_can_end_is_said_at_once(kept: Book, clock: FakeClock) -> None:
    kept.add("a", False, stuck="slots of another shape")
    with pytest.raises(StoreRejectedError, match="slots of another shape") as caught:
        kept.book.settle_key("a", Deadline.after(60), "store")
    assert caught.value.fate is Fate.NOT_SENT and clock.now == 1000.0


def test_an_error_of_one_debt_keeps_it_and_frees_it_for_others(kept: Book) -> None:
    _, debt = kept.add("a")
    debt.work = fail
    with pytest.raises(ZeroDivisionError):
        kept.book.settle(Deadline.after(0))
    assert len(kept.book) == 1
    debt.work, debt.answers = None, [True]
    assert kept.book.settle(Deadline.after(0))


def test_one_works_on_a_debt_and_others_wait_for_it(kept: Book) -> None:
    """Two threads on one socket is what ZeroMQ forbids."""
    working, done = threading.Event(), threading.Event()
    workers: list[str] = []
    _, debt = kept.add("a")

    def fulfil(deadline: Deadline) -> bool:
        workers.append(threading.current_thread().name)
        working.set()
        return done.wait(5)

    debt.work = fulfil
    first = threading.Thread(target=kept.book.settle, args=(Deadline.after(10),))
    first.start()
    assert working.wait(5)
    assert not kept.book.settle(Deadline.after(0))
    second = threading.Thread(target=kept.book.settle_key, args=("a", Deadline.after(10), "store"))
    second.start()
    done.set()
    for thread in (first, second):
        thread.join(10)
        assert not thread.is_alive()
    assert workers == [first.name] and len(kept.book) == 0


def test_giving_up_empties_the_book(kept: Book) -> None:
    operation, _ = kept.add("a")
    assert kept.book.give_up() == [operation]
    assert len(kept.book) == 0 and kept.back == []
