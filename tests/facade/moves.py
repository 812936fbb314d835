"""`Moves` sees every operation of torch that makes or writes elements, and every memmove, in one thread and block.

So what it counts does not depend on which function of the library moves the bytes.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmcache_sdk.values import override

VIEWS: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "detach", "slice", "select", "permute", "unbind", "as_strided", "unsqueeze", "alias"),
        *("empty", "is_same_size"),
    )
)
"""What moves nothing."""


class Moves(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """What this thread moves inside the block: `(operation, bytes)` of each that torch or ctypes did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.made: list[tuple[str, int]] = []
        self._thread = threading.get_ident()
        self._counting = False
        real = ctypes.memmove

        def memmove(to: Any, of: Any, count: int) -> int:
            if self._counting and threading.get_ident() == self._thread:
                self.made.append(("memmove", count))
            return real(to, of, count)

        monkeypatch.setattr(ctypes, "memmove", memmove)

    @override
    def __enter__(self) -> Moves:
        self._counting = True
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    @override
    def __exit__(self, *why: object) -> None:
        super().__exit__(*why)  # type: ignore[no-untyped-call]  # torch's
        self._counting = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        nbytes = made.nbytes if isinstance(made, torch.Tensor) else 0
        if func._schema.name not in VIEWS and (name, nbytes) != ("zero_", 0):  # which only tells autograd of a memmove
            self.made.append((name, nbytes))
        return made
