"""Every released server, both data planes: what is stored comes back bit by bit, and nothing is left behind.

The `pair` fixture compares locks, sessions, prefetch jobs and registrations with their values before the test, each
time.
"""

from __future__ import annotations

import pytest
import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import AlreadyCachedError, KVCacheSDKError, KVLayout, NotRegisteredError, UnsupportedError

from .cases import (
    CHUNK,
    FUSED,
    KV_BF16,
    KV_FIRST,
    KV_FP16,
    KV_FP32,
    MLA,
    MODELS,
    NHD,
    TWO_RANKS,
    WIDE,
    client_shape,
    client_values,
    dtype_of,
    fresh_tokens,
    is_two_plane_fused,
)
from .conftest import CONNECT_TIMEOUT, Pair
from .patterns import same_bytes
from .servers import Transport

# Bit patterns that a value conversion, a comparison or a sum on the way would change: quiet and signalling NaN, NaN
# with the sign bit and a payload, both infinities, both zeros, the smallest subnormals.
SPECIAL_BITS = {
    torch.bfloat16: (0x7FC0, 0x7F81, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001),
    torch.float16: (0x7E00, 0x7C01, 0xFE01, 0x7C00, 0xFC00, 0x8000, 0x0000, 0x0001, 0x8001),
    torch.float32: (0x7FC00000, 0x7F800001, 0xFFC00001, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x80000001),
}


def with_special_values(kv: torch.Tensor) -> torch.Tensor:
    """The tensor with every special pattern in its first and its last positions."""
    bits = SPECIAL_BITS[kv.dtype]
    width = 8 * kv.element_size()
    signed = [pattern - (1 << width) if pattern >> (width - 1) else pattern for pattern in bits]
    special = torch.tensor(signed, dtype=torch.int16 if width == 16 else torch.int32).view(kv.dtype)
    flat = kv.clone().view(-1)
    flat[: len(bits)] = special
    flat[-len(bits) :] = special
    return flat.view(kv.shape)


def values_for(pair: Pair, model: str, num_tokens: int, seed: int) -> torch.Tensor:
    """A tensor as a client gives it."""
    return client_values(pair.release, pair.models[model], num_tokens, seed)


def test_connect_tells_what_it_found(pair: Pair) -> None:
    with pair.connect(KV_BF16) as ctx:
        assert ctx.chunk_size == CHUNK
        assert ctx.model_name == KV_BF16
        assert ctx.server_version == pair.release
        assert ctx.layout is not None
        shape = MODELS[KV_BF16]
        assert ctx.layout.num_layers == shape.num_layers
        assert ctx.layout.num_kv_heads == shape.num_heads
        assert ctx.layout.head_dim == shape.head_size
        assert ctx.layout.dtype == torch.bfloat16
        assert ctx.layout.tokens_per_block == ctx.layout.slots_per_block == shape.block_size
        assert not ctx.closed
    assert ctx.closed


@pytest.mark.parametrize("model", [KV_BF16, KV_FP16, KV_FP32, MLA, FUSED, NHD, KV_FIRST, WIDE])
def test_layout_is_decoded(pair: Pair, model: str) -> None:
    shape = pair.models[model]
    planes, num_layers, _, hidden_dim = client_shape(pair.release, shape, 0)
    with pair.connect(model) as ctx:
        layout = ctx.layout
    assert layout is not None
    assert (layout.planes, layout.num_layers, layout.hidden_dim) == (planes, num_layers, hidden_dim)
    assert layout.dtype == dtype_of(shape)
    assert layout.is_mla == (model == MLA)
    assert layout.is_fused == (model == FUSED and not is_two_plane_fused(pair.release, shape))


@pytest.mark.parametrize("model", [KV_BF16, KV_FP16, KV_FP32, MLA, FUSED])
def test_round_trip_is_bit_exact(pair: Pair, model: str) -> None:
    tokens = fresh_tokens(3 * CHUNK)
    kv = with_special_values(values_for(pair, model, len(tokens), seed=1))
    assert kv.isnan().any() and kv.isinf().any() and ((kv == 0) & kv.signbit()).any()
    assert kv.shape == client_shape(pair.release, pair.models[model], len(tokens))
    with pair.connect(model) as ctx:
        assert ctx.lookup(tokens).hit_tokens == 0
        assert ctx.retrieve(tokens) is None
        stored = ctx.store(kv, tokens)
        assert stored
        assert (stored.written_chunks, stored.already_cached_chunks, stored.missing_chunks) == (3, 0, 0)
        assert ctx.lookup(tokens).hit_tokens == len(tokens)
        found = ctx.retrieve(tokens)
        assert found is not None and found.is_contiguous() and found.device.type == "cpu"
        assert same_bytes(found, kv)
        # the result is the caller's own: changing it changes nothing in the cache
        found.zero_()
        again = ctx.retrieve(tokens)
        assert again is not None and same_bytes(again, kv)
    # what is cached outlives the one who stored it
    with pair.connect(model) as other:
        late = other.retrieve(tokens)
        assert late is not None and same_bytes(late, kv)


