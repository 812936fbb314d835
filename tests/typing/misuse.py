"""Calls that must not pass a strict type checker.

Each wrong line names the error that it must cause, and unused ignores are errors: a line that became right is found.
Never run: only checked.
"""

from __future__ import annotations

import torch

import lmcache_sdk
import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import KVLayout, LMCacheKVCacheContext, LookupResult, StoreResult

# ruff: noqa: B018  (an attribute that is only read is the point of several lines)


def wrong_calls(ctx: LMCacheKVCacheContext, kv: torch.Tensor, tokens: list[int]) -> None:
    """Arguments that no call takes."""
    lmc_sdk.connect("a:1", "b:2")  # type: ignore[call-arg]  # the model is not optional
    lmc_sdk.connect("a:1", "b:2", 7)  # type: ignore[arg-type]  # a model is named by text
    lmc_sdk.connect("a:1", "b:2", "m", "60")  # type: ignore[arg-type]  # seconds are a number
    lmc_sdk.connect("a:1", "b:2", "m", 60.0, None)  # type: ignore[call-arg]  # what is ours alone is keyword-only
    lmc_sdk.connect("a:1", "b:2", "m", transport="rdma")  # type: ignore[arg-type]  # a closed set
    lmc_sdk.connect("a:1", "b:2", "m", layout={})  # type: ignore[arg-type]  # a mapping is no layout: from_status
    lmc_sdk.connect("a:1", "b:2", "m", retries=3)  # type: ignore[call-arg]  # there is no such option
    lmc_sdk.retrieve(tokens)  # type: ignore[call-arg, arg-type]  # the context comes first
    lmc_sdk.retrieve(ctx, 7)  # type: ignore[arg-type]  # one token is a list of one
    lmc_sdk.retrieve(ctx, [1.5])  # type: ignore[list-item]  # a token is an int
    lmc_sdk.retrieve(ctx, ["a"])  # type: ignore[list-item]  # text is tokenised first
    lmc_sdk.retrieve(ctx, "a text")  # type: ignore[arg-type]  # a text is a sequence, but not of ints
    lmc_sdk.retrieve(ctx, {1, 2})  # type: ignore[arg-type]  # a set has no order
    lmc_sdk.retrieve(ctx, tokens, None)  # type: ignore[arg-type]  # no salt is the empty text
    lmc_sdk.store(ctx, tokens, kv)  # type: ignore[arg-type]  # the tensor comes before its tokens
    lmc_sdk.store(ctx, kv)  # type: ignore[call-arg]  # tokens are what names the tensor
    lmc_sdk.store(ctx, [kv], tokens)  # type: ignore[arg-type]  # one tensor holds every layer
    lmc_sdk.store(ctx, kv, tokens, existing="error")  # type: ignore[call-arg]  # the method has it
    ctx.store(kv, tokens, existing="replace")  # type: ignore[arg-type]  # a closed set
    ctx.store(kv, tokens, "", "error")  # type: ignore[call-arg]  # keyword-only


def wrong_expectations(ctx: LMCacheKVCacheContext, kv: torch.Tensor, tokens: list[int]) -> None:
    """Answers taken for what they are not."""
    lmc_sdk.retrieve(ctx, tokens).shape  # type: ignore[union-attr]  # a miss has no shape
    found: torch.Tensor = lmc_sdk.retrieve(ctx, tokens)  # type: ignore[assignment]  # a miss is no tensor
    stored: bool = ctx.store(kv, tokens)  # type: ignore[assignment]  # the method tells more: bool() of it
    hit: int = lmc_sdk.lookup(ctx, tokens)  # type: ignore[assignment]  # .hit_tokens is the number
    heads: int = KVLayout.from_status({}).num_kv_heads  # type: ignore[assignment]  # not every layout has heads
    layers: int = ctx.layout.num_layers  # type: ignore[union-attr]  # a context may know none
    print(found, stored, hit, heads, layers)


def wrong_assignments(ctx: LMCacheKVCacheContext, hit: LookupResult, stored: StoreResult, layout: KVLayout) -> None:
    """Facts cannot be changed."""
    ctx.chunk_size = 16  # type: ignore[misc]  # the server's
    ctx.transport = "inline"  # type: ignore[misc]  # the server decides
    hit.hit_tokens = 0  # type: ignore[misc]  # frozen
    stored.missing_chunks = 0  # type: ignore[misc]  # frozen
    layout.num_layers = 2  # type: ignore[misc]  # frozen
    KVLayout(2, torch.float16)  # type: ignore[call-arg]  # keyword-only
    KVLayout(num_layers=2, dtype="float16", hidden_dim=8)  # type: ignore[arg-type]  # a torch.dtype
    lmcache_sdk.KVCacheContext  # type: ignore[attr-defined]  # no such name
