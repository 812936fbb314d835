"""Write slots when the server lies, time runs out or the connection ends: nothing unwritten is ever published."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    KVCacheSDKError,
    LeaseExpiredError,
    RemoteProtocolError,
)
from lmcache_sdk.session.states import ReservationState
from tests.fix_fake_server import NOTHING, Held
from tests.fix_faults import Fault, changed, instead, late, payload, silence, then, value
from tests.session.desk import (
    ALL,
    SLOT_NBYTES,
    WRITE_TTL,
    Writer,
    chunk_bytes,
    inline_payload,
    store_desk,
    store_inline,
    store_slots,
)

# ---- lies about slots ------------------------------------------------------------------------------------------------

SLOT: Final = p.Slot(0, SLOT_NBYTES, (1, 4, 8), "uint8")
ILLEGAL: Final = {
    "index out of range": changed(lambda reply: p.PreparedStore(reply.slots, (0, 1, 3))),
    "index far out of range": changed(lambda reply: p.PreparedStore(reply.slots, (0, 1, 2**20))),
    "duplicate index": changed(lambda reply: p.PreparedStore(reply.slots, (0, 1, 1))),
    "negative index": changed(lambda reply: p.PreparedStore(reply.slots, (-1, 0, 1))),
    "indices out of order": changed(lambda reply: p.PreparedStore(reply.slots, (2, 1, 0))),
    "too few indices": changed(lambda reply: p.PreparedStore(reply.slots, (0, 1))),
    "no indices": value({"context": {"slots": [{"offset": 0, "length": 32, "shape": [1, 4, 8], "dtype": "uint8"}]}}),
    "more slots than chunks": changed(lambda reply: p.PreparedStore((*reply.slots, SLOT), (0, 1, 2, 3))),
    "negative offset": value(
        {"context": {"slots": [{"offset": -1, "length": 32, "shape": [1], "dtype": "uint8"}], "chunk_indices": [0]}}
    ),
    "missing keys": value({"context": {"slots": [{"offset": 0}], "chunk_indices": [0]}}),
    "garbage": payload(b"\xc1"),
    "empty": payload(b""),
    "nothing": payload(b"\xc0"),
}


@pytest.mark.parametrize("lie", ILLEGAL)
def test_illegal_slots_are_neither_written_nor_published(lie: str) -> None:
    """The server holds a reservation that cannot be filled: UNREGISTER would publish it, until its TTL is over."""
    desk = store_desk(seconds=60)
    desk.server.on(p.PrepareStore, ILLEGAL[lie])
    reservation, writer = desk.reservation(), Writer(desk)
    with pytest.raises(RemoteProtocolError) as caught:
        store_slots(reservation, writer)
    assert caught.value.path.startswith("prepare_store")
    assert desk.clock.now < 1001
    assert not desk.finish() and not desk.finish()
    assert desk.operation.forbids_unregister and desk.operation.owing
    assert writer.writes == 0 and bytes(desk.pool) == bytes(desk.pool.nbytes)
    assert desk.server.asked(p.CommitStore) == [] and desk.server.held().reservations == 3
    desk.clock.advance(WRITE_TTL)
    assert desk.finish() and not desk.operation.forbids_unregister and desk.ended_last_and_once()


def test_slots_that_do_not_fit_are_neither_written_nor_published() -> None:
    desk = store_desk()
    writer = Writer(desk)
    writer.illegal = "slots[0]: another shape"
    with pytest.raises(RemoteProtocolError, match="another shape"):
        store_slots(desk.reservation(), writer)
    assert not desk.finish()
    assert desk.operation.forbids_unregister and "another shape" in desk.operation.stuck
    assert writer.writes == 0 and desk.server.asked(p.CommitStore) == []
    desk.clock.advance(WRITE_TTL)
    assert desk.finish() and not desk.operation.forbids_unregister


def test_an_inline_answer_of_a_server_with_a_pool_says_nothing_of_what_it_reserved() -> None:
    desk = store_desk()
    desk.server.on(p.PrepareStore, instead(p.PreparedStore(slots=None, chunk_indices=())))
    reservation = desk.reservation()
    with pytest.raises(RemoteProtocolError, match="no slots"):
        store_slots(reservation, Writer(desk))
    assert reservation.stuck
    assert not desk.finish() and desk.operation.forbids_unregister


# ---- time ------------------------------------------------------------------------------------------------------------


def test_slots_that_came_too_late_are_not_written() -> None:
    """After half the TTL they may be another's by the time the copy ends."""
    desk = store_desk(seconds=1000)
    desk.server.on(p.PrepareStore, late(WRITE_TTL / 2 + 1))
    reservation, writer = desk.reservation(), Writer(desk)
    with pytest.raises(LeaseExpiredError, match="half their TTL of 600 s"):
        store_slots(reservation, writer)
    assert writer.writes == 0 and desk.server.asked(p.CommitStore) == []
    assert not desk.finish() and desk.operation.forbids_unregister
    desk.clock.advance(WRITE_TTL / 2)
    assert desk.finish() and reservation.state is ReservationState.REJECTED


