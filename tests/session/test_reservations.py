"""Write slots on every path: what is published was written whole, and what cannot be is left alone."""

from __future__ import annotations

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import (
    DeadlineExceededError,
    LeaseExpiredError,
    RemoteProtocolError,
)
from lmcache_sdk.session.states import ReservationState
from tests.fix_fake_server import NOTHING, Action
from tests.fix_faults import ignored, instead, late, payload, says, silence, value
from tests.session.desk import (
    ALL,
    SLOT_NBYTES,
    WRITE_TTL,
    Writer,
    inline_payload,
    store_desk,
    store_inline,
    store_slots,
)

every_release = pytest.mark.parametrize("release", list(p.DIALECTS))


# ---- without faults --------------------------------------------------------------------------------------------------


@every_release
def test_slots_are_filled_committed_and_found(release: str) -> None:
    desk = store_desk(release)
    reservation, writer = desk.reservation(), Writer(desk)
    store_slots(reservation, writer)
    assert reservation.state is ReservationState.PUBLISHED and reservation.written == (0, 1, 2)
    assert desk.server.names() == ["PrepareStore", "CommitStore"]
    assert desk.finish() and desk.ended_last_and_once()
    assert desk.published() == ALL and writer.writes == 1
    assert desk.server.held() == NOTHING


def test_only_the_given_slots_are_filled() -> None:
    desk = store_desk(cached=1)
    reservation = desk.reservation()
    store_slots(reservation, Writer(desk))
    assert reservation.written == (1, 2) and desk.published() == ALL
    assert desk.finish() and desk.server.held() == NOTHING


def test_chunks_are_counted_from_the_first_of_the_call() -> None:
    desk = store_desk(cached=1)
    reservation = desk.reservation(first=1, count=2)
    store_slots(reservation, Writer(desk, first=1))
    assert reservation.written == (1, 2) and desk.published() == ALL
    key = desk.server.asked(p.PrepareStore)[0].key
    assert (key.start, key.end, key.worker_id, len(key.token_ids)) == (4, 12, 0, 12)


@pytest.mark.parametrize("why", ["cached", "full", "another writes"])
def test_empty_slots_are_never_committed(why: str) -> None:
    """Such a COMMIT would publish another caller's half-written slots."""
    desk = store_desk(cached=3 if why == "cached" else 0)
    desk.server.full = why == "full"
    if why == "another writes":
        desk.server.handle(
            p.PrepareStore(key=desk.operation.key(0, 3), instance_id=desk.operation.identity.instance_id)
        )
    before = desk.server.held()
    reservation, writer = desk.reservation(), Writer(desk)
    store_slots(reservation, writer)
    assert reservation.state is ReservationState.EMPTY and reservation.written == () and writer.writes == 0
    assert desk.finish() and desk.server.asked(p.CommitStore) == []
    assert desk.server.held().reservations == before.reservations
    assert not desk.operation.forbids_unregister


@every_release
def test_an_inline_store_is_one_message(release: str) -> None:
    desk = store_desk(release, shm=False)
    reservation = desk.reservation()
    store_inline(reservation, inline_payload())
    assert reservation.state is ReservationState.PUBLISHED and reservation.written == (0, 1, 2)
    assert [chunk.data for chunk in desk.server.objects.values()] == ALL
    assert desk.finish() and desk.server.names() == ["CommitStore", "EndSession"]
    assert desk.server.held() == NOTHING


def test_an_inline_store_to_a_server_with_a_pool() -> None:
    """What the canary does: without a PREPARE every release takes it."""
    desk = store_desk()
    store_inline(desk.reservation(), inline_payload())
    assert desk.published() == ALL and desk.finish() and desk.server.held() == NOTHING


# ---- answers that say no ---------------------------------------------------------------------------------------------


def test_a_refused_commit_writes_nothing_and_owes_nothing() -> None:
    desk = store_desk()
    desk.server.on(p.CommitStore, instead(p.Committed(success=False)))
    reservation = desk.reservation()
    store_slots(reservation, Writer(desk))
    assert reservation.state is ReservationState.REJECTED and reservation.written == ()
    assert desk.finish() and desk.ended_last_and_once()


