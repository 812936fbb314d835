"""Making room: in the background, above a watermark, the least recently used first, never what is locked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmcache_sdk.devserver import DevServer, unique_shm_name
from tests.devserver.raw import (
    CHUNK,
    RELEASES,
    RawClient,
    commit_store,
    end,
    free,
    key,
    lookup,
    prepare_store,
    query,
    registration,
    running,
    tokens_of,
)

ROOM = 10
"""Chunks that fit."""


@contextmanager
def small(release: str = "0.5.6", **settings: Any) -> Iterator[tuple[DevServer, RawClient]]:
    options = {"shm_name": unique_shm_name(), "l1_size_bytes": ROOM * 4096, "eviction_interval": 1000.0, **settings}
    with running(release, **options) as (server, client):
        client.call(registration(1))
        yield server, client


def store(client: RawClient, first: int, count: int) -> int:
    """How many chunks were reserved, and are now published."""
    named = key(tokens_of(first, count * CHUNK), request_id=f"store {first}")
    slots = client.call(prepare_store(1, named)).slots
    assert slots is not None
    if slots:
        assert client.call(commit_store(1, named)).success
    client.call(end(f"store {first}"))
    return len(slots)


def hit(client: RawClient, first: int, count: int, *, keep: bool = False) -> int | None:
    tokens, name = tokens_of(first, count * CHUNK), f"look {first}"
    client.call(lookup(tokens, name))
    found = client.call(query(name)).ready_chunks
    if found and not keep:
        client.call(free(tokens, name, end=found * CHUNK))
    client.call(end(name))
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_a_full_pool_says_empty_until_eviction_has_run(release: str) -> None:
    with small(release) as (server, client):
        assert store(client, 0, 8) == 8
        assert store(client, 1000, 3) == 0
        assert server.evict_run() == 1, "a fifth of eight"
        assert store(client, 1000, 3) == 3
        assert hit(client, 0, 8) == 7, "the end of the prefix goes first"


def test_nothing_happens_below_the_watermark() -> None:
    with small() as (server, client):
        store(client, 0, 7)
        assert server.evict_run() == 0
        store(client, 1000, 1)
        assert server.evict_run() == 1


def test_what_was_used_stays() -> None:
    with small(eviction_ratio=0.5) as (server, client):
        store(client, 0, 4)
        store(client, 1000, 4)
        assert hit(client, 0, 4) == 4
        assert server.evict_run() == 4
        assert hit(client, 0, 4) == 4
        assert hit(client, 1000, 4) == 0


def test_what_is_read_or_written_is_never_evicted() -> None:
    with small(eviction_ratio=1.0) as (server, client):
        store(client, 0, 4)
        assert hit(client, 0, 4, keep=True) == 4
        client.call(prepare_store(1, key(tokens_of(1000, 4 * CHUNK))))
        assert server.evict_run() == 0
        server.expire_ttls()
        assert server.evict_run() == 8


@pytest.mark.parametrize("keep", [0, 3])
def test_evict_all(keep: int) -> None:
    with small() as (server, client):
        store(client, 0, 2)
        store(client, 1000, 3)
        assert server.evict_all(keep=keep) == 5 - keep
        assert (hit(client, 0, 2), hit(client, 1000, 3)) == (0, keep)


def test_the_background_makes_room_within_a_second() -> None:
    with small(eviction_interval=0.1) as (_, client):
        assert store(client, 0, 9) == 9
        assert store(client, 1000, 2) == 0
        until = time.monotonic() + 5
        while not store(client, 1000, 2) and time.monotonic() < until:
            time.sleep(0.02)
        assert hit(client, 1000, 2) == 2


def test_memory_is_given_back_and_used_again() -> None:
    with small(eviction_ratio=1.0) as (server, client):
        for turn in range(20):
            assert store(client, 1000 * turn, ROOM) == ROOM
            assert server.evict_run() == ROOM
        assert server.status()["storage_manager"]["l1_manager"]["memory_used_bytes"] == 0  # type: ignore[index]  # JSON
