"""A session by a fake clock: what it registers it unregisters, what calls owe it settles, and only then it leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    Fate,
    KVCacheSDKError,
    RemoteProtocolError,
    SessionClosedError,
)
from lmcache_sdk.session import (
    Addresses,
    Deadline,
    Identity,
    Operation,
    ReadLease,
    RegisteredShape,
    Reservation,
    Session,
    new_instance_id,
    private_model_name,
)
from lmcache_sdk.values import TokenIds
from tests.fix_fake_server import NOTHING, Chunk, FakeServer
from tests.fix_faults import FakeClock, MemoryTransport, changed, late, says, silence, then, wrong_opcode
from tests.session.desk import CHUNK, READ_TTL, SLOT, TOKENS, WRITE_TTL, Desk, Writer, chunk_bytes

SHAPE: Final = RegisteredShape(
    block_size=CHUNK, num_layers=1, hidden_dim_size=8, dtype_name="uint8", one_plane=True, num_physical_slots=CHUNK
)
OTHER: Final = [9, *TOKENS[1:]]


class Office(Desk):
    """A session whose connections lead to a FakeServer in memory; a Desk's writers write into its pool."""

    def __init__(self, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, release: str = "0.5.6") -> None:
        super().__init__(release)
        self.clock = clock
        self.server = FakeServer(release, pool=self.pool, shm_name="lmcache_l1_pool_x")
        self.lines: list[MemoryTransport] = []
        monkeypatch.setattr("lmcache_sdk.session.session.open_dealer", self.open_line)
        monkeypatch.setattr("lmcache_sdk.session.session.boot_time", clock)
        self.session = Session(Addresses("tcp://memory:1", "http://memory:2"), self.server.dialect)
        self.instance, _ = self.session.register("private", SHAPE, self.within(5))
        self.session.opened()

    def open_line(self, *_: object, **__: object) -> MemoryTransport:
        self.lines.append(MemoryTransport(self.server, self.clock))
        return self.lines[-1]

    @contextmanager
    def call(
        self, name: str = "retrieve", tokens: list[int] | None = None, seconds: float = 1.0
    ) -> Iterator[Operation]:
        """One exclusive call."""
        identity = Identity("m", 1, self.instance, CHUNK)
        ids = TokenIds((TOKENS if tokens is None else tokens)[: 3 * CHUNK])
        with self.session.operation(name, identity, ids, "", self.within(seconds), exclusive=True) as operation:
            yield operation

    def store(self, writer: Writer, tokens: list[int] | None = None, seconds: float = 1.0) -> tuple[int, ...]:
        with self.call("store", tokens, seconds) as operation:
            reservation = Reservation(operation, 0, 3, WRITE_TTL, clock=self.clock)
            reservation.store_slots(writer)
            return reservation.written

    def look(self, tokens: list[int] | None = None, seconds: float = 1.0) -> int:
        with self.call("lookup", tokens, seconds) as operation:
            return ReadLease(operation, READ_TTL, shm=True, clock=self.clock).acquire()

    def cache(self, count: int) -> None:
        self.server.cache(TOKENS, [Chunk(*SLOT, chunk_bytes(index)) for index in range(count)])


