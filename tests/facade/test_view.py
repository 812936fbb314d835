"""view and out=: the right bytes, locked for exactly as long as the block, and no use of either where it is unsafe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import (
    DeadlineExceededError,
    KVView,
    LeaseExpiredError,
    NotRegisteredError,
    RemoteProtocolError,
    SessionClosedError,
    ShapeMismatchError,
    UnknownLayoutError,
    UsageError,
)
from lmcache_sdk import protocol as p
from lmcache_sdk.session import leases
from tests.facade.rig import CHUNK, TOKENS, Rig, kv
from tests.fix_fake_server import NOTHING
from tests.fix_faults import says, silence

pytestmark = pytest.mark.usefixtures("hasty")


# ---- view ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", p.DIALECTS)
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])
def test_the_chunks_are_the_cache_and_locked_while_the_block_runs(release: str, shm: bool) -> None:
    with Rig(release, shm=shm) as rig:
        cached = rig.cache(2)
        ctx = rig.connect()
        with lmc_sdk.view(ctx, TOKENS) as chunks:
            assert type(chunks) is KVView and len(chunks) == 2 and chunks.hit_tokens == 2 * CHUNK
            assert rig.server.held().read_locks == (2 if shm else 0)
            assert all(chunk.shape == (2, 2, CHUNK, 4) for chunk in chunks)
            assert torch.equal(torch.cat(list(chunks), dim=2), cached)
            assert torch.equal(chunks[-1], cached[:, :, CHUNK:]) and len(chunks[0:1]) == 1
        assert rig.server.held() == NOTHING
        assert ctx.retrieve(TOKENS) is not None


def test_an_shm_view_is_the_pool_itself(shm_rig: Rig) -> None:
    shm_rig.cache(1)
    ctx = shm_rig.connect()
    with ctx.view(TOKENS) as chunks:
        pool = ctx._now.endpoint.session.pool
        assert pool is not None
        start = torch.frombuffer(pool.buffer, dtype=torch.uint8).data_ptr()
        assert start <= chunks[0].data_ptr() < start + pool.size


def test_a_miss_is_an_empty_view(rig: Rig) -> None:
    ctx = rig.connect()
    with ctx.view(TOKENS) as chunks:
        assert len(chunks) == 0 and list(chunks) == [] and not chunks and chunks.hit_tokens == 0
    with ctx.view(TOKENS[:2]) as chunks:
        assert not chunks
    assert rig.server.held() == NOTHING


def test_a_miss_of_a_model_that_nobody_holds_any_more_is_no_miss(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    rig.engines["7"] = {**rig.engines["7"], "model_name": "another"}
    rig.server.always(p.QueryPrefetchStatus, says(p.PrefetchStatus(0)))
    with pytest.raises(NotRegisteredError), ctx.view(TOKENS):
        pass


def test_after_the_block_the_view_refuses(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    with ctx.view(TOKENS) as chunks:
        pass
    for use in (lambda: chunks[0], lambda: len(chunks), lambda: list(chunks), chunks.check_alive):
        with pytest.raises(LeaseExpiredError, match="its block was left"):
            use()
    assert "its block was left" in repr(chunks)


def test_a_view_that_missed_refuses_after_its_block_too(rig: Rig) -> None:
    with rig.connect().view(TOKENS) as chunks:
        pass
    with pytest.raises(LeaseExpiredError):
        len(chunks)


def test_a_view_is_entered_once_and_before_it_is_read(rig: Rig) -> None:
    rig.cache(1)
    ctx = rig.connect()
    said = rig.said()
    view = ctx.view(TOKENS)
    with pytest.raises(UsageError, match="enter it first"):
        len(view)
    assert rig.said() == said
    with view, pytest.raises(UsageError, match="entered once"), view:
        pass
    assert rig.server.held() == NOTHING


def test_an_exception_in_the_block_goes_on_and_gives_everything_back(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    for kind in (KeyboardInterrupt, ValueError):
        with pytest.raises(kind), ctx.view(TOKENS):
            raise kind
        assert rig.server.held() == NOTHING


def test_what_the_server_lies_about_is_refused_and_given_back(shm_rig: Rig) -> None:
    shm_rig.cache(2)
    ctx = shm_rig.connect()
    lie = p.PreparedRetrieve(True, b"", (p.Slot(offset=2**40, length=16, shape=(2, 2, 4, 4), dtype="float32"),) * 2)
    shm_rig.server.on(p.PrepareRetrieve, says(lie))
    with pytest.raises(RemoteProtocolError), ctx.view(TOKENS):
        pass
    with ctx.view(TOKENS) as chunks:
        assert len(chunks) == 2


def test_a_view_that_outlives_half_the_ttl_says_so(shm_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    shm_rig.cache(2)
    ctx = shm_rig.connect()
    real = leases.ReadLease.check_alive
    late = threading.Event()

    def check(self: leases.ReadLease) -> None:
        if late.is_set():
            raise LeaseExpiredError("older than half")
        real(self)

    monkeypatch.setattr(leases.ReadLease, "check_alive", check)
    view = ctx.view(TOKENS)
    view.__enter__()
    late.set()
    with pytest.raises(LeaseExpiredError, match="older than half"):
        view[0]
    with pytest.raises(LeaseExpiredError, match="older than half"):
        view.__exit__(None, None, None)
    late.clear()
    assert shm_rig.server.held() == NOTHING


def test_a_close_inside_the_block_gives_the_locks_back_and_unregisters(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    instance = ctx._now.endpoint.identity.instance_id

    def close_inside() -> None:
        with ctx.view(TOKENS) as chunks:
            ctx.close()
            with pytest.raises(LeaseExpiredError, match="the context was closed"):
                chunks[0]
            assert rig.server.held() == NOTHING

    # what the block has read since then, through tensors that it has taken out, may not have been the cache
    with pytest.raises(LeaseExpiredError, match="the context was closed"):
        close_inside()
    assert instance in [request.instance_id for request in rig.server.asked(p.Unregister)]
    with pytest.raises(SessionClosedError):
        ctx.view(TOKENS)


def test_other_calls_inside_the_block(rig: Rig) -> None:
    """Lookups and other tokens go on; the same tokens would wait for themselves for ever."""
    rig.cache(3)
    ctx = rig.connect()
    with ctx.view(TOKENS):
        assert ctx.lookup(TOKENS).hit_tokens == len(TOKENS)
        assert ctx.retrieve(TOKENS[: 2 * CHUNK]) is not None
        with pytest.raises(UsageError, match="this thread"):
            ctx.retrieve(TOKENS)
        with pytest.raises(UsageError, match="this thread"):
            ctx.store(kv(), TOKENS)
        with pytest.raises(UsageError, match="this thread"), ctx.view(TOKENS):
            pass
    assert rig.server.held() == NOTHING


def test_another_thread_waits_for_the_block(rig: Rig) -> None:
    rig.cache(3)
    ctx = rig.connect()
    found: list[torch.Tensor | None] = []
    with ctx.view(TOKENS):
        thread = threading.Thread(target=lambda: found.append(ctx.retrieve(TOKENS)))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and found == []
    thread.join(5)
    assert len(found) == 1 and found[0] is not None


def test_a_view_dropped_inside_its_block_warns_and_gives_back(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    views = [ctx.view(TOKENS)]
    views[0].__enter__()
    with pytest.warns(ResourceWarning, match="dropped inside its block"):
        views.clear()
    assert rig.server.held() == NOTHING


def test_a_server_that_does_not_answer(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect(call_timeout=0.4)
    rig.server.on(p.PrepareRetrieve, silence)
    with pytest.raises(DeadlineExceededError), ctx.view(TOKENS):
        pass


@pytest.mark.parametrize("bad", ["text", [1.5], [-1], None])
def test_arguments_are_checked_before_anything_is_sent(rig: Rig, bad: Any) -> None:
    ctx = rig.connect()
    said = rig.said()
    with pytest.raises(UsageError):
        ctx.view(bad)
    assert rig.said() == said


# ---- out= ------------------------------------------------------------------------------------------------------------


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(*tensor.shape[:2], 2 * tensor.shape[2], tensor.shape[3])[:, :, ::2]


@pytest.mark.parametrize("make", [torch.empty_like, strided], ids=["contiguous", "strided"])
def test_the_result_is_in_out(rig: Rig, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    cached = rig.cache(2)
    out = make(kv())
    out.fill_(-1.0)
    found = lmc_sdk.retrieve(rig.connect(), TOKENS, out=out)
    assert found is not None and found.data_ptr() == out.data_ptr()
    assert found.shape == cached.shape and torch.equal(found, cached) and torch.equal(out[:, :, : 2 * CHUNK], cached)
    assert bool((out[:, :, 2 * CHUNK :] == -1.0).all())
    assert rig.server.held() == NOTHING


def test_out_stays_as_it_was_on_a_miss(rig: Rig) -> None:
    out = torch.full_like(kv(), 3.0)
    assert rig.connect().retrieve(TOKENS, out=out) is None
    assert bool((out == 3.0).all())


@pytest.mark.parametrize("out", [kv(2 * CHUNK), kv().double(), kv()[:1], kv()[:1].expand(2, 2, 12, 4), torch.zeros(3)])
def test_an_out_that_does_not_fit_is_refused_before_anything_is_sent(rig: Rig, out: torch.Tensor) -> None:
    rig.cache(2)
    ctx = rig.connect()
    said = rig.said()
    with pytest.raises(ShapeMismatchError, match=r"^out: "):
        ctx.retrieve(TOKENS, out=out)
    assert rig.said() == said


def test_an_out_for_a_geometry_that_nobody_knows_is_refused(rig: Rig) -> None:
    rig.engines["7"] = {**rig.engines["7"], "kv_cache_layout": {}}
    ctx = rig.connect()
    with pytest.raises(UnknownLayoutError):
        ctx.retrieve(TOKENS, out=kv())


# ---- memory of dropped results ---------------------------------------------------------------------------------------


def test_a_dropped_result_becomes_the_next_one_and_a_kept_one_never(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_sdk.session.buffers.MIN_NBYTES", 1)
    cached = rig.cache(3)
    ctx = rig.connect()
    kept = ctx.retrieve(TOKENS)
    dropped = ctx.retrieve(TOKENS)
    assert kept is not None and dropped is not None and kept.data_ptr() != dropped.data_ptr()
    place = dropped.data_ptr()
    part = dropped[:, 1:]
    del dropped
    third = ctx.retrieve(TOKENS)
    assert third is not None and third.data_ptr() not in {place, kept.data_ptr()}  # a view of it is in use
    del part
    fourth = ctx.retrieve(TOKENS)
    assert fourth is not None and fourth.data_ptr() == place
    fourth.zero_()
    assert torch.equal(kept, cached) and torch.equal(third, cached)
    ctx.close()
    assert torch.equal(kept, cached)


def test_recycling_can_be_switched_off(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_sdk.session.buffers.MIN_NBYTES", 1)
    rig.cache(3)
    ctx = rig.connect(recycle_bytes=0)
    assert ctx.retrieve(TOKENS) is not None
    assert ctx._now.endpoint.buffers.idle_nbytes == 0
    for bad in (-1, True, 1.5, "1"):
        with pytest.raises(UsageError, match="recycle_bytes"):
            rig.connect(recycle_bytes=bad)
