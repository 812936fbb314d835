"""A session by a fake clock: what it registers it unregisters, what calls owe it settles, and only then it leaves."""

from __future__ import annotations

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
    Identity,
    ReadLease,
    Session,
    new_instance_id,
    private_model_name,
)
from lmcache_sdk.values import TokenIds
from tests.fix_fake_server import NOTHING
from tests.fix_faults import changed, late, silence, then, wrong_opcode
from tests.session.desk import CHUNK, READ_TTL, TOKENS, WRITE_TTL, Writer, chunk_bytes
from tests.session.office import OTHER, SHAPE, Office

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
