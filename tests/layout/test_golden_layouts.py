"""Every recorded /status entry through `KVLayout.from_status`, compared with the geometry that the server held."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_sdk.errors import UnsupportedError
from lmcache_sdk.layout import KVLayout, check_uncompressed, dtype_name, layout_from_object
from tests.layout.golden import groups_of, live_cases, status_cases

SINGLE = [pytest.param(case, id=name) for name, case in status_cases() if len(groups_of(case)) == 1]
SEVERAL = [pytest.param(case, id=name) for name, case in status_cases() if len(groups_of(case)) > 1]
LIVE_SINGLE = [pytest.param(case, id=name) for name, case in live_cases() if len(groups_of(case)) == 1]
LIVE_SEVERAL = [pytest.param(case, id=name) for name, case in live_cases() if len(groups_of(case)) > 1]


def test_golden_cases_are_there() -> None:
    assert len(SINGLE) >= 744
    assert len(SEVERAL) >= 80
    assert len(LIVE_SINGLE) >= 43
    assert len(LIVE_SEVERAL) >= 6


@pytest.mark.parametrize("case", SINGLE)
def test_golden_entry_is_decoded(case: dict[str, Any]) -> None:
    layout = KVLayout.from_status(case["status_entry"])
    expected = case["expected_kernel_groups"][0]
    assert layout.num_layers == expected["num_layers"]
    assert layout.planes == expected["kv_planes"]
    assert layout.hidden_dim == expected["hidden_dim"]
    assert dtype_name(layout.dtype) == expected["dtype"]
    assert layout.tokens_per_block == expected["tokens_per_block"]
    assert layout.slots_per_block == expected["slots_per_block"]
    assert layout.is_mla == groups_of(case)[0]["is_mla"]
    if expected["format"].endswith("_CS"):
        assert (layout.num_kv_heads, layout.head_dim, layout.is_fused) == (None, None, True)
    else:
        assert (layout.num_kv_heads, layout.head_dim) == (expected["num_heads"], expected["head_size"])
        assert not layout.is_fused
    region = case["chunk_objects(chunk_size=256)"][0]["chunk_regions"][0]
    assert list(layout.chunk_shape(256)) == region["shape"]


@pytest.mark.parametrize("case", SINGLE)
def test_golden_compressed_entry_is_refused_by_the_check(case: dict[str, Any]) -> None:
    layout = KVLayout.from_status(case["status_entry"])
    if layout.slots_per_block == layout.tokens_per_block:
        check_uncompressed(layout)
    else:
        with pytest.raises(UnsupportedError, match=f"{layout.slots_per_block} slots for 16 tokens"):
            check_uncompressed(layout)


@pytest.mark.parametrize("case", SEVERAL + LIVE_SEVERAL)
def test_golden_entry_of_several_groups_is_refused_and_lists_them(case: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        KVLayout.from_status(case["status_entry"])
    for index, group in enumerate(groups_of(case)):
        assert f"[{index}] {group['num_layers']} layers of {group['dtype']}" in str(caught.value)


@pytest.mark.parametrize("case", LIVE_SINGLE)
def test_golden_live_entry_and_its_stored_object(case: dict[str, Any]) -> None:
    layout, expected = KVLayout.from_status(case["status_entry"]), case["expected"]
    assert layout.num_layers == expected["num_layers"]
    assert layout.planes == expected["kv_planes"]
    assert layout.hidden_dim == expected["hidden_dim"]
    assert dtype_name(layout.dtype) == expected["dtype"]
    assert layout.is_mla == expected["is_mla"]
    assert layout.is_fused == expected.get("fused_kv", False)
    assert layout.slots_per_block == expected.get("block_size", expected.get("slots_per_block"))
    if not layout.is_fused:
        assert (layout.num_kv_heads, layout.head_dim) == (expected["num_kv_heads"], expected["head_dim"])
    stored = case["stored_chunk_object(chunk_size=256)"]
    if stored is not None:
        assert list(layout.chunk_shape(256)) == stored["shape"]
        learned = layout_from_object(stored["shape"], layout.dtype, 256)
        assert learned.chunk_shape(256) == layout.chunk_shape(256)
        assert learned.one_plane == layout.one_plane
