"""Row 9: many threads on one context, many processes on one server."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from lmcache_sdk import LMCacheKVCacheContext, StoreResult
from lmcache_sdk.facade import transfer
from lmcache_sdk.layout import blobs, packing
from tests.integration.cases import CHUNK
from tests.integration.patterns import same_bytes
from tests.integration.processes import Child

from .clients import script_env
from .conftest import everywhere
from .report import Fault
from .worlds import KV, World, run_threads, tokens_of


@pytest.mark.row("9.1")
@pytest.mark.parametrize("which", ["the same tokens", "different tokens"])
def test_16_threads_retrieve(fault: Fault, here: World, which: str) -> None:
    lists = [tokens_of(2) for _ in range(16)]
    kvs = [here.values(len(tokens), index) for index, tokens in enumerate(lists)]
    ctx = here.connect(timeout=30)
    for kv, tokens in zip(kvs, lists, strict=True):
        assert ctx.store(kv, tokens)
    quiet = here.server.held()
    results: list[torch.Tensor] = []

    def body(index: int) -> None:
        chosen = 0 if which == "the same tokens" else index
        for _ in range(25):
            found = ctx.retrieve(lists[chosen])
            fault.exact(found, kvs[chosen], "every thread")
            assert found is not None
            results.append(found)

    run_threads(16, body)
    assert len({found.data_ptr() for found in results}) == len(results) == 400  # nobody shares a tensor
    here.settled(quiet)
    assert here.server.held().read_locked == 0
    fault.saw("400 of 400, 0 locks left")


@pytest.mark.row("9.2")
def test_16_threads_store_and_read_back(fault: Fault, here: World) -> None:
    ctx = here.connect(timeout=30)
    quiet = here.server.held()

    def body(index: int) -> None:
        for turn in range(8):
            tokens = tokens_of(1)
            kv = here.values(CHUNK, 1000 + 16 * turn + index)
            stored = ctx.store(kv, tokens)
            assert stored.written_chunks == 1, stored
            fault.exact(ctx.retrieve(tokens), kv, "every thread")

    run_threads(16, body)
    here.settled(quiet)
    fault.saw("128 of 128")


@pytest.mark.row("9.3")
@everywhere
def test_two_threads_store_the_same_tokens(fault: Fault, here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take long, and another client reads all the time: a half-written slot would be seen."""

    def slowly(copy: Callable[..., None]) -> Callable[..., None]:
        def copy_slowly(*arguments: object) -> None:
            time.sleep(0.01)
            copy(*arguments)
            time.sleep(0.01)

        return copy_slowly

    monkeypatch.setattr(transfer, "pack", slowly(packing.pack))
    monkeypatch.setattr(blobs, "pack_chunk", slowly(packing.pack_chunk))
    ctx, reader = here.connect(timeout=20), here.connect(timeout=20)
    for round_ in range(6):
        tokens = tokens_of(4)
        kvs = [here.values(len(tokens), 2 * round_ + index) for index in range(2)]
        answers = contest(fault, ctx, reader, tokens, kvs)
        counts = [(answer.written_chunks, answer.already_cached_chunks) for answer in answers]
        assert sorted(counts) == [(0, 4), (4, 0)], counts
        fault.exact(here.read(tokens), kvs[0 if counts[0][0] else 1], "the one that wrote")
    fault.saw("one wrote all, the other found all; no half-written byte was ever read")


def contest(
    fault: Fault,
    ctx: LMCacheKVCacheContext,
    reader: LMCacheKVCacheContext,
    tokens: list[int],
    kvs: list[torch.Tensor],
) -> list[StoreResult]:
    """Each tensor is stored by a thread of its own, while another client reads; what the stores answered."""
    answers: dict[int, StoreResult] = {}
    ended = threading.Semaphore(0)

    def read() -> None:
        for _ in kvs:
            while not ended.acquire(timeout=0.001):
                found = reader.retrieve(tokens)
                if found is not None:
                    whole = [kv[:, :, : found.shape[2]].contiguous() for kv in kvs]
                    fault.never(not any(same_bytes(found, each) for each in whole), "a reader got bytes nobody stored")

    def body(index: int) -> None:
        if index == len(kvs):
            read()
            return
        try:
            answers[index] = ctx.store(kvs[index], tokens)
        finally:
            ended.release()

    run_threads(len(kvs) + 1, body)
    return [answers[index] for index in range(len(kvs))]


@pytest.mark.row("9.3")
@everywhere
def test_eight_threads_store_overlapping_tokens(fault: Fault, here: World) -> None:
    """Prefixes of different lengths of one sequence at once, all with the same data: every answer is true."""
    tokens = tokens_of(8)
    kv = here.values(len(tokens), 77)
    ctx = here.connect(timeout=20)
    before = here.server.held()

    def body(index: int) -> None:
        length = (index + 1) * CHUNK
        stored = ctx.store(kv[:, :, :length], tokens[:length])
        assert stored and stored.total_chunks == index + 1, stored
        fault.exact(ctx.retrieve(tokens[:length]), kv[:, :, :length].contiguous(), "every prefix")

    run_threads(8, body)
    here.settled(before)


@pytest.mark.row("9.4")
def test_8_processes(fault: Fault, here: World) -> None:
    before = here.server.held()
    lists = [tokens_of(2) for _ in range(20)]
    log = here.server.log.parent / "hammer.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.faults.scripts.hammer", here.server.url, here.server.http_url, KV]
    hammers = [
        Child(f"hammer {index}", [*command, str(index), json.dumps([tokens[0] for tokens in lists])], script_env(), log)
        for index in range(8)
    ]
    try:
        statuses = [hammer.wait(90) for hammer in hammers]
    finally:
        for hammer in hammers:
            hammer.stop()
    said: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        if line.startswith("{"):
            said.update(json.loads(line))
    fault.never(said["wrong"] > 0, f"{said['wrong']} wrong bytes")
    assert statuses == 8 * [0], log.read_text()[-2000:]
    assert said["exact"] == 160, said
    here.settled(before)
    fault.saw("160 exact, 0 wrong, 0 missed, 0 locks")
