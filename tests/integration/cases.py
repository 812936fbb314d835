"""The models that every test server serves, and what their tensors look like to a client.

Contract: `MODELS` is registered by one engine per server; `client_values` turns the logical values of a model,
`[plane, layer, token, head, dim]`, into the tensor that a client must get and give, by the rules of the protocol text
and not by the library's own code.
"""

from __future__ import annotations

from itertools import count
from typing import Final

import torch

from .make_env import RELEASES
from .patterns import logical_values
from .servers import EngineShape

CHUNK: Final = 256

KV_BF16: Final = "tests/kv-bf16"
KV_FP16: Final = "tests/kv-fp16"
KV_FP32: Final = "tests/kv-fp32"
MLA: Final = "tests/mla"
FUSED: Final = "tests/fused"
NHD: Final = "tests/nhd"
KV_FIRST: Final = "tests/kv-first"
WIDE: Final = "tests/wide"
TWO_RANKS: Final = "tests/two-ranks"
CONTRACT: Final = "Qwen/Qwen3-8B"  # the name in the contract's snippet, on a small cache

MODELS: Final[dict[str, EngineShape]] = {
    KV_BF16: EngineShape(),
    KV_FP16: EngineShape(dtype="float16", num_layers=3),
    KV_FP32: EngineShape(dtype="float32", num_layers=2, num_heads=3),
    MLA: EngineShape(layout="MLA", num_layers=5, head_size=72),
    FUSED: EngineShape(layout="FUSED", num_layers=3),
    # 64 KiB a token: 1024 tokens are 64 MiB
    WIDE: EngineShape(num_layers=16, num_heads=8, head_size=128, num_blocks=2),
    TWO_RANKS: EngineShape(world_size=2, num_layers=2),
    CONTRACT: EngineShape(num_layers=2),
}
# Servers up to 0.5.4 without a GPU read every layout as HND: an engine with another one would be misread.
MODELS_FROM_0_5_5: Final[dict[str, EngineShape]] = {
    NHD: EngineShape(layout="NHD", num_layers=3),
    KV_FIRST: EngineShape(layout="FLASH", num_layers=3),
}
ALL_MODELS: Final = {**MODELS, **MODELS_FROM_0_5_5}


def models_of(release: str) -> dict[str, EngineShape]:
    """The models an engine can register with a CPU server of that release."""
    return ALL_MODELS if RELEASES.index(release) >= RELEASES.index("0.5.5") else MODELS


def is_two_plane_fused(release: str, shape: EngineShape) -> bool:
    """0.5.0 and 0.5.1 see the two halves of a fused cache as two planes; from 0.5.2 it is one opaque plane."""
    return shape.layout == "FUSED" and release in ("0.5.0", "0.5.1")


def client_shape(release: str, shape: EngineShape, num_tokens: int) -> tuple[int, int, int, int]:
    """`[planes, L, T, D]` as a client of that release's server sees the model."""
    width = shape.num_heads * shape.head_size
    if shape.layout == "MLA":
        return 1, shape.num_layers, num_tokens, shape.head_size
    if shape.layout == "FUSED" and not is_two_plane_fused(release, shape):
        return 1, shape.num_layers, num_tokens, 2 * width
    return 2, shape.num_layers, num_tokens, width


def engine_values(shape: EngineShape, num_tokens: int, seed: int) -> torch.Tensor:
    """`[plane, layer, token, head, dim]` as engine_blocks.py fills and dumps it."""
    planes, heads = (1, 1) if shape.layout == "MLA" else (2, shape.num_heads)
    logical = (planes, shape.num_layers, num_tokens, heads, shape.head_size)
    return logical_values(logical, dtype_of(shape), seed)


def client_values(release: str, shape: EngineShape, num_tokens: int, seed: int) -> torch.Tensor:
    """The same values as `engine_values`, as a client gets and gives them."""
    values = engine_values(shape, num_tokens, seed)
    if shape.layout == "FUSED" and not is_two_plane_fused(release, shape):
        # one plane; in it head by head the key, then the value
        values = values.permute(1, 2, 3, 0, 4).flatten(3)[None]
    return values.flatten(3).contiguous()


def dtype_of(shape: EngineShape) -> torch.dtype:
    """The torch dtype of a model's cache."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[shape.dtype]


_sequence_numbers = count(1)


def fresh_tokens(length: int) -> list[int]:
    """Token ids that share no prefix with any other list of this run: a cached chunk is named by its whole prefix."""
    number = next(_sequence_numbers)
    tokens = [(number * 7919 + position * 31) % 90_000 + 1 for position in range(length)]
    return [100_000 + number, *tokens[1:]] if tokens else []