def test_a_copy_that_took_too_long_is_not_committed() -> None:
    desk = store_desk(seconds=1000)
    reservation, writer = desk.reservation(), Writer(desk)
    writer.takes = WRITE_TTL / 2 + 1
    with pytest.raises(LeaseExpiredError):
        store_slots(reservation, writer)
    assert writer.writes == 1 and desk.server.asked(p.CommitStore) == []
    assert not desk.finish() and desk.operation.forbids_unregister


def test_half_the_time_is_enough() -> None:
    desk = store_desk(seconds=1000)
    writer = Writer(desk)
    writer.takes = WRITE_TTL / 2
    store_slots(desk.reservation(), writer)
    assert desk.published() == ALL


def test_without_a_known_ttl_nothing_is_too_old_and_nothing_is_given_up() -> None:
    desk = store_desk(seconds=1.0)
    desk.server.on(p.PrepareStore, late(10 * WRITE_TTL))
    reservation = desk.reservation(ttl=None)
    with pytest.raises(DeadlineExceededError):
        store_slots(reservation, Writer(desk))
    assert not desk.finish()
    desk.clock.advance(10 * WRITE_TTL)
    assert desk.finish() and desk.published() == ALL


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_a_loss_with_prepare_out_forbids_to_unregister() -> None:
    """The server may live, and only the connection be gone: it would publish the unwritten slots."""
    desk = store_desk()
    desk.server.on(p.PrepareStore, then(silence, lambda: setattr(desk.memory, "lost", True)))
    with pytest.raises(ConnectionLostError):
        store_slots(desk.reservation(), Writer(desk))
    desk.finish()
    assert desk.operation.forbids_unregister and desk.channel.broken


def test_a_loss_with_an_inline_payload_out_forbids_nothing() -> None:
    desk = store_desk(shm=False)
    desk.server.on(p.CommitStore, then(silence, lambda: setattr(desk.memory, "lost", True)))
    with pytest.raises(ConnectionLostError):
        store_inline(desk.reservation(), inline_payload())
    desk.finish()
    assert not desk.operation.forbids_unregister


# ---- any faults ------------------------------------------------------------------------------------------------------

HARMLESS: Final = (Fault.DELAY, Fault.DUPLICATE, Fault.REORDER)


@given(
    st.sampled_from(list(p.DIALECTS)),
    st.integers(0, 3),
    st.sampled_from([None, KeyboardInterrupt, RuntimeError]),
    st.integers(0, 4),
    st.dictionaries(st.integers(0, 3), st.sampled_from([Fault.DROP, Fault.DISCONNECT]), max_size=1),
    st.dictionaries(st.integers(0, 4), st.sampled_from(list(Fault)), max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_whatever_happens_to_the_messages(
    release: str,
    cached: int,
    failure: type[BaseException] | None,
    failures: int,
    sent: dict[int, Fault],
    received: dict[int, Fault],
) -> None:
    desk = store_desk(release, cached=cached, seconds=2.0, sent=sent, received=received)
    reservation = desk.reservation()
    writer = Writer(desk, failures=[failure() for _ in range(failures)] if failure else [])
    with suppress(KVCacheSDKError, KeyboardInterrupt, RuntimeError):
        store_slots(reservation, writer)
    for _ in range(4):
        desk.finish()
    if not sent and set(received.values()) <= set(HARMLESS):
        assert desk.server.held() == NOTHING and desk.ended_last_and_once()
    if desk.server.held().reservations:
        assert desk.operation.forbids_unregister
    desk.clock.advance(WRITE_TTL)
    assert desk.finish()
    # what the server shows was written whole, and what we believe to have written is there
    assert desk.published() == [chunk_bytes(index) for index in range(len(desk.published()))]
    assert len(reservation.written) <= len(desk.server.objects)
    assert len(desk.server.asked(p.PrepareStore)) <= 1 and len(desk.server.asked(p.CommitStore)) <= 1
    assert desk.server.names().count("EndSession") <= 1 and desk.server.held().unwritten == 0
    assert (
        Held(reservations=desk.server.held().reservations, sessions=desk.server.held().sessions) == desk.server.held()
    )