@pytest.fixture
def office(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    made = Office(clock, monkeypatch)
    yield made
    made.session.close()
    assert all(line.closed for line in made.lines)


# ---- registrations ---------------------------------------------------------------------------------------------------


def test_ids_and_names_are_of_the_systems_entropy() -> None:
    ids = {new_instance_id() for _ in range(500)}
    assert len(ids) == 500 and all(0 < instance_id < 2**63 for instance_id in ids)
    names = {private_model_name() for _ in range(500)}
    assert len(names) == 500 and all("@" not in name for name in names)


def test_what_is_registered(office: Office) -> None:
    [request] = office.server.asked(p.Register)
    registration = request.registration
    assert (registration.model_name, registration.world_size, registration.block_size) == ("private", 1, CHUNK)
    assert (registration.num_layers, registration.hidden_dim_size, registration.dtype_str) == (1, 8, "uint8")
    assert registration.use_mla and registration.num_physical_slots == CHUNK and registration.group_layouts == ()


def test_close_unregisters_what_was_registered(office: Office) -> None:
    second, _ = office.session.register("other", SHAPE, office.within(5))
    third, _ = office.session.register("third", SHAPE, office.within(5))
    office.session.unregister(third, office.within(5))
    office.session.close()
    left = [request.instance_id for request in office.server.asked(p.Unregister)]
    assert left == [third, office.instance, second] and office.server.instances == {}


def test_a_registration_that_was_not_answered_is_unregistered_too(office: Office) -> None:
    office.server.on(p.Register, silence)
    with pytest.raises(DeadlineExceededError) as caught:
        office.session.register("late", SHAPE, office.within(1))
    assert caught.value.step.startswith("connect: REGISTER")
    assert len(office.server.instances) == 2
    office.session.close()
    assert office.server.instances == {}


def test_an_illegal_answer_to_a_registration_too(office: Office) -> None:
    office.server.on(p.Register, wrong_opcode)
    with pytest.raises(RemoteProtocolError):
        office.session.register("strange", SHAPE, office.within(1))
    office.session.close()
    assert office.server.instances == {}


def test_an_unregister_that_is_not_answered_does_not_keep_the_close(office: Office) -> None:
    office.server.always(p.Unregister, silence)
    began = office.clock.now
    office.session.close()
    assert office.clock.now - began < 2 and office.session.closed


# ---- closing ---------------------------------------------------------------------------------------------------------


def test_close_is_idempotent(office: Office) -> None:
    for _ in range(3):
        office.session.close()
    assert len(office.server.asked(p.Unregister)) == 1


def test_after_close_every_method_says_so(office: Office) -> None:
    office.session.close()
    said = len(office.server.requests)
    for call in (
        office.look,
        lambda: office.store(Writer(office)),
        lambda: office.session.register("x", SHAPE, office.within(1)),
        lambda: office.session.pause(0.01),
        office.session.check_open,
    ):
        with pytest.raises(SessionClosedError, match=r"closed.*connect\(\)") as caught:
            call()
        assert caught.value.fate is Fate.NOT_SENT
    assert len(office.server.requests) == said


def test_a_session_that_was_never_opened_can_be_closed(office: Office) -> None:
    session = Session(Addresses("tcp://memory:1", "http://memory:2"), office.server.dialect)
    session.close()
    assert session.closed


def test_repr(office: Office) -> None:
    assert repr(office.session) == "<Session tcp://memory:1 OPEN 0 active>"


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_a_call_ends_its_session_and_gives_its_channel_back(office: Office) -> None:
    office.cache(2)
    for _ in range(3):
        assert office.look() == 2
    assert office.server.held() == NOTHING and len(office.lines) == 1


def test_the_error_of_the_call_is_the_one_that_is_raised(office: Office) -> None:
    office.cache(2)
    office.server.always(p.FreeLookupLocks, silence)
    with pytest.raises(ZeroDivisionError), office.call() as operation:
        print(ReadLease(operation, READ_TTL, shm=True, clock=office.clock).acquire() // 0)


def test_lookups_may_run_side_by_side_on_the_same_tokens(office: Office) -> None:
    identity, tokens = Identity("m", 1, office.instance, CHUNK), TokenIds(TOKENS)
    deadline = office.within(1)
    with (
        office.session.operation("lookup", identity, tokens, "", deadline, exclusive=False) as one,
        office.session.operation("lookup", identity, tokens, "", deadline, exclusive=False) as other,
    ):
        assert one.channel is not other.channel and one.request_id != other.request_id


# ---- what earlier calls owe ------------------------------------------------------------------------------------------


def test_a_late_prepare_is_finished_before_anything_else_on_the_same_tokens(office: Office) -> None:
    """A second PREPARE of the same tokens gets no slots, and its COMMIT would publish the first's unwritten ones."""
    office.server.on(p.PrepareStore, late(20.0))
    with pytest.raises(DeadlineExceededError):
        office.store(Writer(office))
    said = len(office.server.requests)
    assert office.look(seconds=60) == 3
    then_said = office.server.names()[said:]
    assert then_said[:2] == ["CommitStore", "EndSession"]
    assert then_said[2:] == ["Lookup", "QueryPrefetchStatus", "FreeLookupLocks", "EndSession"]
    assert office.published() == [chunk_bytes(index) for index in range(3)]
    assert office.server.held() == NOTHING


def test_other_tokens_do_not_wait_for_it_and_use_another_channel(office: Office) -> None:
    office.server.on(p.PrepareStore, late(20.0))
    with pytest.raises(DeadlineExceededError):
        office.store(Writer(office))
    began = office.clock.now
    assert office.store(Writer(office), OTHER) == (0, 1, 2)
    assert office.clock.now - began < 0.1 and len(office.lines) == 2
    office.clock.advance(20)
    assert office.look(OTHER) == 3  # whoever comes next goes on with the debts
    assert office.server.held() == NOTHING


def test_the_same_tokens_wait_no_longer_than_their_deadline(office: Office) -> None:
    office.server.on(p.PrepareStore, late(60.0))
    with pytest.raises(DeadlineExceededError):
        office.store(Writer(office))
    said = len(office.server.requests)
    with pytest.raises(DeadlineExceededError, match="earlier call on the same tokens") as caught:
        office.store(Writer(office), seconds=3.0)
    assert caught.value.fate is Fate.NOT_SENT and len(office.server.requests) == said
    office.clock.advance(60)


def test_the_channel_of_a_debt_comes_back(office: Office) -> None:
    office.server.on(p.PrepareStore, late(20.0))
    with pytest.raises(DeadlineExceededError):
        office.store(Writer(office))
    office.clock.advance(20)
    for tokens in (OTHER, TOKENS, OTHER):
        office.look(tokens)
    assert len(office.lines) <= 2 and not any(line.closed for line in office.lines)


def test_late_locks_are_given_back_by_the_next_call(office: Office) -> None:
    office.cache(2)
    office.server.on(p.Lookup, late(20.0))
    with pytest.raises(DeadlineExceededError):
        office.look()
    assert office.server.held().read_locks == 2
    office.clock.advance(20)
    office.look(OTHER)
    assert office.server.held() == NOTHING


def test_close_finishes_what_it_can_and_then_unregisters(office: Office) -> None:
    office.server.on(p.PrepareStore, late(2.0))
    with pytest.raises(DeadlineExceededError):
        office.store(Writer(office))
    office.session.close()
    assert office.server.names()[-3:] == ["CommitStore", "EndSession", "Unregister"]
    assert office.published() == [chunk_bytes(index) for index in range(3)]
    assert office.server.held() == NOTHING and office.server.instances == {}


@pytest.mark.parametrize(
    "action",
    [
        late(600.0),
        silence,
        wrong_opcode,
        changed(lambda reply: p.PreparedStore(reply.slots, (0, 1, 7))),
        changed(lambda reply: p.PreparedStore(reply.slots, (0, 0, 1))),
    ],
    ids=["late", "silent", "garbage", "index", "duplicate"],
)
def test_close_does_not_unregister_while_a_reservation_may_be_open(office: Office, action: object) -> None:
    """The server publishes the unwritten slots of an instance that leaves: others would read foreign bytes."""
    assert callable(action)
    office.server.on(p.PrepareStore, action)
    with pytest.raises(KVCacheSDKError):
        office.store(Writer(office))
    office.session.close()
    assert office.server.asked(p.Unregister) == [] and office.server.held().unwritten == 0
    assert office.server.asked(p.CommitStore) == []
    assert office.session.closed


def test_close_does_not_unregister_after_a_loss_with_a_reservation_out(office: Office) -> None:
    """The server may live, and only the connection be gone."""
    office.server.on(p.PrepareStore, then(silence, lambda: setattr(office.lines[-1], "lost", True)))
    with pytest.raises(ConnectionLostError):
        office.store(Writer(office))
    office.session.close()
    assert office.server.asked(p.Unregister) == [] and office.server.held().unwritten == 0


def test_close_unregisters_after_a_loss_with_nothing_reserved(office: Office) -> None:
    office.server.on(p.Lookup, then(silence, lambda: setattr(office.lines[-1], "lost", True)))
    with pytest.raises(ConnectionLostError):
        office.look()
    office.session.close()
    assert office.server.instances == {}


def test_a_reservation_is_given_up_with_its_ttl(office: Office) -> None:
    office.server.on(p.PrepareStore, silence)
    with pytest.raises(DeadlineExceededError):
        office.store(Writer(office))
    office.clock.advance(WRITE_TTL)
    assert office.look() == 0
    office.session.close()
    assert len(office.server.asked(p.Unregister)) == 1


def test_the_last_words_of_unknown_locks_are_said_at_close(office: Office) -> None:
    office.cache(2)
    office.server.on(p.QueryPrefetchStatus, silence)
    with pytest.raises(DeadlineExceededError):
        office.look()
    office.session.close()
    assert office.server.held().read_locks == 0 and office.server.held().stolen == 0


# ---- losses and idleness ---------------------------------------------------------------------------------------------


def test_after_a_loss_nothing_is_sent_any_more(office: Office) -> None:
    """A new connection may lead to a server that was restarted, where nothing of ours exists."""
    office.server.on(p.Lookup, then(silence, lambda: setattr(office.lines[-1], "lost", True)))
    with pytest.raises(ConnectionLostError):
        office.look()
    said = len(office.server.requests)
    with pytest.raises(ConnectionLostError) as caught:
        office.look()
    assert caught.value.fate is Fate.NOT_SENT
    assert len(office.server.requests) == said and len(office.lines) == 1


def test_a_long_idle_instance_is_registered_again_first(office: Office) -> None:
    """And is never pinged: that would shorten the reaper's patience below the write TTL."""
    office.session.grace = 3600.0
    office.session.pool = None
    office.server.always(p.Register, says(p.Registered()))
    office.look()
    office.clock.advance(899)
    office.look()
    assert len(office.server.asked(p.Register)) == 1
    office.clock.advance(901)
    said = len(office.server.requests)
    office.look()
    assert office.server.names()[said : said + 2] == ["Register", "Lookup"]
    again = office.server.asked(p.Register)[1].registration
    assert again == office.server.asked(p.Register)[0].registration
    assert office.server.asked(p.Ping) == []


def test_a_server_with_another_pool_is_another_server(office: Office) -> None:
    office.session.grace = 3600.0
    office.server.always(p.Register, says(p.Registered("lmcache_l1_pool_y", 8192)))
    office.clock.advance(1000)
    with pytest.raises(ConnectionLostError, match="another pool") as caught:
        office.look()
    assert caught.value.fate is Fate.NOT_SENT and office.server.asked(p.Lookup) == []


def test_without_a_known_grace_nobody_is_registered_again(office: Office) -> None:
    office.clock.advance(10**6)
    office.look()
    assert len(office.server.asked(p.Register)) == 1


def test_a_session_that_was_replaced_is_a_loss_and_no_close(office: Office) -> None:
    office.session.retire()
    with pytest.raises(ConnectionLostError) as caught:
        office.look()
    assert caught.value.fate is Fate.NOT_SENT and office.server.instances == {}


# ---- dropped without close -------------------------------------------------------------------------------------------


def test_a_dropped_session_says_goodbye_and_does_not_wait(office: Office) -> None:
    office.look()
    office.server.always(p.Unregister, silence)
    began = office.clock.now
    office.session.abandon()
    assert office.clock.now == began and office.session.closed
    assert [request.instance_id for request in office.server.asked(p.Unregister)] == [office.instance]
    office.session.abandon()
    office.session.close()
    assert len(office.server.asked(p.Unregister)) == 1


def test_a_dropped_session_with_a_reservation_out_leaves_without_a_word(office: Office) -> None:
    office.server.on(p.PrepareStore, silence)
    with pytest.raises(DeadlineExceededError):
        office.store(Writer(office))
    office.session.abandon()
    assert office.server.asked(p.Unregister) == [] and office.server.held().unwritten == 0


def test_another_process_is_told_so(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("lmcache_sdk.session.session.os.getpid", lambda: 4711)
        with pytest.raises(SessionClosedError, match=r"child 4711.*connect\(\) in the child"):
            office.look()
        office.session.close()
        office.session.abandon()
    assert not office.session.closed and office.look() == 0


def test_many_calls_leave_nothing(office: Office) -> None:
    office.cache(1)
    for number, tokens in itertools.product(range(5), (TOKENS, OTHER)):
        office.look(tokens)
        office.store(Writer(office), [number, *tokens[1:]])
    office.session.close()
    assert office.server.held() == NOTHING and office.server.instances == {}
    assert len(office.lines) == 1 and office.server.malformed == []


def test_every_wait_of_a_session_is_bounded(office: Office) -> None:
    """A server that answers nothing at all any more: each call ends, and so does the close."""
    for kind in office.server.dialect.rules:
        office.server.always(kind, silence)
    began = office.clock.now
    for call in (lambda: office.look(seconds=1.0), lambda: office.store(Writer(office), OTHER, seconds=1.0)):
        with pytest.raises(DeadlineExceededError):
            call()
    assert office.clock.now - began < 4.0
    began = office.clock.now
    office.session.close()
    assert office.clock.now - began < 3.0


def test_deadlines_of_calls_are_the_callers(office: Office) -> None:
    office.server.on(p.Lookup, late(0.4))
    with office.session.operation(
        "lookup", Identity("m", 1, office.instance, CHUNK), TokenIds(TOKENS), "", Deadline.after(0.5), exclusive=False
    ) as operation:
        operation.call(p.Lookup(key=operation.key(0, 3, worker_id=None)))
        assert operation.deadline.remaining() == pytest.approx(0.1)
