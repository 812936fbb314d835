"""Read locks when the server lies, a read goes wrong, time runs out or the connection ends."""

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
from tests.fix_fake_server import NOTHING, Action, Held
from tests.fix_faults import Fault, instead, late, payload, says, silence, then, value
from tests.session.desk import READ_TTL, Desk, read

RELEASES: Final = list(p.DIALECTS)
CLIPPED: Final = [release for release, dialect in p.DIALECTS.items() if dialect.free_clips_to_hit]
UNCONDITIONAL: Final = [release for release in RELEASES if release not in CLIPPED]

every_release = pytest.mark.parametrize("release", RELEASES)
both_planes = pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])


# ---- lies about the number -------------------------------------------------------------------------------------------

LIES: Final = {
    "too large": says(p.PrefetchStatus(4)),
    "huge": says(p.PrefetchStatus(10**6)),
    "negative": value(-1),
    "str": value("2"),
    "float": value(2.0),
    "bool": value(True),
    "list": value([2]),
    "garbage": payload(b"\xc1"),
    "empty": payload(b""),
}


@pytest.mark.parametrize("lie", LIES)
@both_planes
@pytest.mark.parametrize("release", CLIPPED)
def test_a_number_that_is_none_is_an_error_at_once_and_leaves_no_lock(release: str, shm: bool, lie: str) -> None:
    desk = Desk(release, shm=shm, cached=2, seconds=60)
    desk.server.on(p.QueryPrefetchStatus, LIES[lie])
    with pytest.raises(RemoteProtocolError) as caught:
        desk.lease().acquire()
    assert caught.value.path == "prefetch_status"
    assert desk.clock.now < 1001
    assert desk.finish()
    assert len(desk.server.asked(p.QueryPrefetchStatus)) == 1
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("release", UNCONDITIONAL)
def test_where_free_is_unconditional_a_lie_is_left_to_the_ttl(release: str, lie: str) -> None:
    desk = Desk(release, cached=2, seconds=60)
    desk.server.on(p.QueryPrefetchStatus, LIES[lie])
    with pytest.raises(RemoteProtocolError):
        desk.lease().acquire()
    assert desk.finish()
    assert desk.freed() == [] and desk.server.held() == Held(read_locks=2) and desk.ended_last_and_once()


# ---- reads that go wrong ---------------------------------------------------------------------------------------------


@every_release
@both_planes
def test_a_read_of_what_was_cleared_frees_only_the_rest(release: str, shm: bool) -> None:
    desk = Desk(release, shm=shm, cached=3)
    lease = desk.lease()
    lease.acquire()
    desk.server.objects.clear()
    with pytest.raises(LeaseExpiredError):
        lease.received(lease.prepare(2))
    assert desk.finish()
    assert desk.freed() == [(2, 3)] and desk.server.asked(p.CommitRetrieve) == []
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@every_release
@both_planes
def test_a_late_read_is_committed_and_its_answer_waited_for(release: str, shm: bool) -> None:
    desk = Desk(release, shm=shm, cached=3, seconds=1.0)
    desk.server.on(p.PrepareRetrieve, late(1.2))
    lease = desk.lease()
    lease.acquire()
    with pytest.raises(DeadlineExceededError) as caught:
        lease.received(lease.prepare(2))
    assert caught.value.step == "retrieve: PREPARE_RETRIEVE"
    assert desk.finish()
    assert len(desk.server.asked(p.CommitRetrieve)) == (1 if shm else 0)
    assert desk.freed() == [(2, 3)]
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@every_release
def test_a_read_that_is_not_answered_is_committed_all_the_same(release: str) -> None:
    """Its answer may be lost or late; the server holds the locks either way."""
    desk = Desk(release, cached=3, seconds=1.0)
    desk.server.on(p.PrepareRetrieve, silence)
    lease = desk.lease()
    lease.acquire()
    with pytest.raises(DeadlineExceededError):
        lease.received(lease.prepare(3))
    assert not desk.finish() and not desk.finish()
    assert len(desk.server.asked(p.CommitRetrieve)) == 1
    assert desk.server.held().read_locks == 0
    desk.clock.advance(READ_TTL)
    assert desk.finish()
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@every_release
@both_planes
@pytest.mark.parametrize("lie", [payload(b"\xc1"), value({}), value({"success": True, "data": "x", "context": {}})])
def test_a_read_that_is_answered_illegally_is_committed(release: str, shm: bool, lie: Action) -> None:
    desk = Desk(release, shm=shm, cached=3)
    desk.server.on(p.PrepareRetrieve, lie)
    lease = desk.lease()
    lease.acquire()
    with pytest.raises(RemoteProtocolError):
        lease.received(lease.prepare(2))
    assert desk.finish()
    assert desk.freed() == [(2, 3)]
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@both_planes
def test_an_error_between_prepare_and_commit_gives_the_locks_back(shm: bool) -> None:
    """Whatever the copy raises: slots that do not fit, an interruption, a bug."""
    desk = Desk(shm=shm, cached=3)
    lease = desk.lease()
    lease.acquire()
    assert lease.received(lease.prepare(2)).success
    assert desk.finish()
    assert desk.freed() == [(2, 3)] and len(desk.server.asked(p.CommitRetrieve)) == (1 if shm else 0)
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@pytest.mark.parametrize("answered", [silence, late(20.0)])
def test_a_commit_that_is_not_answered_is_not_sent_twice_and_end_waits_for_it(answered: Action) -> None:
    """A COMMIT that is handled after END_SESSION would open the session again."""
    desk = Desk(cached=2)
    desk.server.on(p.CommitRetrieve, answered)
    read(desk, desk.lease())
    assert not desk.finish() and not desk.finish()
    assert "EndSession" not in desk.server.names()
    desk.clock.advance(READ_TTL)
    assert desk.finish()
    assert len(desk.server.asked(p.CommitRetrieve)) == 1
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