def test_partial_prefix(pair: Pair) -> None:
    tokens = fresh_tokens(4 * CHUNK)
    kv = values_for(pair, KV_BF16, 2 * CHUNK, seed=2)
    with pair.connect(KV_BF16) as ctx:
        assert ctx.store(kv, tokens[: 2 * CHUNK])
        assert ctx.lookup(tokens).hit_tokens == 2 * CHUNK
        found = ctx.retrieve(tokens)
        assert found is not None and same_bytes(found, kv)
        # other ids from the second chunk on: only the first is a prefix
        diverging = [*tokens[:CHUNK], *(token + 1 for token in tokens[CHUNK:])]
        assert ctx.lookup(diverging).hit_tokens == CHUNK
        first = ctx.retrieve(diverging)
        assert first is not None and same_bytes(first, kv[:, :, :CHUNK].contiguous())
        # a shorter list asks for no more than it names
        shorter = ctx.retrieve(tokens[:CHUNK])
        assert shorter is not None and same_bytes(shorter, kv[:, :, :CHUNK].contiguous())
        # the same ids at another place are another sequence
        assert ctx.retrieve(tokens[CHUNK : 2 * CHUNK]) is None


def test_salts_are_apart(pair: Pair) -> None:
    tokens = fresh_tokens(2 * CHUNK)
    ones = {salt: values_for(pair, KV_BF16, len(tokens), seed=number) for number, salt in enumerate(("a", "ünïcode ☃"))}
    with pair.connect(KV_BF16) as ctx:
        for salt, kv in ones.items():
            assert ctx.lookup(tokens, salt).hit_tokens == 0
            assert ctx.store(kv, tokens, salt).written_chunks == 2
        for salt, kv in ones.items():
            assert ctx.lookup(tokens, salt).hit_tokens == len(tokens)
            found = ctx.retrieve(tokens, salt)
            assert found is not None and same_bytes(found, kv)
        assert ctx.lookup(tokens).hit_tokens == 0
        assert ctx.retrieve(tokens) is None
        assert ctx.retrieve(tokens, "b") is None


def test_overlapping_prefixes(pair: Pair) -> None:
    left = fresh_tokens(3 * CHUNK)
    right = [*left[: 2 * CHUNK], *fresh_tokens(2 * CHUNK)]
    left_kv = values_for(pair, KV_BF16, len(left), seed=3)
    right_kv = values_for(pair, KV_BF16, len(right), seed=4)
    with pair.connect(KV_BF16) as ctx:
        assert ctx.store(left_kv, left).written_chunks == 3
        stored = ctx.store(right_kv, right)
        assert stored
        assert (stored.written_chunks, stored.already_cached_chunks, stored.missing_chunks) == (2, 2, 0)
        # the shared chunks are the first writer's
        expected = torch.cat([left_kv[:, :, : 2 * CHUNK], right_kv[:, :, 2 * CHUNK :]], dim=2)
        found = ctx.retrieve(right)
        assert found is not None and same_bytes(found, expected)
        found = ctx.retrieve(left)
        assert found is not None and same_bytes(found, left_kv)


def test_store_twice(pair: Pair) -> None:
    tokens = fresh_tokens(2 * CHUNK)
    first, second = (values_for(pair, KV_BF16, len(tokens), seed=seed) for seed in (5, 6))
    assert not same_bytes(first, second)
    with pair.connect(KV_BF16) as ctx:
        assert ctx.store(first, tokens).written_chunks == 2
        again = ctx.store(second, tokens)
        assert again
        assert (again.written_chunks, again.already_cached_chunks, again.missing_chunks) == (0, 2, 0)
        with pytest.raises(AlreadyCachedError) as raised:
            ctx.store(second, tokens, existing="error")
        assert raised.value.chunk_indices == (0, 1)
        found = ctx.retrieve(tokens)
        assert found is not None and same_bytes(found, first)


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1])
def test_less_than_a_chunk_is_nothing(pair: Pair, length: int) -> None:
    tokens = fresh_tokens(length)
    with pair.connect(KV_BF16) as ctx:
        stored = ctx.store(values_for(pair, KV_BF16, length, seed=7), tokens)
        assert not stored
        assert (stored.written_chunks, stored.tail_tokens) == (0, length)
        looked_up = ctx.lookup(tokens)
        assert (looked_up.hit_tokens, looked_up.tail_tokens) == (0, length)
        assert ctx.retrieve(tokens) is None


