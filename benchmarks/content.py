"""What the benchmark stores and asks for: token ids and KV that each process can compute for itself.

Contract: everything follows from (seed, position), so nothing large travels between processes, and what came back is
checked without keeping a copy of what was stored. Cheap to write (one broadcast addition), different at each plane,
layer and token. Torch and nothing else: the process that runs the other SDK imports it too.
"""

from __future__ import annotations

from typing import Final

import torch

CHUNK: Final = 256
_STEPS: Final = (12_289, 769, 31)


def tokens(seed: int, count: int) -> list[int]:
    """Token ids that share no prefix with those of another seed: a chunk is named by its whole prefix."""
    return [100_000 + seed, *((seed * 7919 + position * 31) % 90_000 + 1 for position in range(1, count))]


def _bits(shape: tuple[int, int, int, int], positions: torch.Tensor, seed: int) -> torch.Tensor:
    planes, layers, _, width = shape
    plane_step, layer_step, token_step = _STEPS
    part = (torch.arange(planes) * plane_step).view(-1, 1, 1, 1) + (torch.arange(layers) * layer_step).view(1, -1, 1, 1)
    part = part + (positions * token_step + seed * 101).view(1, 1, -1, 1)
    return part.to(torch.int16) + torch.arange(width, dtype=torch.int16).view(1, 1, 1, -1)


def make_kv(shape: tuple[int, int, int, int], seed: int) -> torch.Tensor:
    """A touched bfloat16 tensor `[plane, layer, token, hidden]`."""
    return _bits(shape, torch.arange(shape[2]), seed).view(torch.bfloat16)


def find_wrong(kv: torch.Tensor | None, shape: tuple[int, int, int, int], seed: int) -> str:
    """What is wrong with KV that came back; empty when nothing is. Looks at the edges of every chunk, all planes and
    layers: a missing, swapped or foreign chunk shows there.
    """
    if kv is None:
        return "nothing came back"
    if tuple(kv.shape) != shape or kv.dtype != torch.bfloat16:
        return f"{tuple(kv.shape)} {kv.dtype} came back, expected {shape}"
    edges = torch.cat([torch.arange(0, shape[2], CHUNK), torch.arange(CHUNK - 1, shape[2], CHUNK)])
    found = kv.view(torch.int16)[:, :, edges]
    if not torch.equal(found, _bits(shape, edges, seed)):
        return "other values came back than were stored"
    return ""
