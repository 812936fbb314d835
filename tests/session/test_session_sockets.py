"""A session on real sockets: calls in flight at a close, a server that dies, a fork, connections that fail."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import (
    ConnectError,
    ConnectionLostError,
    DeadlineExceededError,
    KVCacheSDKError,
    SessionClosedError,
)
from lmcache_sdk.session import Addresses, Deadline, Identity, ReadLease, Reservation, Session
from lmcache_sdk.values import TokenIds
from tests.fix_fake_server import NOTHING, Action, Chunk, FakeServer
from tests.fix_faults import ignored, late, silence
from tests.fix_forks import held_by_another_thread, in_child
from tests.session.desk import CHUNK, READ_TTL, SLOT, TOKENS, WRITE_TTL, Desk, Writer, chunk_bytes, store_slots
from tests.session.office import SHAPE
from tests.session.ports import MessagePort, closed_port

LONG: Final = 30.0


class Branch(Desk):
    """A session to a FakeServer over TCP."""

    def __init__(self) -> None:
        super().__init__()
        self.server = FakeServer(pool=self.pool, shm_name="lmcache_l1_pool_x")
        self.server.cache(TOKENS, [Chunk(*SLOT, chunk_bytes(index)) for index in range(2)])
        self.port = MessagePort(self.server)
        self.session = Session(Addresses(self.port.url, "http://127.0.0.1:1"), self.server.dialect)

    def open(self) -> None:
        self.instance, _ = self.session.register("private", SHAPE, Deadline.after(LONG))
        self.session.opened()

    def read(self, tokens: list[int] | None = None, seconds: float = LONG) -> int:
        ids = TokenIds((TOKENS if tokens is None else tokens)[: 3 * CHUNK])
        identity = Identity("m", 1, self.instance, CHUNK)
        with self.session.operation("retrieve", identity, ids, "", Deadline.after(seconds), exclusive=True) as made:
            lease = ReadLease(made, READ_TTL, shm=True)
            hit = lease.acquire()
            if hit:
                entry = lease.prepare(hit)
                lease.received(entry)
                lease.commit(entry)
            return hit

    def store(self, writer: Writer, seconds: float = LONG) -> tuple[int, ...]:
        identity = Identity("m", 1, self.instance, CHUNK)
        ids = TokenIds([5, *TOKENS[1 : 3 * CHUNK]])
        with self.session.operation("store", identity, ids, "", Deadline.after(seconds), exclusive=True) as made:
            reservation = Reservation(made, 0, 3, WRITE_TTL)
            store_slots(reservation, writer)
            return reservation.written


@pytest.fixture
def branch() -> Iterator[Branch]:
    made = Branch()
    with made.port:
        made.open()
        yield made
        made.session.close()


class Runner:
    """A call in a thread of its own, and how it ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  # handed to the test
            self.error = error

    def ended(self, seconds: float = 10.0) -> BaseException | None:
        self.thread.join(seconds)
        assert not self.thread.is_alive()
        return self.error


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# ---- calls in flight at a close --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [p.Lookup, p.QueryPrefetchStatus, p.PrepareRetrieve])
def test_a_call_in_flight_fails_at_once_and_gives_back_what_it_holds(
    branch: Branch, kind: type[p.Request[object]]
) -> None:
    branch.server.on(kind, late(0.3))
    call = Runner(branch.read)
    branch.server.wait_until(lambda: bool(branch.server.asked(kind)))
    with within(3.0):
        branch.session.close()
    assert isinstance(call.ended(), SessionClosedError)
    assert branch.server.held() == NOTHING and branch.server.instances == {}
    assert branch.server.names()[-2:] == ["EndSession", "Unregister"]


def test_a_store_in_flight_is_completed_and_then_fails(branch: Branch) -> None:
    branch.server.on(p.PrepareStore, late(0.3))
    call = Runner(lambda: branch.store(Writer(branch)))
    branch.server.wait_until(lambda: bool(branch.server.asked(p.PrepareStore)))
    with within(3.0):
        branch.session.close()
    assert isinstance(call.ended(), SessionClosedError)
    assert branch.server.names()[-3:] == ["CommitStore", "EndSession", "Unregister"]
    assert branch.server.held() == NOTHING and branch.published()[-3:] == [chunk_bytes(index) for index in range(3)]


def test_many_calls_in_flight(branch: Branch) -> None:
    branch.server.always(p.QueryPrefetchStatus, late(0.2))
    calls = [Runner(lambda number=number: branch.read([number, *TOKENS[1:]])) for number in range(8)]  # type: ignore[misc]  # bound now
    calls += [Runner(branch.read) for _ in range(4)]  # three of them wait for the first
    branch.server.wait_until(lambda: len(branch.server.asked(p.QueryPrefetchStatus)) >= 9)
    with within(4.0):
        branch.session.close()
    assert all(isinstance(call.ended(), SessionClosedError) for call in calls)
    assert branch.server.held() == NOTHING and branch.server.instances == {}


def test_a_call_that_waits_for_its_turn_fails_at_once(branch: Branch) -> None:
    branch.server.on(p.Lookup, late(0.2))
    first = Runner(branch.read)
    branch.server.wait_until(lambda: bool(branch.server.asked(p.Lookup)))
    second = Runner(branch.read)
    branch.session.close()
    assert isinstance(first.ended(), SessionClosedError) and isinstance(second.ended(), SessionClosedError)
    assert len(branch.server.asked(p.Lookup)) == 1 and branch.server.held() == NOTHING


def test_a_call_that_pauses_fails_at_once(branch: Branch) -> None:
    call = Runner(lambda: branch.session.pause(LONG))
    with within(2.0):
        branch.session.close()
        assert isinstance(call.ended(), SessionClosedError)


