"""Mistakes that a user's strict type checker must find in the installed wheel. Every line with `E:` must be an error of
the named kind, and no other line may be one (check_types.py compares). Never run.
"""

from __future__ import annotations

import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import KVLayout, LMCacheKVCacheContext


def mistakes(ctx: LMCacheKVCacheContext, kv: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Each of the public calls, made wrongly."""
    lmc_sdk.connect("a:1", "b:2")  # E: call-arg
    lmc_sdk.connect("a:1", "b:2", "m", 60.0, None)  # E: call-arg
    lmc_sdk.connect("a:1", "b:2", "m", transport="tcp")  # E: arg-type
    lmc_sdk.retrieve(ctx, "text")  # E: arg-type
    lmc_sdk.retrieve(ctx, tokens)[0]  # E: index
    lmc_sdk.store(ctx, tokens, kv)  # E: arg-type
    lmc_sdk.store(ctx, lmc_sdk.retrieve(ctx, tokens), tokens)  # E: arg-type
    lmc_sdk.lookup(ctx, tokens) + 1  # E: operator
    lmc_sdk.lookup(ctx, tokens).hits  # E: attr-defined
    lmc_sdk.close()  # E: call-arg
    lmc_sdk.delete(ctx)  # E: attr-defined
    ctx.retrieve(3)  # E: arg-type
    ctx.lookup(tokens, 3)  # E: arg-type
    ctx.store(kv, tokens, existing="maybe")  # E: arg-type
    ctx.store(kv, tokens).written_chunks = 3  # E: misc
    ctx.chunk_size = 7  # E: misc
    ctx.layout.num_layers  # E: union-attr
    KVLayout.from_status("text")  # E: arg-type
    KVLayout(num_layers="2", dtype=torch.float16)  # E: arg-type
    KVLayout(dtype=torch.float16)  # E: call-arg
    return lmc_sdk.retrieve(ctx, tokens)  # E: return-value