def test_a_refused_inline_commit_too() -> None:
    desk = store_desk(shm=False)
    desk.server.on(p.CommitStore, instead(p.Committed(success=False)))
    reservation = desk.reservation()
    store_inline(reservation, inline_payload())
    assert reservation.state is ReservationState.REJECTED and reservation.written == ()
    assert desk.finish()


# ---- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_interrupted_copy_is_done_again_committed_and_then_interrupted(
    kind: type[BaseException], failures: int
) -> None:
    desk = store_desk()
    reservation, writer = desk.reservation(), Writer(desk, failures=[kind("in the middle") for _ in range(failures)])
    with pytest.raises(kind, match="in the middle"):
        store_slots(reservation, writer)
    assert writer.writes == failures + 1
    assert desk.finish() and reservation.state is ReservationState.PUBLISHED and desk.published() == ALL
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


def test_a_copy_that_is_interrupted_again_and_again_is_completed_by_the_clean_up() -> None:
    desk = store_desk()
    reservation, writer = desk.reservation(), Writer(desk, failures=[KeyboardInterrupt() for _ in range(3)])
    with pytest.raises(KeyboardInterrupt):
        store_slots(reservation, writer)
    assert desk.published() == [] and desk.operation.forbids_unregister
    assert desk.finish()
    assert desk.published() == ALL and desk.server.held() == NOTHING


def test_a_copy_that_cannot_be_done_is_not_published_until_its_time_is_over() -> None:
    desk = store_desk()
    reservation, writer = desk.reservation(), Writer(desk, failures=[RuntimeError("broken") for _ in range(99)])
    with pytest.raises(RuntimeError, match="broken"):
        store_slots(reservation, writer)
    assert not desk.finish() and not desk.finish()
    assert "broken" in desk.operation.stuck and desk.operation.forbids_unregister
    assert desk.server.asked(p.CommitStore) == [] and desk.server.objects == {}
    desk.clock.advance(WRITE_TTL)
    assert desk.finish() and reservation.state is ReservationState.REJECTED


@pytest.mark.parametrize("answer", [silence, late(99.0)])
def test_an_interruption_is_not_lost_when_the_commit_is_not_answered(answer: Action) -> None:
    desk = store_desk(seconds=1.0)
    desk.server.on(p.CommitStore, answer)
    with pytest.raises(KeyboardInterrupt):
        store_slots(desk.reservation(), Writer(desk, failures=[KeyboardInterrupt()]))
    assert not desk.finish()
    assert desk.published() == ALL


def test_an_interruption_is_not_lost_when_the_time_is_over() -> None:
    desk = store_desk(seconds=1000)
    writer = Writer(desk, failures=[KeyboardInterrupt()])
    writer.takes = WRITE_TTL / 4 + 1
    with pytest.raises(KeyboardInterrupt) as caught:
        store_slots(desk.reservation(), writer)
    assert isinstance(caught.value.__cause__, LeaseExpiredError)
    assert desk.server.asked(p.CommitStore) == []


# ---- PREPARE is late -------------------------------------------------------------------------------------------------


@every_release
def test_a_late_prepare_is_completed_by_the_clean_up(release: str) -> None:
    desk = store_desk(release, seconds=1.0)
    desk.server.on(p.PrepareStore, late(1.2))
    reservation, writer = desk.reservation(), Writer(desk)
    with pytest.raises(DeadlineExceededError) as caught:
        store_slots(reservation, writer)
    assert caught.value.step == "store: PREPARE_STORE"
    assert desk.finish()
    assert reservation.state is ReservationState.PUBLISHED and reservation.written == (0, 1, 2)
    assert desk.published() == ALL and writer.copies == []
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


