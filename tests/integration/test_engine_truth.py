"""A real engine's paged blocks against the client's tensor, value by value, both directions, on every release.

The engine fills and reads its blocks by (plane, layer, token, head, dim) in the layout's own axis order
(engine_blocks.py); the expected client tensor is put together from the same logical values by the protocol's rule
(cases.py). Neither side uses the library's layout code, so agreement is no round trip through our own mistake.
"""

from __future__ import annotations

import time

import pytest

from lmcache_sdk import LMCacheKVCacheContext

from .cases import (
    CHUNK,
    FUSED,
    KV_BF16,
    KV_FIRST,
    KV_FP16,
    KV_FP32,
    MLA,
    NHD,
    client_values,
    engine_values,
    fresh_tokens,
)
from .conftest import Pair
from .patterns import raw_bytes, same_bytes

ENGINE_MODELS = [KV_BF16, KV_FP16, KV_FP32, NHD, KV_FIRST, MLA, FUSED]
READABLE_WITHIN = 10.0


def wait_until_readable(ctx: LMCacheKVCacheContext, tokens: list[int], expected: int) -> None:
    """An engine's store is answered before its objects can be looked up."""
    end = time.monotonic() + READABLE_WITHIN
    while (hit := ctx.lookup(tokens).hit_tokens) != expected and time.monotonic() < end:
        time.sleep(0.02)
    assert hit == expected


@pytest.mark.parametrize("model", ENGINE_MODELS)
def test_client_reads_what_the_engine_stored(pair: Pair, model: str) -> None:
    tokens = fresh_tokens(2 * CHUNK + 60)
    whole = pair.engine.store(model, tokens, seed=11)
    assert whole == 2 * CHUNK
    with pair.connect(model) as ctx:
        wait_until_readable(ctx, tokens, whole)
        found = ctx.retrieve(tokens)
    assert found is not None
    assert same_bytes(found, client_values(pair.release, pair.models[model], whole, seed=11))


@pytest.mark.parametrize("model", ENGINE_MODELS)
def test_engine_reads_what_the_client_stored(pair: Pair, model: str) -> None:
    shape = pair.models[model]
    tokens = fresh_tokens(3 * CHUNK)
    with pair.connect(model) as ctx:
        assert ctx.store(client_values(pair.release, shape, len(tokens), seed=12), tokens).written_chunks == 3
    hit, blocks = pair.engine.retrieve(model, tokens)
    assert hit == len(tokens)
    assert blocks == raw_bytes(engine_values(shape, len(tokens), seed=12))


@pytest.mark.parametrize("model", [KV_BF16, MLA, FUSED])
def test_one_prefix_of_both_writers(pair: Pair, model: str) -> None:
    """The engine's objects have four axes, a client's one-plane objects three: one answer may hold both."""
    shape = pair.models[model]
    tokens = fresh_tokens(2 * CHUNK)
    pair.engine.store(model, tokens[:CHUNK], seed=13)
    # The same seed and a longer tensor: the first chunk's values agree by construction, the second's are the client's.
    kv = client_values(pair.release, shape, len(tokens), seed=13)
    with pair.connect(model) as ctx:
        wait_until_readable(ctx, tokens, CHUNK)
        stored = ctx.store(kv, tokens)
        assert (stored.written_chunks, stored.already_cached_chunks) == (1, 1)
        found = ctx.retrieve(tokens)
        assert found is not None and same_bytes(found, kv)
    hit, blocks = pair.engine.retrieve(model, tokens)
    assert hit == len(tokens)
    assert blocks == raw_bytes(engine_values(shape, len(tokens), seed=13))


def test_salt_is_the_engines_salt(pair: Pair) -> None:
    tokens = fresh_tokens(CHUNK)
    pair.engine.store(KV_BF16, tokens, seed=14, salt="tenant")
    with pair.connect(KV_BF16) as ctx:
        end = time.monotonic() + READABLE_WITHIN
        while not ctx.lookup(tokens, "tenant").hit_tokens and time.monotonic() < end:
            time.sleep(0.02)
        found = ctx.retrieve(tokens, "tenant")
        assert found is not None
        assert same_bytes(found, client_values(pair.release, pair.models[KV_BF16], CHUNK, seed=14))
        assert ctx.retrieve(tokens) is None