@pytest.mark.parametrize("length", [CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 188])
def test_tail_is_told_and_left_out(pair: Pair, length: int) -> None:
    tokens = fresh_tokens(length)
    kv = values_for(pair, KV_BF16, length, seed=8)
    whole = length // CHUNK * CHUNK
    with pair.connect(KV_BF16) as ctx:
        stored = ctx.store(kv, tokens)
        assert stored
        assert (stored.written_chunks, stored.tail_tokens) == (whole // CHUNK, length - whole)
        looked_up = ctx.lookup(tokens)
        assert (looked_up.hit_tokens, looked_up.tail_tokens) == (whole, length - whole)
        found = ctx.retrieve(tokens)
        assert found is not None and same_bytes(found, kv[:, :, :whole].contiguous())


@pytest.mark.parametrize("num_chunks", [4, 8], ids=["64MiB", "128MiB"])
def test_large_payload(pair: Pair, num_chunks: int) -> None:
    tokens = fresh_tokens(num_chunks * CHUNK)
    kv = torch.randint(
        -(1 << 15), 1 << 15, client_shape(pair.release, pair.models[WIDE], len(tokens)), dtype=torch.int16
    )
    kv = kv.view(torch.bfloat16)
    assert kv.numel() * kv.element_size() == num_chunks * (16 << 20)
    with pair.connect(WIDE) as ctx:
        assert ctx.store(kv, tokens).written_chunks == num_chunks
        found = ctx.retrieve(tokens)
        assert found is not None and same_bytes(found, kv)
    pair.server.clear()  # the pool is shared by the tests of this server


def test_wrong_transport_is_refused(pair: Pair) -> None:
    other: Transport = "inline" if pair.transport == "shm" else "shm"
    with pytest.raises(KVCacheSDKError, match=pair.transport):
        lmc_sdk.connect(pair.server.url, pair.server.http_url, KV_BF16, CONNECT_TIMEOUT, transport=other)
    with lmc_sdk.connect(
        pair.server.url, pair.server.http_url, KV_BF16, CONNECT_TIMEOUT, transport=pair.transport
    ) as ctx:
        assert ctx.transport == pair.transport


def test_unknown_model_names_the_registered_ones(pair: Pair) -> None:
    with pytest.raises(NotRegisteredError) as raised:
        pair.connect("tests/nobody-registered-this")
    assert KV_BF16 in raised.value.registered_models


def test_two_ranks_are_refused(pair: Pair) -> None:
    with pytest.raises(UnsupportedError):
        pair.connect(TWO_RANKS)


def test_twenty_cycles_leave_nothing(pair: Pair) -> None:
    before = pair.server.held()
    tokens = fresh_tokens(CHUNK)
    kv = values_for(pair, KV_BF16, CHUNK, seed=9)
    with pair.connect(KV_BF16) as sibling:
        assert sibling.store(kv, tokens)
        with_sibling = pair.server.held()
        # the proof that these numbers do move
        assert len(with_sibling.registrations) == len(before.registrations) + 1
        for _ in range(20):
            with pair.connect(KV_BF16) as ctx:
                assert len(pair.server.held().registrations) == len(with_sibling.registrations) + 1
                assert ctx.lookup(tokens).hit_tokens == CHUNK
        assert pair.server.wait_until_held(with_sibling) == with_sibling
        # nor did any of them take the sibling's place
        found = sibling.retrieve(tokens)
        assert found is not None and same_bytes(found, kv)
    assert pair.server.wait_until_held(before) == before


def test_registration_is_private(pair: Pair) -> None:
    names = _engine_driven_models(pair)
    with pair.connect(KV_BF16):
        added = [name for name in _engine_driven_models(pair) if name not in names]
        assert len(added) == 1
        assert added[0] not in pair.models
    assert _engine_driven_models(pair) == names


def test_prewarm_without_an_engine(pair: Pair) -> None:
    model = "tests/prewarmed"
    tokens, more_tokens = fresh_tokens(2 * CHUNK), fresh_tokens(CHUNK)
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float16)
    kv = values_for(pair, KV_FP16, 2 * CHUNK, seed=10)[:, :2, :, :32].contiguous()
    with lmc_sdk.connect(pair.server.url, pair.server.http_url, model, CONNECT_TIMEOUT, layout=layout) as first:
        assert first.store(kv, tokens).written_chunks == 2
        # the server now names the model in its engine-driven registrations only, without a geometry
        with pair.connect(model) as second:
            with pytest.raises(KVCacheSDKError):
                second.store(kv[:, :, :CHUNK].contiguous(), more_tokens)
            found = second.retrieve(tokens)
            assert found is not None and same_bytes(found, kv)
            # an object has told the geometry
            assert second.store(kv[:, :, :CHUNK].contiguous(), more_tokens).written_chunks == 1
        found = first.retrieve(more_tokens)
        assert found is not None and same_bytes(found, kv[:, :, :CHUNK].contiguous())
    with pytest.raises(NotRegisteredError):
        pair.connect(model)


def test_prewarm_with_another_geometry_is_refused(pair: Pair) -> None:
    layout = KVLayout(num_layers=7, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    with pytest.raises(KVCacheSDKError):
        lmc_sdk.connect(pair.server.url, pair.server.http_url, KV_BF16, CONNECT_TIMEOUT, layout=layout)


def _engine_driven_models(pair: Pair) -> list[object]:
    meta = pair.server.status()["non_cuda_context_meta"]
    assert isinstance(meta, dict)
    return [entry["model_name"] for entry in meta.values()]
