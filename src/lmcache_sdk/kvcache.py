"""The module functions: connect, lookup, retrieve, store, close.

```python
import lmcache_sdk.kvcache as lmc_sdk

ctx = lmc_sdk.connect(url="tcp://localhost:5555", http_url="http://localhost:9000", model_name="Qwen/Qwen3-8B")
kv = lmc_sdk.retrieve(ctx, tokens=[1, 2, 3])  # [2, L, hit_tokens, D] or None
ok = lmc_sdk.store(ctx, kv=kv, tokens=[4, 5, 6])
lmc_sdk.close(ctx)
```

The positional order is that of the SDK inside lmcache, so a script ports by changing its import. Parameters that are
only ours are keyword-only. Richer answers are methods of the context.
"""

from __future__ import annotations

from typing import Literal

import torch

from lmcache_sdk.errors import ArgumentTypeError
from lmcache_sdk.facade import (
    TRANSPORTS,
    ConnectArguments,
    KVView,
    Link,
    LMCacheKVCacheContext,
    LookupResult,
    TokenSequence,
    checked_api_key,
    checked_choice,
    checked_layout,
    checked_model_name,
    checked_nbytes,
    open_connection,
)
from lmcache_sdk.layout import KVLayout
from lmcache_sdk.session import BufferPool, Deadline, checked_addresses, checked_timeout

__all__ = ["close", "connect", "lookup", "retrieve", "store", "view"]


def connect(
    url: str,
    http_url: str,
    model_name: str,
    timeout: float = 60.0,
    *,
    layout: KVLayout | None = None,
    dialect: str | None = None,
    api_key: str | None = None,
    transport: Literal["shm", "inline"] | None = None,
    recycle_bytes: int = 2 * 2**30,
) -> LMCacheKVCacheContext:
    """Connects to the cache of one model on a running LMCache multiprocess server.

    Args:
        url: the server's ZMQ address: `tcp://host:port`, `host:port` or `ipc:///path`.
        http_url: the server's HTTP address: `http://host:port` or `host:port`; `https://host:port` behind a
            proxy that speaks TLS.
        model_name: the name under which the engine registered the model.
        timeout: seconds for this call, and later for each call on the context.
        layout: the cache's geometry, for a model that no engine has registered yet (prewarming) or whose engine
            publishes none. Refused when it differs from the engine's.
        dialect: the server release whose wire to speak, such as "0.5.6", instead of the one that the server reports.
        api_key: the HTTP API key of a 0.5.7 server; the environment's LMCACHE_SDK_API_KEY when left out.
        transport: asserts how tensors travel, "shm" or "inline"; the server decides.
        recycle_bytes: bytes of dropped results that the context keeps to make new results from, which spares most of
            the time of a large retrieve; the kernel takes them when memory is short. 0 keeps none.

    Returns:
        The context that the other functions take; also a context manager.

    Raises:
        UsageError: an argument could not be meant; nothing was sent.
        ConnectError, DeadlineExceededError: the server cannot be reached, or its shared memory not seen from here.
        UnsupportedError: the release, the transfer mode or the model's layout is not served by this library.
        NotRegisteredError: no engine has registered the model; the error lists those that are.
        PoolFullError: the server has no room for the few bytes that prove its shared memory.
        RemoteProtocolError, HTTPStatusError: the server answered something that it should not.
        LayoutError: layouts contradict each other.
    """
    deadline = Deadline.after(checked_timeout(timeout))
    if dialect is not None and not isinstance(dialect, str):
        raise ArgumentTypeError(f"dialect: expected a str, got {type(dialect).__name__}")
    arguments = ConnectArguments(
        addresses=checked_addresses(url, http_url),
        model_name=checked_model_name(model_name),
        layout=checked_layout(layout),
        dialect=dialect,
        api_key=checked_api_key(api_key),
        transport=None if transport is None else checked_choice(transport, "transport", TRANSPORTS),
        buffers=BufferPool(checked_nbytes(recycle_bytes, "recycle_bytes")),
    )
    return LMCacheKVCacheContext(Link(arguments, open_connection(arguments, deadline)), float(timeout))


def lookup(ctx: LMCacheKVCacheContext, tokens: TokenSequence, cache_salt: str = "") -> LookupResult:
    """Says how much of a token sequence is cached; see `LMCacheKVCacheContext.lookup`."""
    return _context(ctx).lookup(tokens, cache_salt)


def retrieve(
    ctx: LMCacheKVCacheContext, tokens: TokenSequence, cache_salt: str = "", *, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The cached prefix as a contiguous CPU tensor `[2, L, hit_tokens, D]`, or None; see
    `LMCacheKVCacheContext.retrieve`.
    """
    return _context(ctx).retrieve(tokens, cache_salt, out=out)


def store(ctx: LMCacheKVCacheContext, kv: torch.Tensor, tokens: TokenSequence, cache_salt: str = "") -> bool:
    """Stores `kv`; true when every whole chunk of `tokens` is in the cache now; see `LMCacheKVCacheContext.store`."""
    return bool(_context(ctx).store(kv, tokens, cache_salt))


def view(ctx: LMCacheKVCacheContext, tokens: TokenSequence, cache_salt: str = "") -> KVView:
    """The cached prefix without a copy, for the time of a `with` block; see `LMCacheKVCacheContext.view`."""
    return _context(ctx).view(tokens, cache_salt)


def close(ctx: LMCacheKVCacheContext) -> None:
    """Unregisters and frees everything; twice does no harm."""
    _context(ctx).close()


def _context(ctx: object) -> LMCacheKVCacheContext:
    if not isinstance(ctx, LMCacheKVCacheContext):
        raise ArgumentTypeError(f"ctx: expected what connect() gave, got {type(ctx).__name__}")
    return ctx
