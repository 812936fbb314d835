"""An engine that is only played: its entry in /status, and its layout for LOOKUP. It holds no KV cache.

`PlayedEngine` gives the entry that a server of the release would show for such an engine (LAYOUT.md section 2, the
golden layouts). Fused layouts are shown in three ways: two planes in 0.5.0 and 0.5.1, one plane with a doubled last
axis in 0.5.2, and a format whose shape the server cannot print, "Unknown (...)", from 0.5.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import attrs
import torch

from lmcache_sdk.devserver.behaviours import Behaviour
from lmcache_sdk.devserver.objects import StoredShape
from lmcache_sdk.devserver.registry import LayoutName
from lmcache_sdk.errors import UsageError
from lmcache_sdk.layout import KVLayout, dtype_name
from lmcache_sdk.protocol import JsonObject

Form = Literal["HND", "NHD", "FLASH", "MLA", "FUSED"]

_FORMATS: Final[Mapping[str, tuple[str, str]]] = {
    "HND": ("NL_X_NB_TWO_NH_BS_HS", "vLLM non-MLA flash infer (HND layout)"),
    "NHD": ("NL_X_NB_TWO_BS_NH_HS", "vLLM non-MLA flash infer"),
    "FLASH": ("NL_X_TWO_NB_BS_NH_HS", "vLLM non-MLA flash attention"),
    "MLA": ("NL_X_NB_BS_HS", "vLLM MLA"),
    "FUSED": ("NL_X_NB_NH_BS_TWO_HS", "vLLM non-MLA blocks-first, fused K/V"),
}
"""The format's name, which is its template too, and the backend that the entry names."""
_UNPRINTABLE: Final = ("NL_X_NB_NH_BS_CS", "vLLM non-MLA blocks-first, fused K/V (HND)")
_UNPRINTABLE_NUMBER: Final = 12


@attrs.frozen(kw_only=True)
class PlayedEngine:
    """The numbers of one engine's paged cache. `status_entry` replaces the entry that is made from them."""

    model_name: str
    num_layers: int
    num_kv_heads: int = 1
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    form: Form = "NHD"
    tokens_per_block: int = 16
    num_blocks: int = 64
    world_size: int = 1
    status_entry: JsonObject | None = None

    def __attrs_post_init__(self) -> None:
        """Refuses numbers that no engine has."""
        numbers = (self.num_layers, self.num_kv_heads, self.head_dim, self.tokens_per_block, self.num_blocks)
        if min(*numbers, self.world_size) < 1:
            raise UsageError(f"an engine's numbers must be positive: {numbers}, world_size {self.world_size}")
        if self.form not in _FORMATS:
            raise UsageError(f"form must be one of {', '.join(_FORMATS)}, got {self.form!r}")
        if self.form == "MLA" and self.num_kv_heads != 1:
            raise UsageError("an MLA layout has one head")

    @classmethod
    def from_layout(cls, model_name: str, layout: KVLayout) -> PlayedEngine:
        """An engine whose objects have this layout."""
        if layout.num_kv_heads is None or layout.head_dim is None or layout.slots_per_block != layout.tokens_per_block:
            raise UsageError(f"a played engine needs heads and uncompressed blocks: {layout.describe()}")
        return cls(
            model_name=model_name,
            num_layers=layout.num_layers,
            num_kv_heads=1 if layout.is_mla else layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            form="MLA" if layout.is_mla else "FUSED" if layout.is_fused else "NHD",
            tokens_per_block=layout.tokens_per_block,
        )

    @classmethod
    def from_status(cls, entry: JsonObject) -> PlayedEngine:
        """An engine that shows `entry` as it stands, be it right or wrong; its own numbers mean nothing."""
        name, world_size = entry.get("model_name"), entry.get("world_size", 1)
        if not isinstance(name, str) or not isinstance(world_size, int):
            raise UsageError("a status entry names its model_name and world_size")
        return cls(model_name=name, num_layers=1, head_dim=1, world_size=world_size, status_entry=entry)

    @property
    def layout_name(self) -> LayoutName:
        """What its layout is counted under."""
        return self.model_name, self.world_size

    def stored_shape(self, behaviour: Behaviour, chunk_size: int) -> StoredShape:
        """What the objects it stores look like: `[kv, layer, token, hidden]`."""
        fused = self.form == "FUSED" and behaviour.fused_has_one_plane
        width = self.num_kv_heads * self.head_dim * (2 if fused else 1)
        return StoredShape((1 if fused or self.form == "MLA" else 2, self.num_layers, chunk_size, width), self.dtype)

    def entry(self, behaviour: Behaviour) -> JsonObject:
        """Its value in /status.cache_context_meta."""
        if self.status_entry is not None:
            return self.status_entry
        planes, layers, _, width = self.stored_shape(behaviour, self.tokens_per_block).shape
        layout = {
            "num_layers": self.num_layers,
            "num_blocks": self.num_blocks,
            "cache_size_per_token": planes * layers * width * self.dtype.itemsize,
            "kernel_groups": [self._kernel_group(behaviour)],
        }
        return {"model_name": self.model_name, "world_size": self.world_size, "kv_cache_layout": layout}

    def _kernel_group(self, behaviour: Behaviour) -> JsonObject:
        unprintable = self.form == "FUSED" and behaviour.fused_is_unprintable
        name, backend = _UNPRINTABLE if unprintable else _FORMATS[self.form]
        axes = name.split("_X_")[1].split("_")
        shape = f"{self.num_layers} x {self._sizes(axes, behaviour)}"
        if unprintable:
            shown = f"EngineKVFormat.{name}" if behaviour.names_unprintable else str(_UNPRINTABLE_NUMBER)
            shape = f"Unknown ({shown})"
        return {
            "kernel_group_idx": 0,
            "engine_group_idx": 0,
            "object_group_idx": 0,
            "num_layers": self.num_layers,
            "layer_indices": list(range(self.num_layers)),
            "tokens_per_block": self.tokens_per_block,
            "slots_per_block": self.tokens_per_block,
            "dtype": f"torch.{dtype_name(self.dtype)}",
            "engine_kv_concrete_shape": shape,
            "is_mla": self.form == "MLA",
            "engine_kv_format": name,
            "engine_kv_shape": f"NL x [{', '.join('2' if axis == 'TWO' else axis for axis in axes)}]",
            "attention_backend": backend,
        }

    def _sizes(self, axes: list[str], behaviour: Behaviour) -> list[int]:
        # 0.5.2 prints the head size doubled beside the literal 2 (LAYOUT.md section 2)
        doubled = self.form == "FUSED" and behaviour.fused_has_one_plane
        sizes = {
            "NB": self.num_blocks,
            "TWO": 2,
            "NH": self.num_kv_heads,
            "BS": self.tokens_per_block,
            "HS": self.head_dim * (2 if doubled else 1),
            "CS": 2 * self.head_dim,
        }
        return [sizes[axis] for axis in axes]
