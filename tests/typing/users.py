"""What a user writes, and what each expression is to a strict type checker. Never run: only checked."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from typing_extensions import assert_type

import lmcache_sdk
import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import (
    AlreadyCachedError,
    ArgumentTypeError,
    DeadlineExceededError,
    Fate,
    HTTPStatusError,
    KVCacheSDKError,
    KVLayout,
    LayoutChangedError,
    LMCacheKVCacheContext,
    LookupResult,
    NotRegisteredError,
    RemoteProtocolError,
    ServerError,
    SessionClosedError,
    ShapeMismatchError,
    StoreResult,
    TokenSequence,
    UnsupportedError,
    UsageError,
)
from lmcache_sdk.devserver import DevServer


def connects() -> LMCacheKVCacheContext:
    """The contract's order of arguments, and those that are keyword-only."""
    plain = lmc_sdk.connect("tcp://localhost:5555", "http://localhost:9000", "Qwen/Qwen3-8B", 60.0)
    assert_type(plain, LMCacheKVCacheContext)
    assert_type(lmc_sdk.connect(url="a:1", http_url="b:2", model_name="m"), LMCacheKVCacheContext)
    assert_type(lmc_sdk.connect("a:1", "b:2", "m", timeout=5), LMCacheKVCacheContext)
    kind: Literal["shm", "inline"] = "shm"
    return lmc_sdk.connect(
        "a:1",
        "b:2",
        "m",
        layout=KVLayout(num_layers=2, dtype=torch.bfloat16, num_kv_heads=4, head_dim=8),
        dialect="0.5.6",
        api_key="secret",
        transport=kind,
    )


def module_functions(ctx: LMCacheKVCacheContext, kv: torch.Tensor, tokens: list[int]) -> None:
    """The four functions of the contract, and lookup."""
    found = lmc_sdk.retrieve(ctx, tokens)
    assert_type(found, torch.Tensor | None)
    assert_type(lmc_sdk.retrieve(ctx, tokens, "salt"), torch.Tensor | None)
    assert_type(lmc_sdk.retrieve(ctx, tokens=tokens, cache_salt="salt"), torch.Tensor | None)
    if found is not None:
        assert_type(found.shape[2], int)
        assert_type(lmc_sdk.store(ctx, found, tokens), bool)
    assert_type(lmc_sdk.store(ctx, kv, tokens, "salt"), bool)
    assert_type(lmc_sdk.store(ctx, kv=kv, tokens=tokens, cache_salt=""), bool)
    assert_type(lmc_sdk.lookup(ctx, tokens), LookupResult)
    assert_type(lmc_sdk.lookup(ctx, tokens, cache_salt="salt"), LookupResult)
    lmc_sdk.close(ctx)


def methods(ctx: LMCacheKVCacheContext, kv: torch.Tensor, tokens: TokenSequence) -> None:
    """The richer answers."""
    hit = ctx.lookup(tokens, "salt")
    assert_type(hit, LookupResult)
    assert_type(hit.hit_tokens, int)
    assert_type(hit.total_tokens, int)
    assert_type(hit.tail_tokens, int)

    assert_type(ctx.retrieve(tokens, cache_salt="salt"), torch.Tensor | None)

    stored = ctx.store(kv, tokens, "salt", existing="error")
    assert_type(stored, StoreResult)
    assert_type(stored.written_chunks, int)
    assert_type(stored.already_cached_chunks, int)
    assert_type(stored.missing_chunks, int)
    assert_type(stored.tail_tokens, int)
    assert_type(stored.reason, str)
    assert_type(bool(stored), bool)
    assert_type(ctx.store(kv, tokens, existing="skip"), StoreResult)
    ctx.close()


def what_a_context_tells(ctx: LMCacheKVCacheContext) -> None:
    """Its attributes are read-only facts of the connection."""
    assert_type(ctx.closed, bool)
    assert_type(ctx.transport, Literal["shm", "inline"])
    assert_type(ctx.chunk_size, int)
    assert_type(ctx.layout, KVLayout | None)
    assert_type(ctx.model_name, str)
    assert_type(ctx.dialect, str)
    assert_type(ctx.server_version, str)
    with ctx as same:
        assert_type(same, LMCacheKVCacheContext)


