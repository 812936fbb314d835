"""Row 4: what is cached already, and a pool that is full."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from lmcache_sdk import AlreadyCachedError
from tests.integration.cases import CHUNK
from tests.integration.patterns import same_bytes

from .conftest import everywhere
from .report import Fault
from .worlds import World, tokens_of

POOL_CHUNKS = 256


@pytest.mark.row("4.1")
@pytest.mark.parametrize("data", ["same", "other"])
def test_already_cached(fault: Fault, here: World, data: str) -> None:
    tokens = tokens_of(2)
    kv, other = here.values(len(tokens), 1), here.values(len(tokens), 2)
    ctx = here.connect()
    assert ctx.store(kv, tokens).written_chunks == 2
    given = kv if data == "same" else other
    stored = ctx.store(given, tokens)
    assert stored and (stored.written_chunks, stored.already_cached_chunks, stored.missing_chunks) == (0, 2, 0)
    fault.exact(ctx.retrieve(tokens), kv, "the first data")
    error = fault.error(lambda: ctx.store(given, tokens, existing="error"), AlreadyCachedError)
    assert error.chunk_indices == (0, 1)
    fault.saw("True, 0 written, 2 already cached")


@pytest.mark.row("4.2")
def test_prefixes(fault: Fault, here: World) -> None:
    tokens = tokens_of(4)
    kv = here.values(len(tokens), 3)
    ctx = here.connect()
    half = 2 * CHUNK
    assert ctx.store(kv[:, :, :half], tokens[:half]).written_chunks == 2
    more = ctx.store(kv, tokens)
    assert more and (more.written_chunks, more.already_cached_chunks) == (2, 2)
    fault.exact(ctx.retrieve(tokens), kv, "prefix and new tail")
    diverging, its = [*tokens[:half], *tokens_of(2)], here.values(len(tokens), 4)
    stored = ctx.store(its, diverging)
    assert stored and (stored.written_chunks, stored.already_cached_chunks) == (2, 2)
    found = ctx.retrieve(diverging)
    fault.never(
        found is None or not same_bytes(found[:, :, half:].contiguous(), its[:, :, half:].contiguous()), "suffix"
    )
    fault.never(
        found is None or not same_bytes(found[:, :, :half].contiguous(), kv[:, :, :half].contiguous()), "prefix"
    )
    again = ctx.store(kv[:, :, :CHUNK], tokens[:CHUNK])
    assert again and (again.written_chunks, again.already_cached_chunks) == (0, 1)
    fault.saw("True each time, with the counts; exact")


@pytest.mark.row("4.3")
@everywhere
def test_larger_than_the_pool(fault: Fault, here: World) -> None:
    tokens = tokens_of(POOL_CHUNKS + 44)
    kv = here.values((POOL_CHUNKS + 44) * CHUNK, 5)
    ctx = here.connect(timeout=30)
    stored = ctx.store(kv, tokens)
    fault.never(bool(stored), "True, and the pool cannot hold it")
    assert stored.total_chunks == POOL_CHUNKS + 44 and stored.missing_chunks >= 44, stored
    assert "pool" in stored.reason and "full" in stored.reason, stored
    found = ctx.lookup(tokens).hit_tokens // CHUNK
    fault.exact_or_miss(ctx.retrieve(tokens), kv)
    assert found <= stored.total_chunks - stored.missing_chunks, (found, stored)
    small = tokens_of(1)
    assert ctx.store(kv[:, :, :CHUNK], small), "nothing fits any more"
    fault.exact(ctx.retrieve(small), kv[:, :, :CHUNK].contiguous(), "another store")
    fault.saw(f"False, {stored.missing_chunks} of {stored.total_chunks} missing, with the reason")


@pytest.mark.row("4.4")
def test_back_to_back(fault: Fault, here: World) -> None:
    ctx = here.connect(timeout=10)
    told: Counter[bool] = Counter()
    slowest = 0.0
    stored_lists = []
    for number in range(40):
        tokens = tokens_of(16)
        kv = here.values(16 * CHUNK, 100 + number)
        began = time.monotonic()
        stored = ctx.store(kv, tokens)
        slowest = max(slowest, time.monotonic() - began)
        found = ctx.lookup(tokens).hit_tokens // CHUNK
        told[bool(stored)] += 1
        fault.never(bool(stored) and found == 0, "True, and a lookup finds nothing of it")
        if stored:
            assert found == 16, (number, found, stored)
        else:
            assert stored.missing_chunks and stored.reason, stored
        stored_lists.append((tokens, kv))
    readable = 0
    for tokens, kv in stored_lists:
        found_kv = ctx.retrieve(tokens)
        fault.exact_or_miss(found_kv, kv)
        readable += found_kv is not None
    assert told[True] >= 36, told
    assert readable >= 10
    fault.saw(
        f"{told[True]} True, {told[False]} False with the reason, slowest {slowest:.1f} s; {readable} readable, 0 wrong"
    )


@pytest.mark.row("4.5")
def test_partly_evicted(fault: Fault, here: World) -> None:
    ctx = here.connect(timeout=10)
    lists = [tokens_of(16) for _ in range(22)]
    kvs = [here.values(len(tokens), 300 + index) for index, tokens in enumerate(lists)]
    for kv, tokens in zip(kvs, lists, strict=True):
        ctx.store(kv, tokens)
    time.sleep(1.5)  # eviction is asynchronous
    lengths = []
    for kv, tokens in zip(kvs, lists, strict=True):
        hit = ctx.lookup(tokens).hit_tokens
        found = ctx.retrieve(tokens)
        fault.exact_or_miss(found, kv)
        assert hit == (0 if found is None else found.shape[2])
        lengths.append(hit // CHUNK)
    partly = [length for length in lengths if 0 < length < 16]
    fault.saw(
        f"{lengths.count(16)} whole, {len(partly)} partly ({partly[:3]} of 16 chunks), exact; lookup tells the length"
    )


@pytest.mark.row("4.6")
def test_writer_and_reader_under_eviction(fault: Fault, here: World) -> None:
    lists = [tokens_of(8) for _ in range(48)]  # 384 chunks, half as many again as fit
    kvs = [here.values(8 * CHUNK, 200 + index) for index in range(len(lists))]
    before = here.server.held()
    over = threading.Event()
    errors: list[BaseException] = []

    def write() -> None:
        try:
            ctx, number = here.connect(timeout=10), 0
            while not over.is_set():
                ctx.store(kvs[number % 48], lists[number % 48])
                number += 1
            ctx.close()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    reader, seen, number = here.connect(timeout=10), Counter[str](), 0
    end = time.monotonic() + 8
    try:
        while time.monotonic() < end and not errors:
            index = (number * 7) % 48
            found = reader.retrieve(lists[index])
            fault.exact_or_miss(found, kvs[index])
            seen["hits" if found is not None else "misses"] += 1
            number += 1
    finally:
        over.set()
        writer.join(20)
    assert errors == []
    reader.close()
    here.settled(before)
    assert seen["hits"] > 10, seen
    fault.saw(f"{seen['hits']} hits exact, {seen['misses']} misses, 0 wrong, 0 locks")
