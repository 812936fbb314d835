"""Read locks on every path: taken once, given back once, never another reader's, and END_SESSION after everything."""

from __future__ import annotations

import itertools
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
from lmcache_sdk.session import ReadLease
from lmcache_sdk.session.states import LeaseState
from tests.fix_fake_server import NOTHING, Action, Held, answer
from tests.fix_faults import Fault, ignored, instead, late, loading, payload, says, silence, then, value
from tests.session.desk import READ_TTL, Desk

RELEASES: Final = list(p.DIALECTS)
CLIPPED: Final = [release for release, dialect in p.DIALECTS.items() if dialect.free_clips_to_hit]
UNCONDITIONAL: Final = [release for release in RELEASES if release not in CLIPPED]

every_release = pytest.mark.parametrize("release", RELEASES)
both_planes = pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])


def read(desk: Desk, lease: ReadLease, *batches: int) -> int:
    """A whole retrieve: look up, prepare and commit batch after batch."""
    hit = lease.acquire()
    for count in batches or ((hit,) if hit else ()):
        entry = lease.prepare(count)
        lease.received(entry)
        lease.commit(entry)
    return hit


# ---- without faults --------------------------------------------------------------------------------------------------


@every_release
@both_planes
@pytest.mark.parametrize("cached", [0, 1, 2, 3])
def test_a_lookup_leaves_nothing(release: str, shm: bool, cached: int) -> None:
    desk = Desk(release, shm=shm, cached=cached)
    lease = desk.lease()
    assert lease.acquire() == cached
    assert lease.state is (LeaseState.HELD if cached else LeaseState.RELEASED)
    assert desk.finish() and lease.state is LeaseState.RELEASED
    assert desk.freed() == ([(0, cached)] if cached else [])
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@every_release
@both_planes
def test_a_retrieve_leaves_nothing_and_frees_nothing(release: str, shm: bool) -> None:
    desk = Desk(release, shm=shm, cached=2)
    assert read(desk, desk.lease()) == 2
    assert desk.finish()
    assert desk.freed() == []
    assert len(desk.server.asked(p.CommitRetrieve)) == (1 if shm else 0)
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@every_release
@both_planes
def test_what_was_not_prepared_is_freed_and_nothing_else(release: str, shm: bool) -> None:
    desk = Desk(release, shm=shm, cached=3)
    read(desk, desk.lease(), 1, 1)
    assert desk.finish()
    assert desk.freed() == [(2, 3)]
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@both_planes
def test_ranges_are_prepared_in_order_each_once(shm: bool) -> None:
    desk = Desk(shm=shm, cached=3)
    read(desk, desk.lease(), 2, 1)
    assert desk.finish()
    assert [desk.range_of(request.key) for request in desk.server.asked(p.PrepareRetrieve)] == [(0, 2), (2, 3)]
    assert desk.server.held() == NOTHING


def test_a_second_read_in_flight_does_not_disturb_the_first() -> None:
    desk = Desk(cached=3)
    lease = desk.lease()
    lease.acquire()
    first, second = lease.prepare(1), lease.prepare(2)
    for entry in (second, first):
        assert lease.received(entry).success
        lease.commit(entry)
    assert desk.finish() and desk.server.held() == NOTHING


def test_keys_of_a_lookup_name_every_rank_and_those_of_a_read_one() -> None:
    desk = Desk(cached=2)
    lease = desk.lease()
    lease.acquire()
    lease.commit(lease.prepare(1))
    desk.finish()
    by_kind = {type(request): request for request in desk.server.requests}
    for kind, worker_id in ((p.Lookup, None), (p.FreeLookupLocks, None), (p.PrepareRetrieve, 0), (p.CommitRetrieve, 0)):
        key = by_kind[kind].key  # type: ignore[attr-defined]  # these four have one
        assert (key.worker_id, key.num_kv_readers, key.world_size) == (worker_id, 1, 1)
        assert key.token_ids.to_list() == list(range(100, 112))
        assert key.request_id == desk.operation.request_id
    lookup = desk.server.asked(p.Lookup)[0]
    assert (lookup.key.start, lookup.key.end, lookup.tp_size) == (0, 12, 1)


def test_a_slow_prefetch_is_polled_with_growing_pauses() -> None:
    desk = Desk(cached=2, seconds=60)
    times: list[float] = []
    desk.server.on(p.QueryPrefetchStatus, *[then(loading, lambda: times.append(desk.clock.now))] * 30)
    assert desk.lease().acquire() == 2
    pauses = [round(after - before, 6) for before, after in itertools.pairwise(times)]
    waited = [pause for pause in pauses if pause >= 0.001]
    assert waited == sorted(waited) and max(waited) == 0.02 and waited.count(0.02) >= 20
    assert desk.server.asked(p.WaitPrefetchStatus) == []
    assert desk.finish() and desk.server.held() == NOTHING


# ---- timeouts: before, between, after --------------------------------------------------------------------------------


