"""KVLayout: the numbers of a cache, validated once, when made.

Objects are `[kv, layer, token, hidden]`, one per chunk of tokens: `kv` is keys then values, or of length 1 when an
object has one plane (MLA, fused); `hidden` is head-major. Whoever receives a KVLayout does not check it again. It
comes from the user, from an entry of /status, or from an object that was retrieved; the server's numbers are only
needed to store (objects describe themselves).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import torch

from lmcache_sdk.errors import ArgumentTypeError, RemoteProtocolError, UnknownLayoutError, UnsupportedError, UsageError
from lmcache_sdk.layout.axes import HIDDEN, KV, LAYER, OBJECT_RANK, TOKEN
from lmcache_sdk.layout.dtypes import dtype_name, itemsize
from lmcache_sdk.layout.entries import MAX_SIZE, numbers_of_document
from lmcache_sdk.protocol import KVCacheLayoutDocument, parse_layout

_PATH: Final = "kv_cache_layout"


def _default_hidden_dim(layout: KVLayout) -> int:
    heads = 1 if layout.is_mla else layout.num_kv_heads
    if heads is None or layout.head_dim is None:
        raise UsageError("a layout needs num_kv_heads and head_dim, or hidden_dim (MLA: head_dim or hidden_dim)")
    _check_size("num_kv_heads", heads)
    _check_size("head_dim", layout.head_dim)
    return heads * layout.head_dim * (2 if layout.is_fused else 1)


def _default_planes(layout: KVLayout) -> int:
    return 1 if layout.is_mla or layout.is_fused else 2


def _default_slots(layout: KVLayout) -> int:
    return layout.tokens_per_block


@attrs.frozen(kw_only=True)
class KVLayout:
    """The geometry of one model's cache on one rank.

    Give `num_kv_heads` and `head_dim`, or `hidden_dim` alone when the heads do not matter. What follows from the rest
    is filled in. Two planes (keys, values) are the rule; MLA and fused caches have one.

    Attributes:
        num_layers: layers an object holds.
        dtype: element type, exactly the engine's.
        num_kv_heads: heads per layer; 1 for MLA; None when unknown.
        head_dim: size of one head (fused: of its key half); MLA: the whole width; None when unknown.
        is_mla: one latent vector per token instead of keys and values.
        is_fused: each head holds its key, then its value, in one plane.
        hidden_dim: elements per token, layer and plane.
        planes: 2 for keys and values, 1 when an object has a single plane.
        tokens_per_block: tokens in one block of the engine.
        slots_per_block: rows that a block takes for them; fewer when the engine compresses.
    """

    num_layers: int
    dtype: torch.dtype
    num_kv_heads: int | None = None
    head_dim: int | None = None
    is_mla: bool = False
    is_fused: bool = False
    hidden_dim: int = attrs.field(default=attrs.Factory(_default_hidden_dim, takes_self=True))
    planes: int = attrs.field(default=attrs.Factory(_default_planes, takes_self=True))
    tokens_per_block: int = 16
    slots_per_block: int = attrs.field(default=attrs.Factory(_default_slots, takes_self=True))

    def __attrs_post_init__(self) -> None:
        """Checks every number, then fills in the head numbers that follow from the others."""
        if not isinstance(self.dtype, torch.dtype):
            raise ArgumentTypeError(f"dtype: expected a torch.dtype such as torch.bfloat16, got {self.dtype!r}")
        dtype_name(self.dtype)
        for name in ("num_layers", "hidden_dim", "planes", "tokens_per_block", "slots_per_block"):
            _check_size(name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        for name in ("is_mla", "is_fused"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentTypeError(f"{name}: expected a bool, got {getattr(self, name)!r}")
        self._check_planes()
        heads, head_dim = self._complete_heads()
        object.__setattr__(self, "num_kv_heads", heads)
        object.__setattr__(self, "head_dim", head_dim)

    def _check_planes(self) -> None:
        if self.planes not in (1, 2):
            raise UsageError(f"planes: expected 1 or 2, got {self.planes}")
        if self.is_mla and self.is_fused:
            raise UsageError("is_mla and is_fused exclude each other: an MLA cache holds no keys and values to fuse")
        if self.planes == 2 and (self.is_mla or self.is_fused):
            raise UsageError(f"planes: {'an MLA' if self.is_mla else 'a fused'} cache has 1 plane, not 2")
        if self.slots_per_block > self.tokens_per_block:
            raise UsageError(
                f"slots_per_block: {self.slots_per_block} is more than tokens_per_block {self.tokens_per_block}"
            )

    def _complete_heads(self) -> tuple[int | None, int | None]:
        heads, head_dim = self.num_kv_heads, self.head_dim
        if self.is_mla:
            heads, head_dim = heads or 1, head_dim or self.hidden_dim
            if heads != 1:
                raise UsageError(f"num_kv_heads: an MLA cache has one latent head, not {heads}")
        width = self.hidden_dim // 2 if self.is_fused else self.hidden_dim
        if heads is None and head_dim is not None:
            heads = width // head_dim
        elif head_dim is None and heads is not None:
            head_dim = width // heads
        if (
            heads is not None
            and head_dim is not None
            and heads * head_dim * (2 if self.is_fused else 1) != self.hidden_dim
        ):
            twice = " x 2" if self.is_fused else ""
            raise UsageError(f"hidden_dim: {self.hidden_dim} is not {heads} heads x {head_dim}{twice}")
        return heads, head_dim

    @classmethod
    def from_status(cls, entry: Mapping[str, object]) -> KVLayout:
        """Decodes what a server publishes about an engine's cache.

        Args:
            entry: one value of `cache_context_meta` in the JSON of GET /status.

        Returns:
            The layout; `num_kv_heads` and `head_dim` are None when the entry does not tell them (fused caches).

        Raises:
            RemoteProtocolError: the entry is malformed or contradicts itself; `.path` names the field.
            UnknownLayoutError: an engine format or dtype that this library does not know.
            UnsupportedError: several kernel groups (hybrid models).
        """
        given: object = entry
        layout = given.get(_PATH) if isinstance(given, Mapping) else None
        if not isinstance(layout, Mapping):
            raise RemoteProtocolError(f"{_PATH}: expected an entry of cache_context_meta with this object", path=_PATH)
        return layout_from_document(parse_layout(dict(layout), _PATH), _PATH)

    @property
    def one_plane(self) -> bool:
        """Whether an object has a single plane; it travels as `[layer, token, hidden]` (`use_mla` on the wire)."""
        return self.planes == 1

    def slots_per_chunk(self, chunk_size: int) -> int:
        """Rows that the tokens of one chunk take: `chunk_size`, or fewer when the engine compresses."""
        slots, rest = divmod(chunk_size * self.slots_per_block, self.tokens_per_block)
        if rest or slots < 1:
            blocks = f"blocks of {self.slots_per_block} slots for {self.tokens_per_block} tokens"
            raise UnsupportedError(
                f"a chunk of {chunk_size} tokens does not consist of whole slots: {blocks}", request="layout"
            )
        return slots

    def chunk_shape(self, chunk_size: int) -> tuple[int, int, int, int]:
        """The shape of one object, `[kv, layer, token, hidden]`."""
        return (self.planes, self.num_layers, self.slots_per_chunk(chunk_size), self.hidden_dim)

    def chunk_nbytes(self, chunk_size: int) -> int:
        """Bytes of one object."""
        return self.planes * self.num_layers * self.slots_per_chunk(chunk_size) * self.hidden_dim * itemsize(self.dtype)

    def describe(self) -> str:
        """The layout in a few words, for messages."""
        kind = "MLA" if self.is_mla else "fused" if self.is_fused else f"{self.planes} plane{'s' * (self.planes - 1)}"
        heads = f" ({self.num_kv_heads} heads of {self.head_dim})" if self.num_kv_heads and not self.is_mla else ""
        packed = (
            "" if self.slots_per_block == self.tokens_per_block else f", {self.slots_per_block}:{self.tokens_per_block}"
        )
        return f"{kind}, {self.num_layers} layers, width {self.hidden_dim}{heads}, {dtype_name(self.dtype)}{packed}"


def layout_from_document(document: KVCacheLayoutDocument, path: str) -> KVLayout:
    """Decodes one `kv_cache_layout`; `path` says where it stood. Raises what `KVLayout.from_status` raises."""
    numbers = numbers_of_document(document, path)
    try:
        return KVLayout(**attrs.asdict(numbers, recurse=False))
    except UsageError as error:
        raise RemoteProtocolError(f"{path}: {error}", path=path) from error


def check_uncompressed(layout: KVLayout) -> None:
    """Refuses a cache whose blocks hold fewer rows than tokens: nothing here can slice its chunks by token."""
    if layout.slots_per_block != layout.tokens_per_block:
        raise UnsupportedError(
            f"a compressed cache is not supported: {layout.slots_per_block} slots for {layout.tokens_per_block} tokens",
            request="layout",
        )


def layout_from_object(shape: Sequence[int], dtype: torch.dtype, chunk_size: int) -> KVLayout:
    """The layout learned from the shape of a stored object, `[kv, layer, token, hidden]` or `[layer, token, hidden]`.

    Heads stay unknown, and whether one plane is MLA or fused: storing needs neither.
    """
    sizes = (1, *shape) if len(shape) == OBJECT_RANK - 1 else tuple(shape)
    if len(sizes) != OBJECT_RANK or sizes[KV] not in (1, 2):
        raise UnknownLayoutError(
            f"an object of shape {list(shape)} is not [kv, layer, token, hidden] with 1 or 2 planes"
        )
    if sizes[TOKEN] != chunk_size:
        raise UnsupportedError(
            f"an object of {sizes[TOKEN]} slots for a chunk of {chunk_size} tokens", request="layout"
        )
    return KVLayout(num_layers=sizes[LAYER], dtype=dtype, hidden_dim=sizes[HIDDEN], planes=sizes[KV])


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r}")
    if not 1 <= value <= MAX_SIZE:
        raise UsageError(f"{name}: expected 1 to {MAX_SIZE}, got {value if abs(value) < 2**64 else 'more'}")
