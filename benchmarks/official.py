"""The SDK inside lmcache, as the worker asks it. Imported only by the Python of the interop environment.

It has no lookup of its own: the figure is that of the steps with which its retrieve begins, and of giving back what
they take (the read locks, the session), which is what a lookup of ours does too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final
from uuid import uuid4

import torch

# By name: the checker of this project has no lmcache to look into.
_kvcache: Any = import_module("lmcache.sdk.kvcache")

TIMEOUT: Final = 120.0
_POLL: Final = 0.01
"""What its own retrieve sleeps between two questions."""


class OfficialContext:
    """See `side.Context`."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def expect(self, tokens: list[int], kv: torch.Tensor | None = None) -> None:
        """Nothing."""

    def retrieve(self, tokens: list[int], out: torch.Tensor | None) -> torch.Tensor | None:
        """Its retrieve; it cannot write into a tensor that the caller has."""
        assert out is None, "not offered"
        kv: torch.Tensor | None = self._context.retrieve(tokens)
        # of a one-plane cache it leaves the plane axis out
        return kv[None] if kv is not None and kv.dim() == 3 else kv

    def opened(self, found: object) -> torch.Tensor | None:
        """That tensor itself."""
        assert found is None or isinstance(found, torch.Tensor)
        return found

    def store(self, kv: torch.Tensor, tokens: list[int]) -> bool:
        """Its store."""
        return bool(self._context.store(kv, tokens))

    def lookup(self, tokens: list[int]) -> int:
        """The steps of its retrieve up to the answer, and everything given back."""
        context = self._context
        request_id = f"lookup-{uuid4().hex}"
        context.maybe_submit_lookup_request(request_id, token_ids=tokens)
        while (found := context.check_lookup_result(request_id)) is None:
            time.sleep(_POLL)
        hit: int = found
        if hit:
            key = context._create_key(tokens[:hit], 0, hit, request_id).no_worker_id_version()
            context._req_client.free_lookup_locks(key, context._world_size).result(timeout=TIMEOUT)
        context.end_session(request_id)
        return hit

    def view(self, tokens: list[int]) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Not offered."""
        raise NotImplementedError("not offered")

    def close(self) -> None:
        """The end."""
        self._context.close()


class Official:
    """See `side.Side`."""

    def connect(self, url: str, http_url: str, model: str, recycle_bytes: int | None) -> OfficialContext:
        """Connects as a user does; nothing is recycled."""
        assert recycle_bytes is None, "not offered"
        return OfficialContext(_kvcache.connect(url, http_url, model, TIMEOUT))

    def version(self) -> str:
        """Of the installed package."""
        return version("lmcache")


SIDE: Final = Official()