def every_form_of_tokens(ctx: LMCacheKVCacheContext) -> None:
    """Sequences of ints, a tensor, an array of numpy or of the standard library."""
    forms: Sequence[TokenSequence] = [
        [1, 2, 3],
        (1, 2, 3),
        range(3),
        torch.arange(3),
        np.arange(3),
        np.array([1, 2, 3], dtype=np.uint32),
        array.array("I", [1, 2, 3]),
    ]
    for tokens in forms:
        assert_type(ctx.lookup(tokens), LookupResult)
    lmc_sdk.retrieve(ctx, range(300))
    lmc_sdk.retrieve(ctx, torch.arange(300))
    lmc_sdk.retrieve(ctx, np.arange(300))


def layouts(entry: Mapping[str, object]) -> None:
    """The numbers of a cache, made by hand or read from /status."""
    layout = KVLayout.from_status(entry)
    assert_type(layout, KVLayout)
    assert_type(layout.num_layers, int)
    assert_type(layout.planes, int)
    assert_type(layout.num_kv_heads, int | None)
    assert_type(layout.head_dim, int | None)
    assert_type(layout.hidden_dim, int)
    assert_type(layout.dtype, torch.dtype)
    assert_type(layout.tokens_per_block, int)
    assert_type(layout.slots_per_block, int)
    assert_type(layout.is_mla, bool)
    assert_type(layout.is_fused, bool)
    KVLayout(num_layers=2, dtype=torch.float16, hidden_dim=64, planes=1, tokens_per_block=16, is_mla=True)
    KVLayout(num_layers=2, dtype=torch.float16, num_kv_heads=2, head_dim=8, slots_per_block=16, is_fused=True)


def errors(ctx: LMCacheKVCacheContext, tokens: list[int]) -> None:
    """Each error is caught by what must be done about it, and carries facts."""
    try:
        ctx.retrieve(tokens)
    except DeadlineExceededError as error:
        assert_type(error.step, str)
        assert_type(error.fate, Fate)
        as_builtin: TimeoutError = error
        print(as_builtin)
    except AlreadyCachedError as error:
        assert_type(error.chunk_indices, tuple[int, ...])
    except NotRegisteredError as error:
        assert_type(error.registered_models, tuple[str, ...])
    except HTTPStatusError as error:
        assert_type(error.status, int)
        assert_type(error.url, str)
    except ServerError as error:
        assert_type(error.reply, str)
    except RemoteProtocolError as error:
        assert_type(error.path, str)
    except UnsupportedError as error:
        assert_type(error.request, str)
        assert_type(error.dialect, str)
    except (ArgumentTypeError, SessionClosedError, UsageError) as error:
        as_value_error: ValueError = error
        print(as_value_error)
    except LayoutChangedError as error:
        assert_type(error.before, str)
        assert_type(error.after, str)
    except ShapeMismatchError as error:
        assert_type(error.expected, str)
        assert_type(error.found, str)
    except lmcache_sdk.KVCacheSDKError as error:
        assert_type(error, KVCacheSDKError)
        base: RuntimeError = error
        print(base)


def what_a_retry_needs(error: KVCacheSDKError) -> bool:
    """A closed set: the checker sees that every fate is handled."""
    match error.fate:
        case Fate.NOT_SENT:
            return True
        case Fate.UNKNOWN | Fate.ANSWERED:
            return False


def embedded_server(folder: Path) -> None:
    """The server that tests run on."""
    with DevServer() as server:
        assert_type(server, DevServer)
        assert_type(server.url, str)
        assert_type(server.http_url, str)
        with lmc_sdk.connect(server.url, server.http_url, folder.name) as ctx:
            assert_type(ctx, LMCacheKVCacheContext)
