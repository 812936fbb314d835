"""store: nothing is sent before everything was checked, and the result says truthfully what is in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import numpy as np
import pytest
import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import (
    AlreadyCachedError,
    ArgumentTypeError,
    DeadlineExceededError,
    Fate,
    KVCacheSDKError,
    KVLayout,
    NotRegisteredError,
    ShapeMismatchError,
    StoreResult,
    UsageError,
)
from lmcache_sdk import protocol as p
from tests.facade.rig import CHUNK, MODEL, TOKENS, Rig, chunk_of, kv, raw
from tests.fix_fake_server import NOTHING, Action, answer
from tests.fix_faults import ignored, instead, silence, then, wrong_uid

pytestmark = pytest.mark.usefixtures("hasty", "soon_evicted")

LATER: Final = 1.5
"""A timeout that is meant to pass, after the steps before the silent one, on a slow machine too."""


@pytest.fixture
def soon_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pool is given a moment to evict, and not the second and a half of a real one."""
    monkeypatch.setattr("lmcache_sdk.facade.storing._EVICTION_SECONDS", 0.25)


def chunk_raw(tensor: torch.Tensor, index: int) -> bytes:
    return raw(tensor[:, :, index * CHUNK : (index + 1) * CHUNK])


# ---- results ---------------------------------------------------------------------------------------------------------


def test_a_result_is_true_when_every_whole_chunk_is_in_the_cache() -> None:
    assert StoreResult(3, 0, 0, 0) and StoreResult(0, 3, 0, 2) and StoreResult(1, 2, 0, 0)
    assert not StoreResult(2, 0, 1, 0, "full") and not StoreResult(0, 0, 3, 0, "full")
    assert not StoreResult(0, 0, 0, 3, "no whole chunk")
    assert StoreResult(1, 2, 3, 9).total_chunks == 6
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        StoreResult(1, 0, 0, 0).written_chunks = 2  # type: ignore[misc]  # that is the point


@pytest.mark.parametrize("release", p.DIALECTS)
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])
def test_what_was_stored_is_in_the_cache_byte_for_byte(release: str, shm: bool) -> None:
    with Rig(release, shm=shm) as rig:
        ctx = rig.connect()
        assert ctx.store(kv(), TOKENS) == StoreResult(3, 0, 0, 0, "")
        assert [rig.cached(index) for index in range(3)] == [chunk_raw(kv(), index) for index in range(3)]
        found = ctx.retrieve(TOKENS)
        assert found is not None and torch.equal(found, kv())
        assert rig.server.held() == NOTHING


def test_the_tail_is_counted_and_not_stored(rig: Rig) -> None:
    ctx = rig.connect()
    result = ctx.store(kv(10), TOKENS[:10])
    assert result == StoreResult(2, 0, 0, 2, "") and bool(result)
    assert rig.cached(2) is None


@pytest.mark.parametrize("length", [0, 1, 3])
def test_less_than_a_chunk_stores_nothing_and_says_why(rig: Rig, length: int) -> None:
    ctx = rig.connect()
    said = rig.said()
    result = ctx.store(kv(length), TOKENS[:length])
    assert not result and result.tail_tokens == length and "no whole chunk of 4" in result.reason
    assert not lmc_sdk.store(ctx, kv(length), TOKENS[:length])
    assert rig.said() == said


def test_what_is_cached_keeps_its_data(rig: Rig) -> None:
    """The first writer wins."""
    first = rig.cache(2)
    ctx = rig.connect()
    assert ctx.store(kv(seed=1), TOKENS) == StoreResult(1, 2, 0, 0, "")
    assert rig.cached(1) == chunk_raw(first, 1) and rig.cached(2) == chunk_raw(kv(seed=1), 2)
    assert ctx.store(kv(seed=2), TOKENS) == StoreResult(0, 3, 0, 0, "")
    assert rig.cached(2) == chunk_raw(kv(seed=1), 2)
    assert rig.server.held() == NOTHING


def test_a_hole_is_filled(rig: Rig) -> None:
    """Inline the server does not tell a cached chunk behind a gap from a written one: documented."""
    rig.cache(1, seed=5, first=1)
    ctx = rig.connect()
    result = ctx.store(kv(), TOKENS)
    assert result == (StoreResult(2, 1, 0, 0, "") if rig.shm else StoreResult(3, 0, 0, 0, ""))
    assert rig.cached(1) == chunk_raw(kv(seed=5), 1) and rig.cached(0) == chunk_raw(kv(), 0)


