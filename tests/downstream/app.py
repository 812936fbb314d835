"""A small application as a user of the installed wheel writes it: cache a prompt, move its cache to another prompt.

`make wheel` type-checks this file against the wheel, and runs it there on the embedded server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from typing_extensions import assert_never, assert_type

import lmcache_sdk
import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import (
    AlreadyCachedError,
    DeadlineExceededError,
    Fate,
    KVCacheSDKError,
    KVLayout,
    LMCacheKVCacheContext,
    LookupResult,
    StoreResult,
    TokenSequence,
    UnsupportedError,
)
from lmcache_sdk.devserver import DevServer

MODEL = "downstream/sample"
LAYOUT = KVLayout(num_layers=2, dtype=torch.bfloat16, num_kv_heads=4, head_dim=8)


class PromptCache:
    """Keeps the cache of prompts, and says what it did in words."""

    def __init__(self, context: LMCacheKVCacheContext, salt: str = "") -> None:
        self._context = context
        self._salt = salt

    def describe(self) -> str:
        """Names the connection."""
        context = self._context
        assert_type(context.transport, Literal["shm", "inline"])
        assert_type(context.chunk_size, int)
        assert_type(context.layout, KVLayout | None)
        assert_type(context.model_name, str)
        assert_type(context.dialect, str)
        assert_type(context.server_version, str)
        assert_type(context.closed, bool)
        heads = context.layout.num_kv_heads if context.layout is not None else None
        assert_type(heads, int | None)
        return f"{context.model_name} on {context.server_version} over {context.transport}, {heads} heads"

    def cached_part(self, prompt: TokenSequence) -> float:
        """The share of a prompt that is cached."""
        found = self._context.lookup(prompt, self._salt)
        assert_type(found, LookupResult)
        assert_type(found.hit_tokens, int)
        assert_type(found.total_tokens, int)
        assert_type(found.tail_tokens, int)
        return found.hit_tokens / found.total_tokens if found.total_tokens else 0.0

    def fetch(self, prompt: TokenSequence) -> torch.Tensor | None:
        """The cache of a prompt's longest cached prefix."""
        kv = self._context.retrieve(prompt, self._salt)
        assert_type(kv, torch.Tensor | None)
        return kv

    def put(self, kv: torch.Tensor, prompt: TokenSequence) -> str:
        """Stores, and says what happened."""
        try:
            stored = self._context.store(kv, prompt, self._salt, existing="error")
        except AlreadyCachedError as error:
            assert_type(error.chunk_indices, tuple[int, ...])
            return f"there already: {len(error.chunk_indices)} chunks"
        assert_type(stored, StoreResult)
        assert_type(stored.written_chunks, int)
        assert_type(stored.already_cached_chunks, int)
        assert_type(stored.missing_chunks, int)
        assert_type(stored.tail_tokens, int)
        assert_type(stored.reason, str)
        return "stored" if stored else f"not stored: {stored.reason}"


def may_retry(error: KVCacheSDKError) -> bool:
    """Whether the same call can be made again without a doubt."""
    assert_type(error.fate, Fate)
    match error.fate:
        case Fate.NOT_SENT:
            return True
        case Fate.UNKNOWN | Fate.ANSWERED:
            return False
        case _:
            assert_never(error.fate)


@contextmanager
def sample_server() -> Iterator[DevServer]:
    """The server that the library brings for tests."""
    with DevServer() as server:
        assert_type(server, DevServer)
        yield server


def module_functions(context: LMCacheKVCacheContext, tokens: Sequence[int]) -> torch.Tensor | None:
    """The same by the module functions, positionally, as a script for the official ones calls them."""
    kv = lmc_sdk.retrieve(context, tokens, "")
    assert_type(kv, torch.Tensor | None)
    if kv is not None:
        assert_type(lmc_sdk.store(context, kv, tokens, ""), bool)
        assert_type(lmc_sdk.store(context, kv=kv, tokens=tokens, cache_salt=""), bool)
    assert_type(lmc_sdk.lookup(context, tokens, ""), LookupResult)
    return kv


def run(url: str, http_url: str) -> str:
    """Stores a random cache, reads it back under two names, and compares."""
    connection = lmc_sdk.connect(url, http_url, MODEL, 60.0, layout=LAYOUT, dialect=None, api_key=None, transport=None)
    assert_type(connection, LMCacheKVCacheContext)
    with connection as context:
        assert_type(context, LMCacheKVCacheContext)
        prompt = list(range(2 * context.chunk_size))
        other = [token + 1 for token in prompt]
        kv = torch.randn(LAYOUT.planes, LAYOUT.num_layers, len(prompt), LAYOUT.hidden_dim).to(LAYOUT.dtype)
        cache = PromptCache(context)
        words = [cache.describe(), cache.put(kv, prompt), cache.put(kv, prompt), f"{cache.cached_part(prompt):.0%}"]
        found = module_functions(context, prompt)
        if found is None or not torch.equal(found, kv):
            raise SystemExit("what came back is not what was stored")
        words.append(cache.put(found, torch.tensor(other)))
        lmc_sdk.close(context)
    if not connection.closed:
        raise SystemExit("not closed")
    return "; ".join(words)


def main() -> int:
    """Runs on the embedded server; errors say whether a retry is safe."""
    try:
        with sample_server() as server:
            print(run(server.url, server.http_url))
    except DeadlineExceededError as error:
        assert_type(error.step, str)
        print(f"too slow at {error.step}", file=sys.stderr)
    except (UnsupportedError, lmcache_sdk.KVCacheSDKError) as error:
        print(f"{error} (retry: {may_retry(error)})", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