@every_release
@both_planes
def test_a_late_lookup_is_looked_after_within_the_clean_up(release: str, shm: bool) -> None:
    desk = Desk(release, shm=shm, cached=2, seconds=1.0)
    desk.server.on(p.Lookup, late(1.2))
    lease = desk.lease()
    with pytest.raises(DeadlineExceededError) as caught:
        lease.acquire()
    assert caught.value.step == "retrieve: LOOKUP"
    assert desk.finish()
    assert len(desk.server.asked(p.QueryPrefetchStatus)) == 1 and desk.freed() == [(0, 2)]
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@every_release
def test_a_very_late_lookup_is_looked_after_by_whoever_comes_next(release: str) -> None:
    desk = Desk(release, cached=2, seconds=1.0)
    desk.server.on(p.Lookup, late(30.0))
    lease = desk.lease()
    with pytest.raises(DeadlineExceededError):
        lease.acquire()
    for _ in range(3):
        assert not desk.finish()
        assert lease.state is LeaseState.UNCERTAIN
    assert desk.server.names() == ["Lookup"]
    desk.clock.advance(60)
    assert desk.finish(0.0) or desk.finish()
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@every_release
def test_a_lost_lookup_ends_with_its_time_and_frees_nothing(release: str) -> None:
    desk = Desk(release, cached=2, seconds=1.0)
    desk.server.on(p.Lookup, ignored)
    lease = desk.lease()
    with pytest.raises(DeadlineExceededError):
        lease.acquire()
    assert not desk.finish()
    desk.clock.advance(READ_TTL)
    assert desk.finish() and lease.state is LeaseState.RELEASED
    assert desk.freed() == [] and desk.server.held() == NOTHING and desk.ended_last_and_once()


@every_release
@both_planes
def test_a_late_number_is_waited_for_and_not_asked_for_again(release: str, shm: bool) -> None:
    """It is delivered once: a second question is answered 0, and the locks would stay."""
    desk = Desk(release, shm=shm, cached=2, seconds=1.0)
    desk.server.on(p.QueryPrefetchStatus, late(1.2))
    with pytest.raises(DeadlineExceededError) as caught:
        desk.lease().acquire()
    assert caught.value.step == "retrieve: QUERY_PREFETCH_STATUS"
    assert desk.finish()
    assert len(desk.server.asked(p.QueryPrefetchStatus)) == 1 and desk.freed() == [(0, 2)]
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@every_release
def test_a_very_late_number_too(release: str) -> None:
    desk = Desk(release, cached=2, seconds=1.0)
    desk.server.on(p.QueryPrefetchStatus, late(20.0))
    with pytest.raises(DeadlineExceededError):
        desk.lease().acquire()
    assert not desk.finish() and not desk.finish()
    desk.clock.advance(20)
    assert desk.finish()
    assert len(desk.server.asked(p.QueryPrefetchStatus)) == 1
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


@pytest.mark.parametrize("release", RELEASES)
def test_a_lost_number_is_left_to_the_ttl(release: str) -> None:
    """Leaking beats stealing: nobody knows how far the locks go."""
    desk = Desk(release, cached=2, seconds=1.0)
    desk.server.on(p.QueryPrefetchStatus, silence)
    lease = desk.lease()
    with pytest.raises(DeadlineExceededError):
        lease.acquire()
    assert not desk.finish()
    desk.clock.advance(READ_TTL)
    assert desk.finish() and lease.state is LeaseState.RELEASED
    assert desk.server.held().stolen == 0 and desk.ended_last_and_once()


@pytest.mark.parametrize("release", RELEASES)
def test_the_last_words_of_an_unknown_hit_are_a_free_only_where_it_cannot_steal(release: str) -> None:
    desk = Desk(release, cached=2, seconds=1.0)
    desk.server.on(p.QueryPrefetchStatus, silence)
    with pytest.raises(DeadlineExceededError):
        desk.lease().acquire()
    desk.finish()
    desk.operation.give_up()
    desk.operation.give_up()
    bound = p.DIALECTS[release].free_needs_live_session
    assert len(desk.freed()) == (1 if bound else 0)
    assert desk.server.held() == Held(read_locks=0 if bound else 2)
    assert desk.ended_last_and_once()


@every_release
def test_a_prefetch_that_takes_longer_than_the_call(release: str) -> None:
    desk = Desk(release, cached=2, seconds=1.0)
    desk.server.always(p.QueryPrefetchStatus, loading)
    with pytest.raises(DeadlineExceededError, match="still loading") as caught:
        desk.lease().acquire()
    assert caught.value.step.startswith("retrieve: QUERY_PREFETCH_STATUS")
    assert not desk.finish()
    desk.server.always(p.QueryPrefetchStatus, answer)
    assert desk.finish()
    assert desk.freed() == [(0, 2)]
    assert desk.server.held() == NOTHING and desk.ended_last_and_once()


def test_the_clean_up_keeps_to_its_budget() -> None:
    desk = Desk(cached=2, seconds=1.0)
    desk.server.on(p.Lookup, silence)
    with pytest.raises(DeadlineExceededError):
        desk.lease().acquire()
    began = desk.clock.now
    assert not desk.finish(0.5)
    assert desk.clock.now - began == pytest.approx(0.5)


def test_a_lease_whose_ttl_is_not_known_is_never_given_up() -> None:
    desk = Desk(cached=2, seconds=1.0)
    desk.server.on(p.Lookup, ignored)
    with pytest.raises(DeadlineExceededError):
        desk.lease(ttl=None).acquire()
    desk.clock.advance(10 * READ_TTL)
    assert not desk.finish()


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
@settings(max_examples=150, deadline=None)
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