def test_a_very_late_prepare_is_completed_from_a_copy() -> None:
    """The caller has its tensor back by then, and may have changed it."""
    desk = store_desk(seconds=1.0)
    desk.server.on(p.PrepareStore, late(30.0))
    reservation, writer = desk.reservation(), Writer(desk)
    with pytest.raises(DeadlineExceededError):
        store_slots(reservation, writer)
    for _ in range(3):
        assert not desk.finish()
    assert len(writer.copies) == 1 and desk.operation.forbids_unregister and desk.operation.owing
    writer.data = [bytes(SLOT_NBYTES)] * 6
    desk.clock.advance(30)
    assert desk.finish()
    assert desk.published() == ALL and writer.writes == 0 and writer.copies[0].writes == 1
    assert [len(desk.server.asked(kind)) for kind in (p.PrepareStore, p.CommitStore)] == [1, 1]
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


def test_a_late_prepare_without_slots_is_not_committed() -> None:
    desk = store_desk(cached=3, seconds=1.0)
    desk.server.on(p.PrepareStore, late(1.2))
    with pytest.raises(DeadlineExceededError):
        store_slots(desk.reservation(), Writer(desk))
    assert desk.finish() and desk.server.asked(p.CommitStore) == []


@pytest.mark.parametrize("action", [silence, ignored])
def test_a_prepare_that_is_never_answered_is_given_up_with_its_ttl_and_never_sent_again(action: Action) -> None:
    desk = store_desk(seconds=1.0)
    desk.server.on(p.PrepareStore, action)
    with pytest.raises(DeadlineExceededError):
        store_slots(desk.reservation(), Writer(desk))
    assert not desk.finish() and not desk.finish() and desk.operation.forbids_unregister
    desk.clock.advance(WRITE_TTL)
    assert desk.finish() and not desk.operation.forbids_unregister
    assert len(desk.server.asked(p.PrepareStore)) == 1 and desk.server.asked(p.CommitStore) == []
    assert desk.ended_last_and_once()


def test_giving_up_ends_the_session_and_commits_nothing() -> None:
    desk = store_desk(seconds=1.0)
    desk.server.on(p.PrepareStore, silence)
    with pytest.raises(DeadlineExceededError):
        store_slots(desk.reservation(), Writer(desk))
    desk.finish()
    desk.operation.give_up()
    assert desk.server.names() == ["PrepareStore", "EndSession"]


# ---- COMMIT is late --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])
def test_a_late_commit_is_waited_for_and_not_sent_again(shm: bool, accepted: bool) -> None:
    desk = store_desk(shm=shm, seconds=1.0)
    desk.server.on(p.CommitStore, late(20.0, says(p.Committed(success=accepted))))
    reservation = desk.reservation()
    with pytest.raises(DeadlineExceededError) as caught:
        store_slots(reservation, Writer(desk)) if shm else store_inline(reservation, inline_payload())
    assert caught.value.step == "store: COMMIT_STORE"
    assert not desk.finish() and not desk.finish()
    desk.clock.advance(20)
    assert desk.finish()
    assert reservation.state is (ReservationState.PUBLISHED if accepted else ReservationState.REJECTED)
    assert reservation.written == ((0, 1, 2) if accepted else ())
    assert len(desk.server.asked(p.CommitStore)) == 1
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])
def test_a_commit_that_is_never_answered_is_given_up_with_its_ttl(shm: bool) -> None:
    desk = store_desk(shm=shm, seconds=1.0)
    desk.server.on(p.CommitStore, silence)
    reservation = desk.reservation()
    with pytest.raises(DeadlineExceededError):
        store_slots(reservation, Writer(desk)) if shm else store_inline(reservation, inline_payload())
    assert not desk.finish()
    desk.clock.advance(WRITE_TTL)
    assert desk.finish() and desk.ended_last_and_once()


@pytest.mark.parametrize("lie", [payload(b"\xc1"), value("yes"), value(1), payload(b"")])
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])
def test_a_commit_that_is_answered_illegally(shm: bool, lie: Action) -> None:
    desk = store_desk(shm=shm)
    desk.server.on(p.CommitStore, lie)
    reservation = desk.reservation()
    with pytest.raises(RemoteProtocolError):
        store_slots(reservation, Writer(desk)) if shm else store_inline(reservation, inline_payload())
    assert reservation.written == ()
    assert len(desk.server.asked(p.CommitStore)) == 1