def test_salts_are_worlds_of_their_own(rig: Rig) -> None:
    ctx = rig.connect()
    assert ctx.store(kv(), TOKENS, "one") and ctx.store(kv(seed=1), TOKENS, "two")
    assert rig.cached(0, salt="one") == chunk_raw(kv(), 0) and rig.cached(0, salt="two") == chunk_raw(kv(seed=1), 0)
    assert rig.cached(0) is None


@pytest.mark.parametrize(
    "bend",
    [
        lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
        lambda tensor: torch.cat([tensor, tensor], dim=3)[..., :4],
        lambda tensor: tensor.clone().requires_grad_(),
        lambda tensor: tensor.clone().requires_grad_() * 1,
        lambda tensor: torch.nn.Parameter(tensor.clone()),
        lambda tensor: torch.flip(torch.flip(tensor, [2]), [2]),
    ],
    ids=["permuted", "strided", "requires grad", "not a leaf", "parameter", "flipped"],
)
def test_tensors_of_any_strides_and_kind(rig: Rig, bend: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ctx = rig.connect()
    assert ctx.store(bend(kv()), TOKENS)
    assert [rig.cached(index) for index in range(3)] == [chunk_raw(kv(), index) for index in range(3)]


def test_what_is_stored_is_not_aliased(rig: Rig) -> None:
    ctx = rig.connect()
    mine = kv()
    assert ctx.store(mine, TOKENS)
    mine.zero_()
    assert rig.cached(0) == chunk_raw(kv(), 0)


def test_the_module_function_gives_the_results_truth(rig: Rig) -> None:
    ctx = rig.connect()
    assert lmc_sdk.store(ctx, kv(), TOKENS) is True
    assert lmc_sdk.store(ctx, kv=kv(), tokens=TOKENS, cache_salt="") is True
    rig.server.full = True
    rig.server.objects.clear()
    assert lmc_sdk.store(ctx, kv(), TOKENS) is False


# ---- the truth -------------------------------------------------------------------------------------------------------


def test_a_full_server_is_false_with_counts_and_reason(rig: Rig) -> None:
    rig.cache(1)
    ctx = rig.connect()
    rig.server.full = True
    result = ctx.store(kv(seed=1), TOKENS)
    assert (result.written_chunks, result.already_cached_chunks, result.missing_chunks) == (0, 1, 2)
    assert not result and "2 of 3" in result.reason and "full" in result.reason
    assert rig.server.held() == NOTHING


def test_a_server_that_is_full_for_a_moment_is_given_time_to_evict(rig: Rig) -> None:
    ctx = rig.connect()
    rig.server.full = True
    kind = p.PrepareStore if rig.shm else p.CommitStore
    rig.server.on(kind, then(answer, lambda: setattr(rig.server, "full", False)))
    assert ctx.store(kv(), TOKENS) == StoreResult(3, 0, 0, 0, "")
    assert len(rig.server.asked(kind)) == 2


def test_a_commit_that_says_true_and_stores_nothing_is_found_out(inline_rig: Rig) -> None:
    ctx = inline_rig.connect()
    inline_rig.server.always(p.CommitStore, instead(p.Committed(success=True)))
    result = ctx.store(kv(), TOKENS)
    assert not result and result.missing_chunks == 3 and result.written_chunks == 0


def test_a_commit_that_says_false_is_found_out(rig: Rig) -> None:
    ctx = rig.connect()
    rig.server.always(p.CommitStore, instead(p.Committed(success=False)))
    result = ctx.store(kv(), TOKENS)
    assert not result and result.missing_chunks == 3 and result.written_chunks == 0


def test_empty_slots_of_chunks_that_another_writes_are_not_called_stored(shm_rig: Rig) -> None:
    """Cached, being written and no memory look alike: a lookup has the last word."""
    ctx = shm_rig.connect()
    other = shm_rig.connect(call_timeout=LATER)
    shm_rig.server.on(p.PrepareStore, silence)  # the other client reserves, and never writes
    with pytest.raises(DeadlineExceededError):
        other.store(kv(), TOKENS)
    result = ctx.store(kv(seed=1), TOKENS)
    assert not result and result.missing_chunks == 3 and "another client is writing" in result.reason
    assert all(len(request.data) for request in shm_rig.server.asked(p.CommitStore))  # the proofs' only


def test_a_chunk_that_was_evicted_meanwhile_is_missing(inline_rig: Rig) -> None:
    ctx = inline_rig.connect()
    lost = chunk_of(kv(), 2)
    inline_rig.server.always(p.CommitStore, then(answer, lambda: _drop(inline_rig, lost.data)))
    result = ctx.store(kv(), TOKENS)
    assert (result.written_chunks, result.missing_chunks, bool(result)) == (2, 1, False)


def _drop(rig: Rig, data: bytes) -> None:
    for name, chunk in list(rig.server.objects.items()):
        if chunk.data == data:
            del rig.server.objects[name]


def test_nothing_found_of_a_model_that_has_left_is_its_own_error(rig: Rig) -> None:
    ctx = rig.connect()
    rig.server.full = True
    rig.engines["7"] = {**rig.engines["7"], "model_name": "another"}
    with pytest.raises(NotRegisteredError):
        ctx.store(kv(), TOKENS)


# ---- existing="error" ------------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_an_error_before_anything_is_reserved(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    said = rig.said()
    with pytest.raises(AlreadyCachedError, match=r"chunks 0, 1 \(2\).*nothing was written") as caught:
        ctx.store(kv(seed=1), TOKENS, existing="error")
    assert caught.value.chunk_indices == (0, 1) and caught.value.fate is Fate.ANSWERED
    assert rig.cached(2) is None and rig.server.held() == NOTHING
    assert set(rig.server.names()[said:]) == {"Lookup", "QueryPrefetchStatus", "FreeLookupLocks", "EndSession"}


def test_a_hole_is_an_error_after_the_rest_was_written_whole(shm_rig: Rig) -> None:
    shm_rig.cache(1, seed=5, first=1)
    ctx = shm_rig.connect()
    with pytest.raises(AlreadyCachedError, match=r"chunks 1 \(1\).*other 2 chunks were written") as caught:
        ctx.store(kv(), TOKENS, existing="error")
    assert caught.value.chunk_indices == (1,)
    assert shm_rig.cached(0) == chunk_raw(kv(), 0) and shm_rig.cached(2) == chunk_raw(kv(), 2)
    assert shm_rig.cached(1) == chunk_raw(kv(seed=5), 1) and shm_rig.server.held() == NOTHING


def test_new_chunks_are_stored_as_without_it(rig: Rig) -> None:
    ctx = rig.connect()
    assert ctx.store(kv(), TOKENS, existing="error") == StoreResult(3, 0, 0, 0, "")
    with pytest.raises(AlreadyCachedError) as caught:
        ctx.store(kv(), [*TOKENS[:8], 1, 2, 3, 4], existing="error")
    assert caught.value.chunk_indices == (0, 1)


# ---- nothing is sent before everything was checked -------------------------------------------------------------------

BAD_KV: Final[dict[str, tuple[object, type[KVCacheSDKError]]]] = {
    "another dtype": (kv().half(), ShapeMismatchError),
    "bits of another dtype": (kv().view(torch.int32), ShapeMismatchError),
    "int64": (torch.zeros(2, 2, 12, 4, dtype=torch.int64), ShapeMismatchError),
    "too few layers": (kv()[:, :1], ShapeMismatchError),
    "one layer too many": (torch.zeros(2, 3, 12, 4), ShapeMismatchError),
    "another width": (torch.zeros(2, 2, 12, 5), ShapeMismatchError),
    "width 1": (torch.zeros(2, 2, 12, 1), ShapeMismatchError),
    "one plane": (kv()[:1], ShapeMismatchError),
    "three planes": (torch.zeros(3, 2, 12, 4), ShapeMismatchError),
    "rank 3": (kv()[0], ShapeMismatchError),
    "rank 5": (kv().unsqueeze(-1), ShapeMismatchError),
    "heads apart": (torch.zeros(2, 2, 12, 1, 4), ShapeMismatchError),
    "too few tokens": (kv(8), ShapeMismatchError),
    "too many tokens": (kv(16), ShapeMismatchError),
    "layers and tokens swapped": (kv().transpose(1, 2), ShapeMismatchError),
    "numpy": (np.zeros((2, 2, 12, 4), dtype=np.float32), ArgumentTypeError),
    "list": ([[1.0]], ArgumentTypeError),
    "None": (None, ArgumentTypeError),
    "meta": (torch.zeros(2, 2, 12, 4, device="meta"), ArgumentTypeError),
    "sparse": (torch.zeros(2, 2, 12, 4).to_sparse(), ArgumentTypeError),
}


@pytest.mark.parametrize("case", BAD_KV)
def test_a_tensor_that_does_not_fit_is_refused_before_anything_is_sent(rig: Rig, case: str) -> None:
    """After a reservation nothing may fail: a half-written slot can only be published."""
    bad, kind = BAD_KV[case]
    ctx = rig.connect()
    said = rig.said()
    with pytest.raises(kind, match=r"^kv: ") as caught:
        ctx.store(bad, TOKENS)  # type: ignore[arg-type]  # that is the point
    assert caught.value.fate is Fate.NOT_SENT
    assert rig.said() == said and rig.server.held() == NOTHING
    assert ctx.store(kv(), TOKENS)


BAD_ARGUMENTS: Final[list[tuple[dict[str, Any], type[KVCacheSDKError], str]]] = [
    ({"tokens": "abc"}, ArgumentTypeError, "tokens: "),
    ({"tokens": [*TOKENS[:11], -1]}, UsageError, "tokens[11]: "),
    ({"tokens": [*TOKENS[:11], 2**32]}, UsageError, "tokens[11]: "),
    ({"tokens": [*TOKENS[:11], 1.0]}, ArgumentTypeError, "tokens[11]: "),
    ({"tokens": torch.zeros(2, 6, dtype=torch.int64)}, UsageError, "tokens: "),
    ({"cache_salt": None}, ArgumentTypeError, "cache_salt: "),
    ({"cache_salt": "a/b"}, UsageError, "cache_salt: "),
    ({"existing": "replace"}, UsageError, "existing: "),
    ({"existing": True}, UsageError, "existing: "),
]


@pytest.mark.parametrize(("wrong", "kind", "name"), BAD_ARGUMENTS, ids=lambda case: str(case)[:40])
def test_a_wrong_argument_is_refused_before_anything_is_sent(
    inline_rig: Rig, wrong: dict[str, Any], kind: type[KVCacheSDKError], name: str
) -> None:
    ctx = inline_rig.connect()
    said = inline_rig.said()
    with pytest.raises(kind) as caught:
        ctx.store(**{"kv": kv(), "tokens": TOKENS, **wrong})
    assert str(caught.value).startswith(name) and inline_rig.said() == said
    if "existing" not in wrong:
        for call in (ctx.lookup, ctx.retrieve):
            with pytest.raises(kind):
                call(**{"tokens": TOKENS, **wrong})
    assert inline_rig.said() == said


def test_a_one_plane_cache_takes_one_plane(rig: Rig) -> None:
    rig.engines.clear()
    layout = KVLayout(num_layers=2, dtype=torch.float32, head_dim=4, is_mla=True)
    ctx = rig.connect(layout=layout)
    one = kv()[:1]
    assert ctx.store(one, TOKENS)
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, one)
    shapes = {chunk.shape for name, chunk in rig.server.objects.items() if name[0] == MODEL}
    assert shapes == {(2, CHUNK, 4)}
    with pytest.raises(ShapeMismatchError):
        ctx.store(kv(), TOKENS)


