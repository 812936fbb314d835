"""One `kv_cache_layout` of /status -> the numbers of its objects, without allocating.

Takes the document, returns `EntryNumbers`. Whatever does not add up is a `RemoteProtocolError` with the path of the
field; a format or dtype that we do not know is an `UnknownLayoutError`; several kernel groups are an
`UnsupportedError`. Every number is bounded before it is computed with. Storing with guessed numbers would poison the
engine's cache (LAYOUT.md rule 5), so nothing here guesses: an entry that fits two readings is refused.
"""

from __future__ import annotations

import math
import re
from typing import Final

import attrs
import torch

from lmcache_sdk.errors import RemoteProtocolError, UnknownLayoutError, UnsupportedError
from lmcache_sdk.layout.axes import LITERALS, EngineFormat, block_in_object_order, format_named, num_heads
from lmcache_sdk.layout.dtypes import dtype_from_name, itemsize
from lmcache_sdk.protocol import KernelGroupDocument, KVCacheLayoutDocument

MAX_SIZE: Final = 2**31 - 1
"""Bounds every layer count, width and block size."""
_MAX_NBYTES: Final = 2**60
_MAX_GROUPS_SHOWN: Final = 8
_MAX_SHAPE_TEXT: Final = 200
_SHAPE: Final = re.compile(r"((?:(?:[0-9]{1,10}|NP) x ){0,2})\[([0-9]{1,10}(?:, [0-9]{1,10}){0,15})\]", re.ASCII)
_UNKNOWN: Final = re.compile(r"Unknown \([\w.]{1,80}\)", re.ASCII)


@attrs.frozen(kw_only=True)
class EntryNumbers:
    """What one kernel group's objects are made of; None where the entry does not tell."""

    num_layers: int
    dtype: torch.dtype
    planes: int
    num_kv_heads: int | None
    head_dim: int | None
    hidden_dim: int
    tokens_per_block: int
    slots_per_block: int
    is_mla: bool
    is_fused: bool


@attrs.frozen(eq=False, repr=False)
class _Group:
    """A kernel group whose numbers are in bounds, and what the rest of the entry says about it."""

    document: KernelGroupDocument
    engine: EngineFormat
    dtype: torch.dtype
    row_elements: int | None
    """Elements of one slot and layer, all planes, by cache_size_per_token; None when that is not a whole number."""
    path: str
    bytes_path: str


def numbers_of_document(document: KVCacheLayoutDocument, path: str) -> EntryNumbers:
    """The numbers of a layout of one kernel group; `path` says where it stood."""
    if len(document.kernel_groups) != 1:
        raise UnsupportedError(_several_groups(document, path), request="layout")
    group = _checked_group(document, path)
    text = group.document.engine_kv_concrete_shape
    if len(text) <= _MAX_SHAPE_TEXT:
        printed = _SHAPE.fullmatch(text)
        if _UNKNOWN.fullmatch(text) or (printed and group.engine.is_opaque):
            return _numbers_by_bytes(group)
        if printed:
            return _numbers_by_shape(group, _checked_sizes(group, printed.group(1), printed.group(2)))
    raise _wrong(group, "engine_kv_concrete_shape", f"not a shape: {text[:_MAX_SHAPE_TEXT]!r}")


def _several_groups(document: KVCacheLayoutDocument, path: str) -> str:
    shown = [
        f"[{index}] {group.num_layers} layers of {group.dtype[:40]}, {group.engine_kv_format[:40]}, "
        f"object group {group.object_group_idx}"
        for index, group in enumerate(document.kernel_groups[:_MAX_GROUPS_SHOWN])
    ]
    more = len(document.kernel_groups) - len(shown)
    listed = "; ".join(shown) + (f"; and {more} more" if more > 0 else "")
    return f"{path}.kernel_groups: a cache of {len(document.kernel_groups)} kernel groups is not supported: {listed}"


def _checked_group(document: KVCacheLayoutDocument, path: str) -> _Group:
    group, where = document.kernel_groups[0], f"{path}.kernel_groups[0]"
    for name in ("num_layers", "tokens_per_block", "slots_per_block"):
        _check_size(getattr(group, name), f"{where}.{name}", MAX_SIZE)
    _check_size(document.cache_size_per_token, f"{path}.cache_size_per_token", _MAX_NBYTES)
    try:
        dtype = dtype_from_name(group.dtype.removeprefix("torch."))
    except UnknownLayoutError as error:
        raise UnknownLayoutError(f"{where}.dtype: {error}") from error
    try:
        engine = format_named(group.engine_kv_format)
    except UnknownLayoutError as error:
        raise UnknownLayoutError(f"{where}.engine_kv_format: {error}") from error
    if group.is_mla and not engine.is_mla:
        raise RemoteProtocolError(f"{where}.is_mla: true, but {engine.name} is not MLA", path=f"{where}.is_mla")
    # a token has slots/tokens of a slot, so a slot has tokens/slots of cache_size_per_token
    slots = group.slots_per_block * group.num_layers * itemsize(dtype)
    elements, rest = divmod(document.cache_size_per_token * group.tokens_per_block, slots)
    return _Group(group, engine, dtype, None if rest else elements, where, f"{path}.cache_size_per_token")


