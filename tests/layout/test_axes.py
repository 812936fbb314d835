from __future__ import annotations

import pytest
import torch

from lmcache_sdk.errors import UnknownLayoutError
from lmcache_sdk.layout.axes import FORMATS, block_in_object_order, format_named, num_heads

SIZES = {"NB": 7, "NL": 3, "TWO": 2, "ONE": 1, "BS": 4, "NH": 5, "HS": 6, "CS": 6, "NBBS": 28}


def test_there_are_the_twenty_formats_of_the_server() -> None:
    assert len(FORMATS) == 20
    assert all(name == each.name for name, each in FORMATS.items())


@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].is_opaque])
def test_a_block_in_object_order_is_slots_by_heads_by_width(name: str) -> None:
    """On real numbers: the element that stands for (slot, head, d) is the one the engine's own axes name."""
    labels = format_named(name).labels
    tensor = torch.arange(torch.Size([SIZES[label] for label in labels]).numel()).view(
        [SIZES[label] for label in labels]
    )
    block = block_in_object_order(tensor, labels)
    heads, width = num_heads(tensor, labels), SIZES["HS"]
    slot_label = "BS" if "BS" in labels else "NBBS"
    assert list(block.shape) == [SIZES[slot_label], heads * width]
    assert heads == (5 if "NH" in labels else 1)
    for slot, head, d in ((0, 0, 0), (1, heads - 1, 2), (SIZES[slot_label] - 1, heads - 1, width - 1)):
        at = {slot_label: slot, "NH": head, "HS": d, "CS": d}
        assert block[slot, head * width + d] == tensor[tuple(at.get(label, 0) for label in labels)]


def test_levels_and_labels_come_from_the_name() -> None:
    found = format_named("NL_X_TWO_X_NB_BS_NH_HS")
    assert found.levels == ("NL", "TWO")
    assert found.labels == ("NB", "BS", "NH", "HS")


def test_other_names_are_refused_in_few_words() -> None:
    with pytest.raises(UnknownLayoutError) as caught:
        format_named("X" * 10_000)
    assert len(str(caught.value)) < 200
