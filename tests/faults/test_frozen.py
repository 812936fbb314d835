"""Row 6: the server stops answering for a while (SIGSTOP), in the middle of calls."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lmcache_sdk import DeadlineExceededError, KVCacheSDKError, LMCacheKVCacheContext
from lmcache_sdk.facade import transfer
from lmcache_sdk.layout import blobs, packing
from tests.integration.patterns import same_bytes

from .conftest import everywhere
from .report import SLACK, Fault
from .worlds import World, tokens_of

T = 1.0
"""The timeout of the calls."""
LONGER = 2.2
"""Seconds for which the server is frozen."""


@pytest.mark.row("6.1")
@pytest.mark.parametrize("kind", ["retrieve", "lookup"])
def test_frozen_past_a_read(fault: Fault, here: World, kind: str) -> None:
    tokens = tokens_of(4)
    kv = here.values(len(tokens), 1)
    ctx = here.connect(timeout=T)
    assert ctx.store(kv, tokens)
    quiet = here.server.held()
    call = ctx.retrieve if kind == "retrieve" else ctx.lookup
    with here.frozen_for(LONGER):
        fault.error(lambda: call(tokens), DeadlineExceededError, within=T + SLACK, says=f"{kind}: LOOKUP")
    fault.exact(fault.timed(lambda: ctx.retrieve(tokens), SLACK), kv, "the next retrieve")
    here.settled(quiet)  # no lock, no job, no session of the lost call


@pytest.mark.row("6.1")
def test_frozen_in_the_copy_of_a_retrieve(fault: Fault, here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(4)
    kv = here.values(len(tokens), 2)
    ctx = here.connect(timeout=T)
    assert ctx.store(kv, tokens)
    quiet = here.server.held()
    done = threading.Event()

    def freezing(*arguments: object) -> None:
        if not done.is_set():
            done.set()
            here.server.freeze()
        packing.unpack(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "unpack", freezing)
    found = fault.timed(lambda: ctx.retrieve(tokens), T + SLACK, "retrieve")
    here.server.thaw()
    fault.exact(found, kv)  # the bytes are here; only the clean-up gets no answer
    fault.exact(ctx.retrieve(tokens), kv, "the next retrieve")
    here.settled(quiet)


@pytest.mark.row("6.2")
@pytest.mark.parametrize("kind", ["retrieve", "lookup", "store", "connect"])
def test_frozen_throughout(fault: Fault, here: World, kind: str) -> None:
    tokens = tokens_of(4)
    kv = here.values(len(tokens), 3)
    ctx = here.connect(timeout=T)
    calls: dict[str, Callable[[], object]] = {
        "retrieve": lambda: ctx.retrieve(tokens),
        "lookup": lambda: ctx.lookup(tokens),
        "store": lambda: ctx.store(kv, tokens),
        "connect": lambda: here.connect(timeout=T),
    }
    with here.frozen():
        for _ in range(2):
            error = fault.error(calls[kind], DeadlineExceededError, within=T + SLACK)
            assert error.step
            if kind != "connect" and "earlier call" not in str(error):
                assert "does not answer either" in str(error), error
    assert ctx.lookup(tokens_of(1)).hit_tokens == 0


@pytest.fixture
def freeze_in_copy(monkeypatch: pytest.MonkeyPatch, here: World) -> Iterator[Callable[[], None]]:
    """Freezes the server when the next copy of a store begins."""
    armed = threading.Event()

    def freezing(copy: Callable[..., None]) -> Callable[..., None]:
        def freeze_and_copy(*arguments: object) -> None:
            if armed.is_set():
                armed.clear()
                here.server.freeze()
            copy(*arguments)

        return freeze_and_copy

    monkeypatch.setattr(transfer, "pack", freezing(packing.pack))
    monkeypatch.setattr(blobs, "pack_chunk", freezing(packing.pack_chunk))
    yield armed.set
    here.server.thaw()


def store_on_frozen(fault: Fault, here: World, ctx: LMCacheKVCacheContext, kv: torch.Tensor, tokens: list[int]) -> None:
    """A store that times out on a server that is frozen before the call."""
    with here.frozen_for(LONGER):
        fault.error(lambda: ctx.store(kv, tokens), DeadlineExceededError, within=T + SLACK, says="store")


@pytest.mark.row("6.3")
@everywhere
@pytest.mark.parametrize("data", ["same data", "other data"])
def test_frozen_past_a_store_then_retry(fault: Fault, here: World, data: str) -> None:
    tokens = tokens_of(4)
    first, second = here.values(len(tokens), 4), here.values(len(tokens), 5)
    retried = first if data == "same data" else second
    ctx = here.connect(timeout=T)
    store_on_frozen(fault, here, ctx, first.clone(), tokens)
    retry(fault, here, ctx, first, retried, tokens)


def retry(
    fault: Fault,
    here: World,
    ctx: LMCacheKVCacheContext,
    first: torch.Tensor,
    again: torch.Tensor,
    tokens: list[int],
) -> None:
    """A second store of the tokens; what it says is what another reader finds."""
    stored = fault.timed(lambda: ctx.store(again, tokens), T + SLACK, "the retry")
    found = here.read(tokens)
    fault.never(bool(stored) and found is None, "the retry said True and nothing is stored")
    assert stored and stored.written_chunks + stored.already_cached_chunks == 4
    # the first writer wins, whole: the data of the retry are there only when it says that it wrote them
    fault.exact(found, first if stored.already_cached_chunks else again, "another reader")
    assert here.server.held().write_locked == 0


@pytest.mark.row("6.3")
@everywhere
@pytest.mark.parametrize("data", ["same data", "other data"])
def test_frozen_in_the_copy_of_a_store_then_retry(
    fault: Fault, here: World, freeze_in_copy: Callable[[], None], data: str
) -> None:
    tokens = tokens_of(4)
    first, second = here.values(len(tokens), 6), here.values(len(tokens), 9)
    ctx = here.connect(timeout=T)
    freeze_in_copy()
    fault.error(lambda: ctx.store(first, tokens), DeadlineExceededError, within=T + SLACK, says="store")
    here.server.thaw()
    retry(fault, here, ctx, first, first if data == "same data" else second, tokens)


@pytest.mark.row("6.3")
@everywhere
def test_frozen_past_a_store_then_close(fault: Fault, here: World) -> None:
    tokens = tokens_of(4)
    kv = here.values(len(tokens), 7)
    ctx = here.connect(timeout=T)
    given = kv.clone()
    store_on_frozen(fault, here, ctx, given, tokens)
    given.zero_()  # the caller owns its tensor again
    fault.timed(ctx.close, 3.0, "close")
    fault.exact_or_miss(here.read(tokens), kv, "after close")
    fault.saw("nothing but what was stored is ever read")


@pytest.mark.row("6.4")
def test_random_freezes(fault: Fault, here: World) -> None:
    tokens = tokens_of(8)
    kv = here.values(len(tokens), 8)
    ctx = here.connect(timeout=T)
    assert ctx.store(kv, tokens)
    quiet = here.server.held()
    over = threading.Event()

    def freeze_and_thaw() -> None:
        chooser = random.Random(6)
        while not over.wait(chooser.uniform(0.02, 0.8)):
            with here.frozen():
                over.wait(chooser.choice((0.05, 0.3, 1.0, LONGER)))

    saboteur = threading.Thread(target=freeze_and_thaw)
    saboteur.start()
    exact, errors, slowest, end = 0, 0, 0.0, time.monotonic() + 15
    try:
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                found = ctx.retrieve(tokens)
                fault.never(found is not None and not same_bytes(found, kv), "wrong bytes as a hit")
                assert found is not None, "a hit was reported as a miss"
                exact += 1
            except DeadlineExceededError:
                errors += 1
            slowest = max(slowest, time.monotonic() - began)
    finally:
        over.set()
        saboteur.join()
    assert exact > 20
    assert slowest <= T + SLACK, f"a call took {slowest:.2f} s"
    fault.saw(f"{exact} exact, {errors} DeadlineExceededError, 0 wrong, slowest {slowest:.1f} s")
    fault.exact(ctx.retrieve(tokens), kv, "afterwards")
    here.settled(quiet)


@pytest.mark.row("6.3")
def test_frozen_store_of_many_threads(fault: Fault, here: World) -> None:
    """Eight stores at once on one context, all cut off, all done again."""
    lists = [tokens_of(2) for _ in range(8)]
    ctx = here.connect(timeout=T)
    kvs = [here.values(len(tokens), 10 + index) for index, tokens in enumerate(lists)]
    errors: list[KVCacheSDKError] = []

    def store(index: int) -> None:
        try:
            ctx.store(kvs[index], lists[index])
        except DeadlineExceededError as error:
            errors.append(error)

    with here.frozen_for(LONGER):
        threads = [threading.Thread(target=store, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 8
    for kv, tokens in zip(kvs, lists, strict=True):
        assert ctx.store(kv, tokens)
        fault.exact(here.read(tokens), kv, "8 threads, each")
