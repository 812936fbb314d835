"""An engine that is only played: its entry in /status, and its layout for LOOKUP. It holds no KV cache.

`PlayedEngine` gives the entry that the release of the server would show for such an engine (LAYOUT.md section 2, the
golden layouts). Fused layouts are printed in three ways: two planes with a doubled last axis in 0.5.0 and 0.5.1, one
plane in 0.5.2, and a format that the server cannot spell, "Unknown (...)", from 0.5.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import attrs
import torch

from lmcache_sdk.devserver.objects import StoredShape
from lmcache_sdk.errors import UsageError
from lmcache_sdk.layout import dtype_from_name, dtype_name
from lmcache_sdk.protocol import JsonObject

Form = Literal["HND", "NHD", "FLASH", "MLA", "FUSED"]

_CS: Final = "NL_X_NB_NH_BS_CS"
_TWO_HS: Final = "NL_X_NB_NH_BS_TWO_HS"
_FORMATS: Final[Mapping[str, tuple[str, str]]] = {
    "HND": ("NL_X_NB_TWO_NH_BS_HS", "vLLM non-MLA flash infer (HND layout)"),
    "NHD": ("NL_X_NB_TWO_BS_NH_HS", "vLLM non-MLA flash infer"),
    "FLASH": ("NL_X_TWO_NB_BS_NH_HS", "vLLM non-MLA flash attention"),
    "MLA": ("NL_X_NB_BS_HS", "vLLM MLA"),
}


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
        if self.form == "MLA" and self.num_kv_heads != 1:
            raise UsageError("an MLA layout has one head")

    @classmethod
    def from_status(cls, entry: JsonObject) -> PlayedEngine:
        """An engine that shows `entry` as it stands; its own numbers are placeholders, used only to know the model."""
        name, world_size = entry.get("model_name"), entry.get("world_size", 1)
        if not isinstance(name, str) or not isinstance(world_size, int):
            raise UsageError("a status entry names its model_name and world_size")
        return cls(model_name=name, num_layers=1, head_dim=1, world_size=world_size, status_entry=entry)

    def planes(self, release: str) -> int:
        """How many planes its objects have on a server of this release."""
        if self.form == "FUSED":
            return 2 if release in ("0.5.0", "0.5.1") else 1
        return 1 if self.form == "MLA" else 2

    def stored_shape(self, release: str, chunk_size: int) -> StoredShape:
        """What the objects it stores look like."""
        planes = self.planes(release)
        width = self.num_kv_heads * self.head_dim * (2 if self.form == "FUSED" and planes == 1 else 1)
        return StoredShape((planes, self.num_layers, chunk_size, width), self.dtype)

    def entry(self, release: str) -> JsonObject:
        """Its value in /status.cache_context_meta."""
        if self.status_entry is not None:
            return self.status_entry
        name, backend = self._format(release)
        planes, _, _, width = self.stored_shape(release, self.tokens_per_block).shape
        layout = {
            "num_layers": self.num_layers,
            "num_blocks": self.num_blocks,
            "cache_size_per_token": planes * self.num_layers * width * self.dtype.itemsize,
            "kernel_groups": [self._kernel_group(name, backend, release)],
        }
        return {"model_name": self.model_name, "world_size": self.world_size, "kv_cache_layout": layout}

    def _format(self, release: str) -> tuple[str, str]:
        if self.form != "FUSED":
            return _FORMATS[self.form]
        old = release in ("0.5.0", "0.5.1", "0.5.2")
        return (_TWO_HS if old else _CS), "vLLM fused KV (HND layout)"

    def _kernel_group(self, name: str, backend: str, release: str) -> dict[str, object]:
        axes = name.split("_X_")[1].split("_")
        shape = f"{self.num_layers} x {self._sizes(axes, release)}"
        return {
            "kernel_group_idx": 0,
            "engine_group_idx": 0,
            "object_group_idx": 0,
            "num_layers": self.num_layers,
            "layer_indices": list(range(self.num_layers)),
            "tokens_per_block": self.tokens_per_block,
            "slots_per_block": self.tokens_per_block,
            "dtype": f"torch.{dtype_name(self.dtype)}",
            "engine_kv_concrete_shape": f"Unknown (EngineKVFormat.{name})" if name == _CS else shape,
            "is_mla": self.form == "MLA",
            "engine_kv_format": name,
            "engine_kv_shape": f"NL x [{', '.join('2' if axis == 'TWO' else axis for axis in axes)}]",
            "attention_backend": backend,
        }

    def _sizes(self, axes: Sequence[str], release: str) -> list[int]:
        # 0.5.2 prints the head size doubled beside the literal 2 (LAYOUT.md section 2).
        doubled = self.form == "FUSED" and self.planes(release) == 1
        sizes = {
            "NB": self.num_blocks,
            "TWO": 2,
            "NH": self.num_kv_heads,
            "BS": self.tokens_per_block,
            "HS": self.head_dim * (2 if doubled else 1),
            "CS": 2 * self.head_dim,
        }
        return [sizes[axis] for axis in axes]


def engine_of_names(dtype: str, **numbers: object) -> PlayedEngine:
    """A played engine whose dtype is given by name; UsageError for one there is not."""
    return PlayedEngine(dtype=dtype_from_name(dtype), **numbers)  # type: ignore[arg-type]  # checked by attrs' post init
