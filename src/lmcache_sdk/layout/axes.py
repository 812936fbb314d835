"""Axes by name: those of an object `[kv, layer, token, hidden]`, and those of the engines' own tensors.

The only place where an axis is a number. What an engine's format says about a stored object is in FORMATS; the name of
a format is its template: split at `_X_`, every part but the last is a level of nesting, the last lists the axes of one
tensor (LAYOUT.md section 2, read from the servers 0.5.0 to 0.5.7rc2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import torch

from lmcache_sdk.errors import UnknownLayoutError

KV: Final = 0
"""Keys, then values; of length 1 when an object has one plane (MLA, fused)."""
LAYER: Final = 1
TOKEN: Final = 2
HIDDEN: Final = 3
"""Head-major: element `head * head_dim + d`."""
OBJECT_RANK: Final = 4

LITERALS: Final[Mapping[str, int]] = MappingProxyType({"ONE": 1, "TWO": 2})
"""Axes whose length is their name."""
_SLOT: Final = ("BS", "NBBS")
_HEAD: Final = ("NH",)
_WIDTH: Final = ("HS", "CS")
_MAX_SHOWN: Final = 60


@attrs.frozen
class EngineFormat:
    """How an engine lays out its cache, and what the server makes of it."""

    name: str
    planes: int | None
    """None when it depends on the release: the entry's bytes tell."""
    is_mla: bool = False
    is_fused: bool = False

    @property
    def levels(self) -> tuple[str, ...]:
        """Labels of the lists around a tensor, outermost first."""
        return tuple(self.name.split("_X_")[:-1])

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the axes of one tensor, in order."""
        return tuple(self.name.split("_X_")[-1].split("_"))

    @property
    def has_blocks(self) -> bool:
        """Whether the tensor has an axis of slots in a block."""
        return "BS" in self.labels

    @property
    def is_opaque(self) -> bool:
        """Whether a row is packed data without a head axis or width of its own, known by its bytes only."""
        return _find(self.labels, _WIDTH) is None


def _formats(*formats: EngineFormat) -> Mapping[str, EngineFormat]:
    return MappingProxyType({item.name: item for item in formats})


FORMATS: Final = _formats(
    # The order is that of the server's enumeration; LAYOUT.md section 2 has the release that brought each.
    EngineFormat("NB_NL_TWO_BS_NH_HS", 2),  # cross-layer: no release registers it
    EngineFormat("NL_X_TWO_NB_BS_NH_HS", 2),
    EngineFormat("NL_X_NB_TWO_BS_NH_HS", 2),
    EngineFormat("NL_X_NB_BS_HS", 1, is_mla=True),
    EngineFormat("TWO_X_NL_X_NBBS_NH_HS", 2),  # no block axis: no release registers it
    EngineFormat("NL_X_NBBS_ONE_HS", 1, is_mla=True),  # the same
    EngineFormat("NL_X_TWO_NB_NH_BS_HS", 2),
    EngineFormat("NL_X_NB_TWO_NH_BS_HS", 2),
    EngineFormat("NB_NL_TWO_NH_BS_HS", 2),  # cross-layer
    EngineFormat("TWO_X_NL_X_NB_BS_NH_HS", 2),
    EngineFormat("NL_X_NB_NH_BS_TWO_HS", None),  # two planes in 0.5.0 and 0.5.1, fused in 0.5.2; not printed later
    EngineFormat("NL_X_NB_BS_NH_TWO_HS", None),  # the same
    EngineFormat("NL_X_NB_NH_BS_CS", 1, is_fused=True),
    EngineFormat("NL_X_NB_BS_NH_CS", 1, is_fused=True),
    EngineFormat("NL_X_NB_BSV_BSS", 1, is_mla=True),  # opaque rows of values and scales
    EngineFormat("NL_X_TWO_NB_NH_ONE_BS_HS", 2),
    EngineFormat("NL_X_TWO_X_NB_BS_NH_HS", 2),
    EngineFormat("NL_X_NP_X_NB_BS_ONE_HS", 1, is_mla=True),  # HS is the sum over the planes
    EngineFormat("NL_X_NB_BS_NH_HS", 1),  # each entry is one K or one V tensor
    EngineFormat("NL_X_NB_TWO_NH_ONE_BS_HS", 2),
)


def format_named(name: str) -> EngineFormat:
    """The format of that name; raises UnknownLayoutError for any other."""
    found = FORMATS.get(name)
    if found is None:
        raise UnknownLayoutError(f"unknown engine format {name[:_MAX_SHOWN]!r}")
    return found


def num_heads(tensor: torch.Tensor, labels: Sequence[str]) -> int:
    """The length of the head axis of an engine's tensor; 1 when it has none (MLA)."""
    position = _find(labels, _HEAD)
    return 1 if position is None else tensor.size(position)


def block_in_object_order(tensor: torch.Tensor, labels: Sequence[str]) -> torch.Tensor:
    """One layer of one block of an engine's tensor as an object holds one of its planes: `[slot, hidden]`.

    This is the server's own gathering done on a view: pick the block, the layer and the plane, put slots first, then
    flatten heads and head size. On a meta tensor it costs nothing and finds the sizes of any axis order.
    """
    kept = [position for names in (_SLOT, _HEAD, _WIDTH) if (position := _find(labels, names)) is not None]
    for position in sorted(set(range(len(labels))) - set(kept), reverse=True):
        tensor = tensor.select(position, 0)
        kept = [at - 1 if at > position else at for at in kept]
    return tensor.permute(kept).flatten(1)


def _find(labels: Sequence[str], names: Sequence[str]) -> int | None:
    return next((position for position, label in enumerate(labels) if label in names), None)
