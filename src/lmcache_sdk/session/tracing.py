"""LMCACHE_SDK_TRACE=1 prints every frame to stderr, in the form of the golden files, so that a trace can become a test.

Off unless asked for: frames hold token ids and salts. Long frames are cut; `...` and their length say so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from lmcache_sdk.protocol import Buffer

TRACE_VARIABLE: Final = "LMCACHE_SDK_TRACE"
_SHOWN: Final = 64


def tracing() -> bool:
    """Whether frames are to be printed; asked once per channel."""
    return os.environ.get(TRACE_VARIABLE) == "1"


def trace(direction: str, name: str, frames: Sequence[Buffer]) -> None:
    """Prints one message: `>` to the server, `<` from it, one line per frame."""
    lines = [f"# {name}", *(f"{direction} {_shown(frame)}" for frame in frames)]
    sys.stderr.write("\n".join(lines) + "\n")


def _shown(frame: Buffer) -> str:
    head = bytes(memoryview(frame)[:_SHOWN]).hex(" ")
    return head if len(frame) <= _SHOWN else f"{head} ... # {len(frame)} bytes"
