"""This library, as the worker asks it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Final

import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import LMCacheKVCacheContext

TIMEOUT: Final = 120.0


class OurContext:
    """See `side.Context`."""

    def __init__(self, context: LMCacheKVCacheContext) -> None:
        self._context = context

    def expect(self, tokens: list[int], kv: torch.Tensor | None = None) -> None:
        """Nothing."""

    def retrieve(self, tokens: list[int], out: torch.Tensor | None) -> torch.Tensor | None:
        """As a user calls it; without `out` exactly as one who has never heard of it."""
        if out is None:
            return self._context.retrieve(tokens)
        return self._context.retrieve(tokens, out=out)

    def opened(self, found: object) -> torch.Tensor | None:
        """That tensor itself."""
        assert found is None or isinstance(found, torch.Tensor)
        return found

    def store(self, kv: torch.Tensor, tokens: list[int]) -> bool:
        """Whether all of it is cached now."""
        return bool(self._context.store(kv, tokens))

    def lookup(self, tokens: list[int]) -> int:
        """How many tokens are cached."""
        return self._context.lookup(tokens).hit_tokens

    def view(self, tokens: list[int]) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """The chunks on the pool."""
        return self._context.view(tokens)

    def close(self) -> None:
        """The end."""
        self._context.close()


class Ours:
    """See `side.Side`."""

    def connect(self, url: str, http_url: str, model: str, recycle_bytes: int | None) -> OurContext:
        """Connects as a user does."""
        if recycle_bytes is None:
            return OurContext(lmc_sdk.connect(url, http_url, model, TIMEOUT))
        return OurContext(lmc_sdk.connect(url, http_url, model, TIMEOUT, recycle_bytes=recycle_bytes))

    def version(self) -> str:
        """Of the installed package."""
        return version("lmcache-sdk")


SIDE: Final = Ours()
