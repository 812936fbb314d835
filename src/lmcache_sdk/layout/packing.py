"""One tensor `[kv, layer, token, hidden]` <-> its chunks.

`check_kv` is the one gate for a user's tensor; after it nothing about the tensor can fail any more, which matters
because a store that fails half way leaves reserved slots behind. Copies are bytes moved between equal dtypes, so NaN
patterns survive; whatever the strides of the source, the whole tensor is never copied.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Final

import torch

from lmcache_sdk.errors import ArgumentTypeError, Fate, ShapeMismatchError
from lmcache_sdk.layout.axes import HIDDEN, KV, LAYER, OBJECT_RANK, TOKEN
from lmcache_sdk.layout.dtypes import itemsize
from lmcache_sdk.layout.geometry import KVLayout
from lmcache_sdk.layout.views import tensor_on

_PID: Final = os.getpid()
_SERIAL_ELEMENTS: Final = 32_768
"""Elements up to which torch copies in the calling thread (its GRAIN_SIZE)."""
_MIN_RUN_NBYTES: Final = 64
_ALONE_NBYTES: Final = 12 * 2**20
"""Bytes up to which this thread moves them alone: to wake torch's others, on cores that a server is using, can take a
time slice, which is longer.
"""
_LONG_RUN_NBYTES: Final = 4096
"""Pieces from which one call each is worth it."""

_AXES = ((KV, "planes"), (LAYER, "layers"), (HIDDEN, "elements per token and layer"))


def check_kv(kv: object, layout: KVLayout, num_tokens: int) -> torch.Tensor:
    """Checks everything about a tensor that is to be stored, before anything is sent.

    Args:
        kv: what the user gave: `[planes, layers, num_tokens, hidden_dim]` on any device.
        layout: what the cache holds.
        num_tokens: how many token ids were given with it.

    Returns:
        The tensor itself, detached from autograd; no copy.

    Raises:
        ArgumentTypeError: not a tensor with data of its own in the usual strided form.
        ShapeMismatchError: another shape or dtype than the cache's.
    """
    if not isinstance(kv, torch.Tensor):
        hint = "; torch.from_numpy(...) makes one" if type(kv).__module__ == "numpy" else ""
        raise ArgumentTypeError(f"kv: expected a torch.Tensor, got {type(kv).__name__}{hint}")
    _check_has_data(kv, "kv")
    expected = (layout.planes, layout.num_layers, num_tokens, layout.hidden_dim)
    if kv.dtype != layout.dtype:
        raise _mismatch(kv, expected, layout, _dtype_advice(kv.dtype, layout.dtype))
    if kv.dim() != OBJECT_RANK:
        raise _mismatch(kv, expected, layout, _rank_advice(kv, layout))
    for axis, name in _AXES:
        if kv.size(axis) != expected[axis]:
            raise _mismatch(kv, expected, layout, f"the cache has {expected[axis]} {name}, this tensor {kv.size(axis)}")
    if kv.size(TOKEN) != num_tokens:
        raise _mismatch(
            kv, expected, layout, f"one row per token id is needed: {num_tokens} ids, {kv.size(TOKEN)} rows"
        )
    return kv.detach()


def pack_chunk(kv: torch.Tensor, chunk_index: int, chunk_size: int, out: torch.Tensor) -> None:
    """Copies one chunk of a checked tensor into a slot, `[kv, layer, token, hidden]` or `[layer, token, hidden]`."""
    source = kv.detach().narrow(TOKEN, chunk_index * chunk_size, chunk_size)
    if out.dim() == OBJECT_RANK - 1 and source.size(KV) == 1:
        source = source.select(KV, 0)
    _copy(source, out)


def pack(kv: torch.Tensor, first_chunk: int, out: torch.Tensor) -> None:
    """Copies consecutive chunks of a checked tensor into a run of slots `[chunk, kv, layer, token, hidden]`."""
    _copy(_in_chunks(kv.detach(), first_chunk, out.size(0), out.size(1 + TOKEN)), out)


def unpack(runs: Sequence[torch.Tensor], out: torch.Tensor, first_chunk: int) -> None:
    """Copies runs of consecutive chunks `[chunk, kv, layer, token, hidden]` into a `[kv, layer, token, hidden]`."""
    for run in runs:
        _copy(run, _in_chunks(out, first_chunk, run.size(0), run.size(1 + TOKEN)))
        first_chunk += run.size(0)


def _in_chunks(kv: torch.Tensor, first_chunk: int, num_chunks: int, chunk_size: int) -> torch.Tensor:
    """A view `[chunk, kv, layer, token, hidden]` of some chunks of a tensor `[kv, layer, token, hidden]`."""
    tokens = kv.narrow(TOKEN, first_chunk * chunk_size, num_chunks * chunk_size)
    planes, layers, _, hidden = kv.shape
    return tokens.view(planes, layers, num_chunks, chunk_size, hidden).movedim(TOKEN, 0)


def new_result(
    chunk_shape: Sequence[int], num_chunks: int, dtype: torch.dtype, buffer: memoryview | None = None
) -> torch.Tensor:
    """An uninitialised contiguous CPU tensor for that many chunks side by side along their tokens, on `buffer` if one
    of exactly its bytes is given.
    """
    shape = list(chunk_shape)
    shape[TOKEN] *= num_chunks
    if buffer is not None:
        return tensor_on(buffer, dtype, shape)
    return torch.empty(shape, dtype=dtype, device="cpu")


def check_out(out: object, layout: KVLayout, num_tokens: int) -> torch.Tensor:
    """Checks a tensor that a result is to be written into, as `check_kv` does one that is stored; no two of its
    elements may share memory.
    """
    if not isinstance(out, torch.Tensor):
        raise ArgumentTypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    _check_has_data(out, "out")
    shape = (layout.planes, layout.num_layers, num_tokens, layout.hidden_dim)
    expected = f"{list(shape)} {layout.dtype}"
    found = f"{list(out.shape)} {out.dtype}"
    if found != expected:
        problem = f"out: expected {expected} ([planes, layers, tokens, hidden], one row per token id), got {found}"
    elif not _elements_apart(out):
        problem = f"out: elements share memory (strides {list(out.stride())}); pass one of its own, as of torch.empty"
    else:
        return out.detach()
    raise ShapeMismatchError(problem, expected=expected, found=found, fate=Fate.NOT_SENT)


def _elements_apart(tensor: torch.Tensor) -> bool:
    """Whether each axis, smallest step first, steps over everything that the axes before it reach."""
    if not tensor.numel():
        return True
    reach = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step < reach:
                return False
            reach += step * (size - 1)
    return True


def _copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Moves bytes: much of them with torch and all cores, a little in this thread alone, piece by piece.

    In a forked child torch's threads exist in the parent only: a kernel that asks for them waits for ever, and the
    first one of a thread can find the pool of threads in pieces; so as little of torch as can be.
    """
    # copy_ would broadcast another shape and convert another dtype, and say nothing
    if source.shape != out.shape or source.dtype != out.dtype:
        expected, found = (f"{list(each.shape)} {each.dtype}" for each in (out, source))
        raise ShapeMismatchError(f"expected {expected}, found {found}", expected=expected, found=found)
    in_child = os.getpid() != _PID
    nbytes = source.numel() * itemsize(source.dtype)
    if not in_child and nbytes > _ALONE_NBYTES:
        out.copy_(source)
        return
    run, axes = _run_of(source, out)
    if run < (_MIN_RUN_NBYTES if in_child else _LONG_RUN_NBYTES):
        if in_child:
            _copy_in_pieces(source, out)
        else:
            out.copy_(source)
        return
    for to, of in _places(source, out, axes):
        ctypes.memmove(to, of, run)
    if not out.is_inference():
        out.narrow(0, 0, 0).zero_()  # writes nothing; autograd counts it, as it would copy_


