"""Hypothesis strategies for layouts and for tensors of arbitrary bits."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from lmcache_sdk.layout import KVLayout, itemsize
from lmcache_sdk.layout.dtypes import DTYPES

dtypes = st.sampled_from(sorted(DTYPES.values(), key=str))


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """Small layouts of every kind."""
    kind = draw(st.sampled_from(["two planes", "MLA", "fused", "one plane"]))
    return KVLayout(
        num_layers=draw(st.integers(1, 3)),
        dtype=draw(dtypes),
        num_kv_heads=1 if kind == "MLA" else draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 5)),
        is_mla=kind == "MLA",
        is_fused=kind == "fused",
        planes=2 if kind == "two planes" else 1,
    )


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of random bits: NaN payloads, infinities, denormals; booleans are 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    count = itemsize(dtype)
    for size in shape:
        count *= size
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