def test_a_free_that_is_not_answered_is_not_sent_twice() -> None:
    desk = Desk(cached=2)
    desk.server.on(p.FreeLookupLocks, silence)
    desk.lease().acquire()
    assert not desk.finish() and not desk.finish()
    desk.clock.advance(READ_TTL)
    assert desk.finish()
    assert desk.freed() == [(0, 2)]
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


# ---- time ------------------------------------------------------------------------------------------------------------


def test_old_locks_are_not_trusted() -> None:
    """A process that was stopped for long copies what others have written meanwhile."""
    desk = Desk(cached=2, seconds=1000)
    lease = desk.lease()
    lease.acquire()
    desk.clock.advance(READ_TTL / 2)
    lease.check_alive()
    desk.clock.advance(1)
    with pytest.raises(LeaseExpiredError, match="half their TTL of 300 s"):
        lease.check_alive()
    assert desk.finish() and desk.server.held() == NOTHING


def test_the_age_of_a_lock_counts_from_before_the_lookup() -> None:
    desk = Desk(cached=2, seconds=1000)
    desk.server.on(p.Lookup, late(READ_TTL / 2 + 1))
    lease = desk.lease()
    lease.acquire()
    with pytest.raises(LeaseExpiredError):
        lease.check_alive()
    desk.finish()


def test_without_a_known_ttl_nothing_is_too_old() -> None:
    desk = Desk(cached=2)
    lease = desk.lease(ttl=None)
    lease.acquire()
    desk.clock.advance(10**6)
    lease.check_alive()
    assert desk.finish()


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [p.Lookup, p.QueryPrefetchStatus, p.PrepareRetrieve])
def test_a_lost_connection_is_an_error_at_once_and_nothing_more_is_said(kind: type[p.Request[object]]) -> None:
    desk = Desk(cached=2, seconds=60)
    desk.server.on(kind, then(silence, lambda: setattr(desk.memory, "lost", True)))
    with pytest.raises(ConnectionLostError):
        read(desk, desk.lease())
    said = len(desk.server.requests)
    assert desk.clock.now < 1001
    assert desk.finish() and not desk.operation.owing
    assert len(desk.server.requests) == said


def test_instead_of_a_miss() -> None:
    """A reply of 0 although chunks are cached is a miss: the server says so, and holds nothing."""
    desk = Desk(cached=2)
    desk.server.on(p.Lookup, instead(p.Void()))
    assert desk.lease().acquire() == 0
    assert desk.finish() and desk.freed() == [] and desk.server.held() == NOTHING


# ---- any faults ------------------------------------------------------------------------------------------------------

HARMLESS: Final = (Fault.DELAY, Fault.DUPLICATE, Fault.REORDER)
SCHEDULES: Final = st.dictionaries(st.integers(0, 9), st.sampled_from(list(Fault)), max_size=3)


@given(
    st.sampled_from(RELEASES),
    st.booleans(),
    st.integers(0, 3),
    st.dictionaries(st.integers(0, 7), st.sampled_from([Fault.DROP, Fault.DISCONNECT]), max_size=1),
    SCHEDULES,
)
@settings(max_examples=100, deadline=None)
def test_whatever_happens_to_the_messages(
    release: str, shm: bool, cached: int, sent: dict[int, Fault], received: dict[int, Fault]
) -> None:
    desk = Desk(release, shm=shm, cached=cached, seconds=2.0, sent=sent, received=received)
    lease = desk.lease()
    hit = None
    with suppress(KVCacheSDKError):
        hit = read(desk, lease)
    for _ in range(3):
        desk.finish()
    if not sent and set(received.values()) <= set(HARMLESS):
        assert desk.server.held() == NOTHING and desk.ended_last_and_once()
    desk.clock.advance(READ_TTL)
    assert desk.finish()
    held = desk.server.held()
    assert held.stolen == 0 and desk.server.malformed == []
    assert desk.server.names().count("EndSession") <= 1
    # a status reply whose last frame is missing is the wire's own "still loading": the number, delivered once, is gone
    assert hit in (None, cached) or (hit == 0 and Fault.TRUNCATE in received.values())
    assert len(desk.freed()) <= 1 and len(desk.server.asked(p.CommitRetrieve)) <= 1
