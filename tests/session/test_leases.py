"""Read locks without faults and with late answers: taken once, given back once, and END_SESSION after everything."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import (
    DeadlineExceededError,
)
from lmcache_sdk.session.states import LeaseState
from tests.fix_fake_server import NOTHING, Action, Held, answer
from tests.fix_faults import ignored, late, loading, silence, then
from tests.session.desk import READ_TTL, Desk, read

RELEASES: Final = list(p.DIALECTS)
CLIPPED: Final = [release for release, dialect in p.DIALECTS.items() if dialect.free_clips_to_hit]
UNCONDITIONAL: Final = [release for release in RELEASES if release not in CLIPPED]

every_release = pytest.mark.parametrize("release", RELEASES)
both_planes = pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])


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


@every_release
@pytest.mark.parametrize("last", [silence, late(5.0)], ids=["silent", "late"])
def test_a_prefetch_whose_last_answer_was_still_loading(release: str, last: Action) -> None:
    """The deadline strikes while the next question is on its way."""
    desk = Desk(release, cached=2, seconds=1.0)
    desk.server.on(p.QueryPrefetchStatus, loading, loading, last)
    with pytest.raises(DeadlineExceededError, match=r"still loading .*: no answer within 1 s") as caught:
        desk.lease().acquire()
    assert caught.value.step.startswith("retrieve: QUERY_PREFETCH_STATUS")


@every_release
def test_a_prefetch_that_was_never_answered_is_not_called_loading(release: str) -> None:
    desk = Desk(release, cached=2, seconds=1.0)
    desk.server.on(p.QueryPrefetchStatus, silence)
    with pytest.raises(DeadlineExceededError) as caught:
        desk.lease().acquire()
    assert caught.value.step == "retrieve: QUERY_PREFETCH_STATUS"


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