# ---- timeouts are never False ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shm", "kind", "step", "action"),
    [
        (True, p.PrepareStore, "PREPARE_STORE", silence),
        (True, p.PrepareStore, "PREPARE_STORE", ignored),
        (True, p.CommitStore, "COMMIT_STORE", silence),
        (False, p.CommitStore, "COMMIT_STORE", ignored),
        (False, p.CommitStore, "COMMIT_STORE", wrong_uid),
    ],
)
def test_silence_is_a_timeout_that_names_its_step(
    shm: bool, kind: type[p.Request[Any]], step: str, action: Action
) -> None:
    with Rig(shm=shm) as rig:
        ctx = rig.connect(call_timeout=LATER)
        rig.server.on(kind, action)
        with pytest.raises(DeadlineExceededError) as caught:
            ctx.store(kv(), TOKENS)
        assert caught.value.step == f"store: {step}" and caught.value.fate is Fate.UNKNOWN
        rig.port.close()  # spares the close its patience


def test_a_verification_that_is_not_answered_is_a_timeout(inline_rig: Rig) -> None:
    ctx = inline_rig.connect(call_timeout=LATER)
    inline_rig.server.on(p.Lookup, answer, silence)
    with pytest.raises(DeadlineExceededError) as caught:
        ctx.store(kv(), TOKENS)
    assert caught.value.step == "store: LOOKUP"
    inline_rig.port.close()
