"""lookup and retrieve: a hit, a miss and a failure stay three things, and every lie of the server is found out."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import DeadlineExceededError, Fate, LookupResult, NotRegisteredError
from lmcache_sdk import protocol as p
from tests.facade.rig import CHUNK, MODEL, TOKENS, Rig, raw
from tests.fix_fake_server import NOTHING, Action, Chunk, answer
from tests.fix_faults import (
    ignored,
    loading,
    says,
    silence,
    then,
    wrong_uid,
)

pytestmark = pytest.mark.usefixtures("hasty")

SHORT: Final = 0.4
"""A timeout that is meant to pass."""
LATER: Final = 1.5
"""The same where steps are to be made before it passes, on a slow machine too."""


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", p.DIALECTS)
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_cached_prefix_comes_back_as_it_was_stored(release: str, shm: bool, count: int) -> None:
    with Rig(release, shm=shm) as rig:
        cached = rig.cache(count)
        ctx = rig.connect()
        found = ctx.retrieve(TOKENS)
        assert found is not None and found.shape == (2, 2, count * CHUNK, 4)
        assert torch.equal(found, cached) and found.is_contiguous() and found.device.type == "cpu"
        assert found.dtype is torch.float32 and not found.requires_grad
        assert ctx.lookup(TOKENS) == LookupResult(count * CHUNK, 12, 0)
        assert rig.server.held() == NOTHING


@pytest.mark.parametrize(
    ("tokens", "hit", "total", "tail"),
    [
        (TOKENS, 8, 12, 0),
        (TOKENS[:9], 8, 9, 1),
        (TOKENS[:8], 8, 8, 0),
        (TOKENS[:7], 4, 7, 3),
        (TOKENS[:3], 0, 3, 3),
        ([], 0, 0, 0),
    ],
)
def test_what_fills_no_chunk_is_the_tail(rig: Rig, tokens: list[int], hit: int, total: int, tail: int) -> None:
    rig.cache(2)
    ctx = rig.connect()
    assert ctx.lookup(tokens) == LookupResult(hit, total, tail)
    found = ctx.retrieve(tokens)
    assert (found is None) == (hit == 0) and (found is None or found.shape[2] == hit)
    assert rig.server.held() == NOTHING


@pytest.mark.parametrize("tokens", [[], [1], TOKENS[:3]])
def test_less_than_a_chunk_is_a_miss_and_asks_nobody(rig: Rig, tokens: list[int]) -> None:
    ctx = rig.connect()
    said = rig.said()
    assert ctx.retrieve(tokens) is None and ctx.lookup(tokens).hit_tokens == 0
    assert rig.said() == said


def test_a_miss_is_none(rig: Rig) -> None:
    ctx = rig.connect()
    assert ctx.retrieve(TOKENS) is None and ctx.lookup(TOKENS) == LookupResult(0, 12, 0)
    rig.cache(2, salt="one")
    assert ctx.retrieve(TOKENS, "other") is None
    found = ctx.retrieve(TOKENS, "one")
    assert found is not None and found.shape[2] == 8
    assert rig.server.held() == NOTHING


def test_a_miss_of_a_model_that_has_left_is_no_miss(rig: Rig) -> None:
    """The server finds nothing then, cached or not."""
    rig.cache(2)
    ctx = rig.connect()
    rig.engines["7"] = {**rig.engines["7"], "model_name": "another"}
    rig.server.always(p.QueryPrefetchStatus, says(p.PrefetchStatus(0)))
    for call in (lambda: ctx.lookup(TOKENS), lambda: ctx.retrieve(TOKENS)):
        with pytest.raises(NotRegisteredError, match="no engine holds") as caught:
            call()
        assert caught.value.registered_models == ("another",)


def test_the_result_is_the_callers_own(rig: Rig) -> None:
    cached = rig.cache(2)
    ctx = rig.connect()
    found, again = ctx.retrieve(TOKENS), ctx.retrieve(TOKENS)
    assert found is not None and again is not None
    found.zero_()
    assert torch.equal(again, cached)
    ctx.close()
    assert torch.equal(again, cached)
    assert rig.cached(0) == raw(cached[:, :, :CHUNK])


def test_nan_patterns_survive(rig: Rig) -> None:
    bits = torch.tensor([0x7FC00001, -0x3FFFFF, -0x80000000, 0x7F800000], dtype=torch.int32)
    odd = bits.repeat(2 * 2 * CHUNK).view(torch.float32).view(2, 2, CHUNK, 4)
    rig.server.cache(TOKENS, [Chunk((2, 2, CHUNK, 4), "float32", raw(odd))], model=MODEL)
    found = rig.connect().retrieve(TOKENS)
    assert found is not None and torch.equal(found.view(torch.int32), odd.view(torch.int32))


def test_a_cache_that_was_cleared_in_between_is_a_miss(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    rig.server.on(p.QueryPrefetchStatus, then(answer, rig.server.objects.clear))
    assert ctx.retrieve(TOKENS) is None
    assert rig.server.held() == NOTHING


def test_a_one_plane_object_has_one_plane(rig: Rig) -> None:
    rig.engines["7"] = {"model_name": MODEL, "world_size": 1, "kv_cache_layout": {}}
    stored = torch.arange(3 * CHUNK * 5, dtype=torch.float32).view(3, CHUNK, 5)
    rig.server.cache(TOKENS, [Chunk((3, CHUNK, 5), "float32", raw(stored))], model=MODEL)
    found = rig.connect().retrieve(TOKENS)
    assert found is not None and torch.equal(found, stored.unsqueeze(0))


def test_module_functions_do_the_same(rig: Rig) -> None:
    cached = rig.cache(2)
    ctx = rig.connect()
    found = lmc_sdk.retrieve(ctx, TOKENS, "")
    assert found is not None and torch.equal(found, cached)
    assert lmc_sdk.retrieve(ctx, tokens=TOKENS, cache_salt="x") is None
    assert lmc_sdk.lookup(ctx, torch.tensor(TOKENS)).hit_tokens == 8


# ---- timeouts are never a miss ---------------------------------------------------------------------------------------


STEPS: Final = [
    (p.Lookup, "LOOKUP"),
    (p.QueryPrefetchStatus, "QUERY_PREFETCH_STATUS"),
    (p.PrepareRetrieve, "PREPARE_RETRIEVE"),
]


@pytest.mark.parametrize(("kind", "step"), STEPS)
def test_silence_is_a_timeout_that_names_its_step(rig: Rig, kind: type[p.Request[Any]], step: str) -> None:
    rig.cache(2)
    ctx = rig.connect(call_timeout=LATER)
    rig.server.on(kind, silence)
    with pytest.raises(DeadlineExceededError) as caught:
        ctx.retrieve(TOKENS)
    assert caught.value.step == f"retrieve: {step}" and caught.value.fate is Fate.UNKNOWN
    assert "HTTP port answers" in str(caught.value)
    assert rig.server.held().stolen == 0
    rig.port.close()  # spares the close its patience


@pytest.mark.parametrize("action", [ignored, wrong_uid])
def test_a_lost_request_and_an_answer_to_nobody_are_timeouts_too(inline_rig: Rig, action: Action) -> None:
    ctx = inline_rig.connect(call_timeout=SHORT)
    inline_rig.server.on(p.Lookup, action)
    with pytest.raises(DeadlineExceededError) as caught:
        ctx.retrieve(TOKENS)
    assert caught.value.step == "retrieve: LOOKUP"
    inline_rig.port.close()


def test_a_lookup_names_itself(rig: Rig) -> None:
    ctx = rig.connect(call_timeout=SHORT)
    rig.server.on(p.Lookup, silence)
    with pytest.raises(DeadlineExceededError) as caught:
        ctx.lookup(TOKENS)
    assert caught.value.step == "lookup: LOOKUP"
    rig.port.close()


def test_a_prefetch_that_never_ends_is_a_timeout(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect(call_timeout=LATER)
    rig.server.always(p.QueryPrefetchStatus, loading)
    for call in (ctx.lookup, ctx.retrieve):
        with pytest.raises(DeadlineExceededError, match="still loading"):
            call(TOKENS)
    rig.port.close()


@pytest.mark.parametrize("kind", [p.FreeLookupLocks, p.EndSession, p.CommitRetrieve])
def test_a_clean_up_that_is_not_answered_does_not_spoil_the_answer(rig: Rig, kind: type[p.Request[Any]]) -> None:
    cached = rig.cache(2)
    ctx = rig.connect()
    rig.server.on(kind, silence)
    assert ctx.lookup(TOKENS).hit_tokens == 8
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, cached)