def _check_size(value: int, path: str, high: int) -> None:
    if not 1 <= value <= high:
        raise RemoteProtocolError(
            f"{path}: expected 1 to {high}, got {value if abs(value) < 2**64 else 'more'}", path=path
        )


def _wrong(group: _Group, field: str, problem: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{group.path}.{field}: {problem}", path=f"{group.path}.{field}")


def _checked_sizes(group: _Group, outer: str, inner: str) -> list[int]:
    """The sizes of one tensor's axes, after the levels around it and the literal axes were compared with the format."""
    field, levels = "engine_kv_concrete_shape", outer.split(" x ")[:-1]
    expected = {
        "NL": str(group.document.num_layers),
        "NP": "NP",
        **{name: str(size) for name, size in LITERALS.items()},
    }
    if levels != [expected[level] for level in group.engine.levels]:
        raise _wrong(group, field, f"{outer + '[...]'!r} does not fit {group.engine.name} of {expected['NL']} layers")
    sizes, labels = [int(size) for size in inner.split(", ")], group.engine.labels
    if len(sizes) != len(labels):
        raise _wrong(group, field, f"[{inner}] has {len(sizes)} axes, {group.engine.name} has {len(labels)}")
    for label, size in zip(labels, sizes, strict=True):
        fixed = group.document.num_layers if label == "NL" else LITERALS.get(label, size)
        if not 1 <= size <= MAX_SIZE or size != fixed:
            raise _wrong(group, field, f"axis {label} of {group.engine.name} cannot have length {size}")
    if math.prod(sizes) > _MAX_NBYTES // itemsize(group.dtype):
        raise _wrong(group, field, f"[{inner}] is larger than any memory")
    return sizes


def _numbers_by_shape(group: _Group, sizes: list[int]) -> EntryNumbers:
    """Decodes on a meta tensor: axes by name, no allocation."""
    tensor = torch.empty(sizes, dtype=group.dtype, device="meta")
    block = block_in_object_order(tensor, group.engine.labels)
    slots, hidden_dim = block.size(0), block.size(1)
    if group.engine.has_blocks and slots != group.document.slots_per_block:
        said = group.document.slots_per_block
        raise _wrong(group, "slots_per_block", f"{said}, but the shape has blocks of {slots}")
    if hidden_dim > MAX_SIZE:
        raise _wrong(group, "engine_kv_concrete_shape", f"heads of {hidden_dim} elements together")
    heads = num_heads(tensor, group.engine.labels)
    planes, is_fused = _planes_of(group, hidden_dim)
    width = hidden_dim // heads
    if is_fused and width % 2:
        raise _wrong(
            group, "engine_kv_concrete_shape", f"a fused head of odd width {width} has no key and value halves"
        )
    return _numbers(group, planes, is_fused, heads, width // 2 if is_fused else width, hidden_dim)


def _planes_of(group: _Group, hidden_dim: int) -> tuple[int, bool]:
    """The planes of an object, and whether they are fused into one.

    `*_TWO_HS` means two planes in 0.5.0 and 0.5.1 and one fused plane, its doubled width printed, in 0.5.2: one name
    for two readings. The bytes of a token tell them apart (PROTOCOL.md section 13).
    """
    if group.engine.planes is not None:
        return group.engine.planes, group.engine.is_fused
    if group.row_elements == hidden_dim:
        return 1, True
    if group.row_elements == 2 * hidden_dim:
        return 2, False
    raise UnknownLayoutError(
        f"{group.path}.engine_kv_format: cache_size_per_token makes {group.engine.name} neither fused nor two planes: "
        f"{group.row_elements} elements a slot and layer, {hidden_dim} in the shape"
    )


def _numbers_by_bytes(group: _Group) -> EntryNumbers:
    """For shapes printed as "Unknown": exact for a single kernel group, but heads and head size stay unknown."""
    planes = group.engine.planes
    if planes is None:
        raise UnknownLayoutError(
            f"{group.path}: the shape of {group.engine.name} is not printed, so its planes are not known"
        )
    if not group.row_elements or group.row_elements % planes or group.row_elements // planes > MAX_SIZE:
        problem = f"not that of {planes} planes of {group.document.num_layers} layers in whole {group.dtype} elements"
        raise RemoteProtocolError(f"{group.bytes_path}: {problem}", path=group.bytes_path)
    hidden_dim = group.row_elements // planes
    heads, head_dim = (1, hidden_dim) if group.engine.is_mla else (None, None)
    return _numbers(group, planes, group.engine.is_fused, heads, head_dim, hidden_dim)


def _numbers(
    group: _Group, planes: int, is_fused: bool, heads: int | None, head_dim: int | None, hidden_dim: int
) -> EntryNumbers:
    return EntryNumbers(
        num_layers=group.document.num_layers,
        dtype=group.dtype,
        planes=planes,
        num_kv_heads=heads,
        head_dim=head_dim,
        hidden_dim=hidden_dim,
        tokens_per_block=group.document.tokens_per_block,
        slots_per_block=group.document.slots_per_block,
        is_mla=group.engine.is_mla,
        is_fused=is_fused,
    )
