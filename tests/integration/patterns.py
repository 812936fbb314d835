"""The values that tests put into KV caches: a different bit pattern for nearly every logical position.

Contract: `logical_values` gives a tensor `[plane, layer, token, head, dim]` whose bits depend on every one of the
five indices and on the seed, so that a swapped axis, a shifted block or another sequence's data cannot compare equal.
The bits are not chosen to be nice numbers: NaN with payloads, infinities, subnormals and negative zero occur. Compare
bytes, never values. It knows torch and nothing else: the engine's process uses it as well as the tests.
"""

from __future__ import annotations

import ctypes

import torch

# Odd multipliers of about 31 bits; what matters is that no small combination of steps cancels.
_STEPS = (0x5BD1E995, 0x1B873593, 0x165667B1, 0x27D4EB2F, 0x2C1B3C6D)
_SEED_STEP = 0x3C6EF372
_MASK = 0xFFFFFFFF
_BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def logical_values(shape: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor `[plane, layer, token, head, dim]` of that dtype."""
    mixed = torch.full((1, 1, 1, 1, 1), (seed * _SEED_STEP) & _MASK, dtype=torch.int64)
    for axis, (length, step) in enumerate(zip(shape, _STEPS, strict=True)):
        view = [1] * 5
        view[axis] = length
        mixed = mixed + torch.arange(length, dtype=torch.int64).mul(step).view(view)
    mixed = mixed & _MASK
    # Two rounds of xor-shift-multiply: without them the low bits of neighbours differ by constants.
    for shift, factor in ((15, 0x2C1B3C6D), (13, 0x297A2D39)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
    itemsize = torch.empty(0, dtype=dtype).element_size()
    bits = mixed >> (32 - 8 * itemsize)
    return bits.to(_BIT_TYPES[itemsize]).view(dtype)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order."""
    whole = tensor.detach().cpu().contiguous()
    # Not bytes(storage), which goes byte by byte, nor numpy, which torch does not need here.
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits (NaN equals itself, -0 does not equal 0)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = _BIT_TYPES[left.element_size()]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))
