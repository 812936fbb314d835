"""What ends by itself: read locks, write reservations, sessions, registrations. The clock is moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.devserver import DevServer, ManualClock, unique_shm_name
from lmcache_sdk.values import InstanceId
from tests.devserver.raw import (
    RELEASES,
    RawClient,
    chunks,
    commit_store,
    end,
    free,
    key,
    lookup,
    payload,
    prepare_retrieve,
    prepare_store,
    query,
    registration,
    running,
    tokens_of,
    unregister,
)

GARBAGE = tuple(release for release in RELEASES if p.dialect_named(release).garbage_after_write_ttl)
STAGED = tuple(release for release in RELEASES if release not in GARBAGE)


@contextmanager
def timed(release: str = "0.5.6", **settings: Any) -> Iterator[tuple[DevServer, RawClient, ManualClock]]:
    """A server with a shared pool that has one instance registered, and its clock."""
    clock = ManualClock()
    with running(release, clock=clock, **{"shm_name": unique_shm_name(), **settings}) as (server, client):
        client.call(registration(1))
        yield server, client, clock


def store(client: RawClient, tokens: list[int], instance_id: int = 1) -> None:
    named = key(tokens)
    client.call(prepare_store(instance_id, named))
    assert client.call(commit_store(instance_id, named)).success


def hit(client: RawClient, tokens: list[int], request_id: str) -> int | None:
    client.call(lookup(tokens, request_id))
    return client.call(query(request_id)).ready_chunks


@pytest.mark.parametrize("release", RELEASES)
def test_a_new_lock_renews_all_of_them(release: str) -> None:
    with timed(release, read_ttl=300) as (server, client, clock):
        store(client, tokens_of(100))
        assert hit(client, tokens_of(100), "a") == 2
        clock.advance(200)
        assert hit(client, tokens_of(100), "b") == 2
        clock.advance(200)
        assert server.leases() == 4, "the first lookup's locks would have ended after 300 seconds"
        clock.advance(101)
        assert server.leases() == 0
        assert not client.call(prepare_retrieve(1, key(tokens_of(100), request_id="a"))).success


def test_a_lock_that_ended_is_not_there_to_be_freed() -> None:
    with timed() as (server, client, clock):
        store(client, tokens_of(100))
        hit(client, tokens_of(100), "a")
        clock.advance(301)
        hit(client, tokens_of(100), "b")
        client.call(free(tokens_of(100), "a"))
        assert server.leases() == 0, "the late FREE has taken the other reader's locks"


@pytest.mark.parametrize("release", GARBAGE)
def test_an_abandoned_reservation_becomes_a_hit_of_garbage(release: str) -> None:
    with timed(release) as (server, client, clock):
        client.call(registration(2))
        client.call(prepare_store(1, key(tokens_of(100))))
        assert hit(client, tokens_of(100), "before") == 0
        clock.advance(601)
        assert hit(client, tokens_of(100), "after") == 2
        assert client.call(prepare_store(2, key(tokens_of(100)))).slots == ()
        assert server.locks() == 0


@pytest.mark.parametrize("release", STAGED)
def test_an_abandoned_reservation_goes_to_the_next_writer(release: str) -> None:
    with timed(release) as (_, client, clock):
        client.call(registration(2))
        first = client.call(prepare_store(1, key(tokens_of(100))))
        clock.advance(601)
        assert hit(client, tokens_of(100), "after") == 0
        second = client.call(prepare_store(2, key(tokens_of(100))))
        assert second == first, "the same bytes"
        assert second.slots
        late = client.call(commit_store(1, key(tokens_of(100))))
        assert late.success
        assert hit(client, tokens_of(100), "late") == 2, "the first writer has published the second one's bytes"


@pytest.mark.parametrize("release", STAGED)
def test_a_late_commit_says_true_and_publishes_nothing(release: str) -> None:
    with timed(release) as (_, client, clock):
        client.call(prepare_store(1, key(tokens_of(100))))
        clock.advance(601)
        assert client.call(commit_store(1, key(tokens_of(100)))).success
        assert hit(client, tokens_of(100), "late") == 0


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("way", ["unregister", "reap"])
def test_leaving_publishes_what_was_reserved(release: str, way: str) -> None:
    with timed(release, reap=120, grace=100, write_ttl=600) as (server, client, clock):
        client.call(registration(2))
        client.call(prepare_store(2, key(tokens_of(100))))
        if way == "unregister":
            client.call(unregister(2))
        else:
            clock.advance(99)
            client.call(registration(1))
            clock.advance(2)
            server.tick()
        assert server.held().registrations == {1}
        assert server.held().pending_stores == 0
        assert hit(client, tokens_of(100), "r") == 2


def test_leaving_after_the_time_publishes_nothing() -> None:
    with timed() as (_, client, clock):
        client.call(registration(2))
        client.call(prepare_store(2, key(tokens_of(100))))
        clock.advance(601)
        client.call(unregister(2))
        assert hit(client, tokens_of(100), "r") == 0


def test_leaving_unlocks_what_was_being_read() -> None:
    with timed() as (server, client, _):
        client.call(registration(2))
        store(client, tokens_of(100))
        hit(client, tokens_of(100), "r")
        client.call(prepare_retrieve(2, key(tokens_of(100), request_id="r")))
        assert server.leases() == 2
        client.call(unregister(2))
        assert server.leases() == 0


@pytest.mark.parametrize("release", ["0.5.0", "0.5.1", "0.5.6", "0.5.7rc2"])
def test_sessions_end_by_age_not_by_silence(release: str) -> None:
    with timed(release) as (server, client, clock):
        hit(client, tokens_of(100), "r")
        clock.advance(599)
        hit(client, tokens_of(100), "r")
        clock.advance(2)
        server.tick()
        assert server.held().sessions == (1 if release == "0.5.0" else 0)


def test_jobs_never_end() -> None:
    with timed() as (server, client, clock):
        client.call(lookup(tokens_of(100), "r"))
        clock.advance(10**6)
        server.tick()
        assert server.held().jobs == 1
        assert client.call(query("r")).ready_chunks == 0
        assert server.held().jobs == 0


def test_patience_is_short_only_after_a_ping() -> None:
    with timed(reap=120, grace=3600) as (server, client, clock):
        client.call(registration(2, model="other"))
        client.call(p.Ping(instance_id=InstanceId(2)))
        clock.advance(121)
        server.tick()
        assert server.held().registrations == {1}
        clock.advance(3600 - 122)
        server.tick()
        assert server.held().registrations == {1}
        clock.advance(2)
        server.tick()
        assert server.held().registrations == set()


@pytest.mark.parametrize(
    "request_made",
    [
        registration(1),
        p.Ping(instance_id=InstanceId(1)),
        prepare_store(1, key(tokens_of(100))),
        commit_store(1, key(tokens_of(100))),
        prepare_retrieve(1, key(tokens_of(100))),
        p.CommitRetrieve(key=key(tokens_of(100)), instance_id=InstanceId(1)),
    ],
    ids=lambda request: type(request).__name__,
)
def test_what_counts_as_life(request_made: p.Request[Any]) -> None:
    with timed(reap=120, grace=120) as (server, client, clock):
        clock.advance(100)
        client.call(request_made)
        clock.advance(100)
        server.tick()
        assert server.held().registrations == {1}


@pytest.mark.parametrize(
    "request_made",
    [lookup(tokens_of(100), "r"), query("r"), free(tokens_of(100), "r"), end("r"), p.Ping(instance_id=None), p.Noop()],
    ids=lambda request: type(request).__name__,
)
def test_what_does_not(request_made: p.Request[Any]) -> None:
    with timed(reap=120, grace=120) as (server, client, clock):
        clock.advance(100)
        client.call(request_made)
        clock.advance(100)
        server.tick()
        assert server.held().registrations == set()


def test_after_being_reaped_nothing_is_answered_until_registering_again() -> None:
    with timed(reap=120, grace=120) as (server, client, clock):
        clock.advance(121)
        server.tick()
        assert client.call(p.Ping(instance_id=InstanceId(1))).alive
        assert client.is_silent(prepare_store(1, key(tokens_of(100))))
        client.call(registration(1))
        assert client.call(prepare_store(1, key(tokens_of(100)))).slots


def test_the_background_looks_at_the_clock_too() -> None:
    with timed(reap=120, grace=120) as (server, _, clock):
        clock.advance(121)
        until = 100
        while server.held().registrations and until:
            until -= 1
            server._stopping.wait(0.05)
        assert server.held().registrations == set()


@pytest.mark.parametrize("release", RELEASES)
def test_expire_ttls_ends_every_lock_now(release: str) -> None:
    with running(release) as (server, client):
        client.call(registration(1))
        client.call(commit_store(1, key(tokens_of(100)), payload(release, chunks(2))))
        hit(client, tokens_of(100), "r")
        assert server.leases() == 2
        server.expire_ttls()
        assert server.leases() == 0