@pytest.mark.parametrize("action", [silence, ignored])
def test_a_silent_server_bounds_a_close_with_calls_in_flight(branch: Branch, action: Action) -> None:
    for kind in branch.server.dialect.rules:
        branch.server.always(kind, action)
    call = Runner(branch.read)
    branch.server.wait_until(lambda: bool(branch.server.asked(p.Lookup)))
    with within(4.0):
        branch.session.close()
    assert isinstance(call.ended(), SessionClosedError)


def test_closes_at_the_same_time(branch: Branch) -> None:
    closes = [Runner(branch.session.close) for _ in range(6)]
    assert [close.ended() for close in closes] == [None] * 6
    branch.server.wait_until(lambda: len(branch.server.asked(p.Unregister)) == 1)


def test_calls_on_the_same_tokens_come_one_after_the_other(branch: Branch) -> None:
    """Two reads of one key in flight on one instance leave the locks of one behind."""
    calls = [Runner(branch.read) for _ in range(6)]
    assert [call.ended() for call in calls] == [None] * 6
    assert branch.server.held() == NOTHING
    names = [name for name in branch.server.names() if name in ("PrepareRetrieve", "CommitRetrieve")]
    assert names == ["PrepareRetrieve", "CommitRetrieve"] * 6


def test_calls_on_other_tokens_run_side_by_side(branch: Branch) -> None:
    branch.server.always(p.Lookup, late(0.3))
    with within(2.0):
        calls = [Runner(lambda number=number: branch.read([number, *TOKENS[1:]])) for number in range(8)]  # type: ignore[misc]  # bound now
        assert [call.ended() for call in calls] == [None] * 8
    assert branch.server.held() == NOTHING


# ---- a server that dies ----------------------------------------------------------------------------------------------


def test_a_server_that_dies_is_a_loss_at_once_and_the_close_is_too(branch: Branch) -> None:
    branch.server.on(p.QueryPrefetchStatus, silence)
    call = Runner(branch.read)
    branch.server.wait_until(lambda: bool(branch.server.asked(p.QueryPrefetchStatus)))
    with within(4.0):
        branch.port.close()
        assert isinstance(call.ended(), ConnectionLostError)
        branch.session.close()


def test_a_server_that_died_while_nobody_called(branch: Branch) -> None:
    branch.read()
    branch.port.close()
    with within(4.0):
        with pytest.raises(ConnectionLostError):
            [branch.read(seconds=5) for _ in range(100)]  # the loss arrives in its own time
        branch.session.close()


# ---- a fork ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_is_told_so_and_harms_nobody(branch: Branch) -> None:
    branch.read()

    def work() -> None:
        with pytest.raises(SessionClosedError):
            branch.read()
        branch.session.close()
        branch.session.abandon()

    assert in_child(work) == 0
    assert branch.read() == 2
    branch.session.close()
    assert branch.server.held() == NOTHING and len(branch.server.asked(p.Unregister)) == 1


def test_a_forked_child_can_have_a_session_of_its_own(branch: Branch) -> None:
    branch.read()

    def work() -> None:
        session = Session(Addresses(branch.port.url, "http://127.0.0.1:1"), branch.server.dialect)
        session.register("child", SHAPE, Deadline.after(10))
        session.opened()
        session.close()

    assert in_child(work) == 0
    assert branch.read() == 2
    names = [request.registration.model_name for request in branch.server.asked(p.Register)]
    assert names == ["private", "child"] and len(branch.server.instances) == 1


def session_and_gate(branch: Branch) -> AbstractContextManager[object]:
    return held_by_another_thread(branch.session._changed)


def channels(branch: Branch) -> AbstractContextManager[object]:
    return held_by_another_thread(branch.session._channels._lock)


def no_lock(branch: Branch) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


@pytest.mark.parametrize("held", [no_lock, session_and_gate, channels])
def test_a_forked_child_leaves_an_operation_to_its_parent(
    branch: Branch, held: Callable[[Branch], AbstractContextManager[object]]
) -> None:
    """It sends nothing, closes nothing, and waits for no lock that somebody held at the time of the fork."""
    identity = Identity("m", 1, branch.instance, CHUNK)
    ids = TokenIds(TOKENS[:CHUNK])
    with contextlib.ExitStack() as stack:
        made = branch.session.operation("view", identity, ids, "", Deadline.after(LONG), exclusive=True)
        lease = ReadLease(stack.enter_context(made), READ_TTL, shm=True)
        assert lease.acquire() == 1
        said = len(branch.server.requests)
        with held(branch):
            assert in_child(stack.close) == 0
        assert len(branch.server.requests) == said and branch.server.held().read_locks == 1
        assert lease.received(lease.prepare(1)).success
    assert branch.server.held() == NOTHING
    assert branch.read() == 2


# ---- connections that fail -------------------------------------------------------------------------------------------


def test_failed_connections_leave_nothing_behind() -> None:
    """That nothing is left is what `no_leaks` looks at; the errors are kept, as users do."""
    errors: list[KVCacheSDKError] = []
    for _ in range(10):
        session = Session(Addresses(f"tcp://127.0.0.1:{closed_port()}", "http://127.0.0.1:1"), Desk().server.dialect)
        with pytest.raises(ConnectError) as caught:
            session.register("private", SHAPE, Deadline.after(5))
        errors.append(caught.value)
        session.close()
    assert not [name for name in map(str, threading.enumerate()) if "Session" in name]


def test_a_registration_that_times_out_leaves_nothing_behind() -> None:
    branch = Branch()
    with branch.port:
        branch.server.on(p.Register, late(0.2))
        with pytest.raises(DeadlineExceededError):
            branch.session.register("private", SHAPE, Deadline.after(0.05))
        branch.session.close()
        assert branch.server.instances == {}
