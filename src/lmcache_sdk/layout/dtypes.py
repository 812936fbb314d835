"""Wire name <-> torch.dtype, a closed table.

A name that a peer sent is looked up here and nowhere else: `getattr(torch, name)` would let it choose an attribute of
a module. Names are torch's own without the prefix, as slots and envelopes carry them. LAYOUT.md section 2 lists what
servers were seen to move; the others are plain numbers that a server hands on as bytes without looking at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from lmcache_sdk.errors import UnknownLayoutError

DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "bfloat16": torch.bfloat16,
        "bool": torch.bool,
        "float16": torch.float16,
        "float32": torch.float32,
        "float64": torch.float64,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e4m3fnuz": torch.float8_e4m3fnuz,
        "float8_e5m2": torch.float8_e5m2,
        "float8_e5m2fnuz": torch.float8_e5m2fnuz,
        "int16": torch.int16,
        "int32": torch.int32,
        "int64": torch.int64,
        "int8": torch.int8,
        "uint16": torch.uint16,
        "uint32": torch.uint32,
        "uint64": torch.uint64,
        "uint8": torch.uint8,
    }
)
_NAMES: Final[Mapping[torch.dtype, str]] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
_MAX_SHOWN: Final = 40


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of a wire name such as `bfloat16`; raises UnknownLayoutError for any other."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise UnknownLayoutError(f"unknown dtype {name[:_MAX_SHOWN]!r}; known: {', '.join(DTYPES)}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a dtype; raises UnknownLayoutError when a cache cannot hold it."""
    name = _NAMES.get(dtype)
    if name is None:
        raise UnknownLayoutError(f"a cache cannot hold {dtype}; known: {', '.join(DTYPES)}")
    return name


def itemsize(dtype: torch.dtype) -> int:
    """Bytes per element."""
    return dtype.itemsize