def _run_of(source: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
    """How many bytes lie in one piece in both tensors, and how many leading axes stand before them; (0, 0) where bytes
    cannot be moved without torch.
    """
    tensors = (source, out)
    if any(each.is_neg() or each.device.type != "cpu" or not _address(each) for each in tensors):
        return 0, 0
    axis, run = source.dim(), 1
    while axis and all(each.size(axis - 1) == 1 or each.stride(axis - 1) == run for each in tensors):
        axis -= 1
        run *= source.size(axis)
    return run * itemsize(source.dtype), axis


def _address(tensor: torch.Tensor) -> int:
    """Where its first element is; 0 of one that has no memory: a wrapper around others, zeros that nobody has made."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _places(source: torch.Tensor, out: torch.Tensor, axes: int) -> list[tuple[int, int]]:
    """The addresses in both tensors of every piece."""
    places = [(out.data_ptr(), source.data_ptr())] if source.numel() else []
    for outer in range(axes):
        steps = [each.stride(outer) * itemsize(each.dtype) for each in (out, source)]
        places = [(to + i * steps[0], of + i * steps[1]) for to, of in places for i in range(source.size(outer))]
    return places


def _copy_in_pieces(source: torch.Tensor, out: torch.Tensor) -> None:
    """As little of torch's kernels as can be: up to so many elements they ask no other thread for help."""
    if source.numel() <= _SERIAL_ELEMENTS:
        out.copy_(source)
        return
    axis = max(range(source.dim()), key=source.size)
    half = source.size(axis) // 2
    for start, length in ((0, half), (half, source.size(axis) - half)):
        _copy_in_pieces(source.narrow(axis, start, length), out.narrow(axis, start, length))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU copy that nobody else has."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    _copy(tensor.detach(), copy)
    return copy


def _check_has_data(kv: torch.Tensor, name: str) -> None:
    if kv.is_nested or kv.layout != torch.strided:
        raise ArgumentTypeError(
            f"{name}: a {'nested' if kv.is_nested else kv.layout} tensor is not taken; make it dense first"
        )
    if kv.device.type == "meta":
        raise ArgumentTypeError(f"{name}: a tensor on the meta device has no data")
    if kv.device.type == "cpu" and kv.numel() and not _address(kv):
        raise ArgumentTypeError(f"{name}: this {type(kv).__name__} has no memory of its own; pass a plain tensor")
    if kv.device.type != "cpu" and kv.numel():
        try:
            kv.detach()[(slice(0, 1),) * kv.dim()].to("cpu")
        except (RuntimeError, NotImplementedError) as error:
            raise ArgumentTypeError(f"{name}: a tensor on {kv.device} cannot be copied to the CPU") from error


def _mismatch(kv: torch.Tensor, shape: Sequence[int], layout: KVLayout, advice: str) -> ShapeMismatchError:
    expected, found = f"{list(shape)} {layout.dtype}", f"{list(kv.shape)} {kv.dtype}"
    message = f"kv: expected {expected} ([planes, layers, tokens, hidden]), got {found}: {advice}"
    return ShapeMismatchError(message, expected=expected, found=found, fate=Fate.NOT_SENT)


def _dtype_advice(found: torch.dtype, expected: torch.dtype) -> str:
    if found.is_floating_point and expected.is_floating_point and itemsize(found) >= itemsize(expected):
        return f"convert with kv.to({expected}) if the values are meant"
    if itemsize(found) == itemsize(expected):
        return f"reinterpret with kv.view({expected}) if these are the cache's bytes"
    return "the cache's dtype is not converted to"


def _rank_advice(kv: torch.Tensor, layout: KVLayout) -> str:
    if layout.one_plane and kv.dim() == OBJECT_RANK - 1:
        return "add the axis of the one plane with kv.unsqueeze(0)"
    if kv.dim() == OBJECT_RANK + 1:
        return "join heads and head size with kv.flatten(-2)"
    return f"four axes are needed, not {kv.dim()}"
