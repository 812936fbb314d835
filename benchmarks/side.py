"""What the worker asks of a library: the few calls that all have, and those that only ours has.

The adapters add nothing that costs time: one Python call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Context(Protocol):
    """One model on one server."""

    def expect(self, tokens: list[int], kv: torch.Tensor | None = None) -> None:
        """Told, before the clock starts, what a call will be about. A user's client does nothing with it."""
        ...

    def retrieve(self, tokens: list[int], out: torch.Tensor | None) -> object:
        """The cached prefix; what `opened` takes."""
        ...

    def opened(self, found: object) -> torch.Tensor | None:
        """What a retrieve brought, as a tensor, outside of the timed part."""
        ...

    def store(self, kv: torch.Tensor, tokens: list[int]) -> bool:
        """Whether all of it is cached now."""
        ...

    def lookup(self, tokens: list[int]) -> int:
        """How many tokens are cached; leaves no lock and no session behind."""
        ...

    def view(self, tokens: list[int]) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """The chunks on the pool."""
        ...

    def close(self) -> None:
        """The end."""
        ...


class Side(Protocol):
    """One library."""

    def connect(self, url: str, http_url: str, model: str, recycle_bytes: int | None) -> Context:
        """A context; `recycle_bytes` None leaves the default."""
        ...

    def version(self) -> str:
        """Which release runs."""
        ...
