"""KVLayout: what it fills in, what it refuses, and what malformed or contradictory entries of /status become."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.errors import (
    ArgumentTypeError,
    KVCacheSDKError,
    RemoteProtocolError,
    UnknownLayoutError,
    UnsupportedError,
    UsageError,
)
from lmcache_sdk.layout import KVLayout, check_uncompressed, layout_from_object
from lmcache_sdk.layout.axes import FORMATS
from tests.layout.strategies import layouts

BF16 = torch.bfloat16


def entry(shape: str, engine_format: str, cache_size_per_token: int, **group: object) -> dict[str, Any]:
    """A status entry of one kernel group: 4 layers of bfloat16 in blocks of 16 unless said otherwise."""
    base: dict[str, object] = {
        "num_layers": 4,
        "tokens_per_block": 16,
        "slots_per_block": 16,
        "dtype": "torch.bfloat16",
        "engine_kv_concrete_shape": shape,
        "engine_kv_format": engine_format,
        "is_mla": False,
    }
    layout = {"cache_size_per_token": cache_size_per_token, "kernel_groups": [base | group]}
    return {"model_name": "m", "world_size": 1, "kv_cache_layout": layout}


PLAIN = entry("4 x [40, 2, 16, 8, 128]", "NL_X_NB_TWO_BS_NH_HS", 16384)
WHERE = "kv_cache_layout.kernel_groups[0]"


class TestMaking:
    def test_two_planes(self) -> None:
        layout = KVLayout(num_layers=36, dtype=BF16, num_kv_heads=8, head_dim=128)
        assert (layout.planes, layout.hidden_dim, layout.one_plane) == (2, 1024, False)
        assert (layout.tokens_per_block, layout.slots_per_block) == (16, 16)
        assert layout.chunk_shape(256) == (2, 36, 256, 1024)
        assert layout.chunk_nbytes(256) == 2 * 36 * 256 * 1024 * 2
        assert layout.describe() == "2 planes, 36 layers, width 1024 (8 heads of 128), bfloat16"

    def test_mla(self) -> None:
        layout = KVLayout(num_layers=61, dtype=BF16, head_dim=576, is_mla=True)
        assert (layout.planes, layout.hidden_dim, layout.num_kv_heads, layout.one_plane) == (1, 576, 1, True)
        assert layout == KVLayout(num_layers=61, dtype=BF16, hidden_dim=576, is_mla=True)
        assert layout.describe() == "MLA, 61 layers, width 576, bfloat16"

    def test_fused(self) -> None:
        layout = KVLayout(num_layers=4, dtype=BF16, num_kv_heads=8, head_dim=128, is_fused=True)
        assert (layout.planes, layout.hidden_dim) == (1, 2048)

    def test_heads_follow_from_the_width(self) -> None:
        by_width = KVLayout(num_layers=4, dtype=BF16, hidden_dim=2048, is_fused=True)
        assert (by_width.num_kv_heads, by_width.head_dim) == (None, None)
        assert attrs.evolve(by_width, num_kv_heads=8).head_dim == 128
        assert attrs.evolve(by_width, head_dim=128).num_kv_heads == 8
        assert KVLayout(num_layers=1, dtype=BF16, hidden_dim=96, head_dim=32).num_kv_heads == 3

    def test_compressed(self) -> None:
        layout = KVLayout(num_layers=3, dtype=BF16, head_dim=24, is_mla=True, tokens_per_block=16, slots_per_block=4)
        assert layout.chunk_shape(256) == (1, 3, 64, 24)
        with pytest.raises(UnsupportedError, match="4 slots for 16 tokens"):
            check_uncompressed(layout)
        with pytest.raises(UnsupportedError, match="whole slots"):
            layout.chunk_shape(2)

    def test_chunk_need_not_be_whole_blocks(self) -> None:
        assert KVLayout(num_layers=1, dtype=BF16, hidden_dim=4).chunk_shape(24) == (2, 1, 24, 4)

    @pytest.mark.parametrize(
        ("numbers", "named"),
        [
            ({"num_layers": 0, "hidden_dim": 4}, "num_layers"),
            ({"num_layers": 2**31, "hidden_dim": 4}, "num_layers"),
            ({"hidden_dim": -4}, "hidden_dim"),
            ({}, "num_kv_heads and head_dim"),
            ({"num_kv_heads": 8}, "num_kv_heads and head_dim"),
            ({"num_kv_heads": 0, "head_dim": 4}, "num_kv_heads"),
            ({"num_kv_heads": 3, "head_dim": 4, "hidden_dim": 13}, "hidden_dim"),
            ({"num_kv_heads": 3, "hidden_dim": 13}, "hidden_dim"),
            ({"head_dim": 16, "hidden_dim": 8}, "hidden_dim"),
            ({"num_kv_heads": 3, "head_dim": 4, "hidden_dim": 12, "is_fused": True}, "hidden_dim"),
            ({"num_kv_heads": 2, "head_dim": 4, "is_mla": True}, "num_kv_heads"),
            ({"hidden_dim": 4, "planes": 3}, "planes"),
            ({"hidden_dim": 4, "planes": 2, "is_mla": True}, "planes"),
            ({"hidden_dim": 4, "planes": 2, "is_fused": True}, "planes"),
            ({"hidden_dim": 4, "is_mla": True, "is_fused": True}, "is_mla"),
            ({"hidden_dim": 4, "tokens_per_block": 0}, "tokens_per_block"),
            ({"hidden_dim": 4, "tokens_per_block": 4, "slots_per_block": 16}, "slots_per_block"),
        ],
    )
    def test_numbers_that_do_not_fit_are_refused_by_name(self, numbers: dict[str, Any], named: str) -> None:
        with pytest.raises(UsageError, match=named):
            KVLayout(**{"num_layers": 1, "dtype": BF16, **numbers})

    @pytest.mark.parametrize(
        ("numbers", "named"),
        [
            ({"num_layers": True}, "num_layers"),
            ({"num_layers": 1.0}, "num_layers"),
            ({"num_kv_heads": "8"}, "num_kv_heads"),
            ({"head_dim": "ab"}, "head_dim"),
            ({"dtype": "bfloat16"}, "dtype"),
            ({"is_mla": 1}, "is_mla"),
            ({"hidden_dim": None}, "hidden_dim"),
        ],
    )
    def test_types_that_do_not_fit_are_refused_by_name(self, numbers: dict[str, Any], named: str) -> None:
        with pytest.raises(ArgumentTypeError, match=named):
            KVLayout(**{"num_layers": 1, "dtype": BF16, "num_kv_heads": 1, "head_dim": 4, **numbers})

    def test_a_dtype_that_no_cache_holds_is_refused(self) -> None:
        with pytest.raises(UnknownLayoutError, match="complex64"):
            KVLayout(num_layers=1, dtype=torch.complex64, hidden_dim=4)

    @given(layouts())
    def test_filled_in_numbers_agree_and_stay(self, layout: KVLayout) -> None:
        assert attrs.evolve(layout) == layout
        assert hash(attrs.evolve(layout)) == hash(layout)
        assert layout.num_kv_heads is not None
        assert layout.head_dim is not None
        assert layout.num_kv_heads * layout.head_dim * (2 if layout.is_fused else 1) == layout.hidden_dim
        assert layout.chunk_nbytes(8) == torch.empty(layout.chunk_shape(8), dtype=layout.dtype).nbytes


class TestFromStatus:
    def test_two_hs_is_fused_by_its_bytes(self) -> None:
        """0.5.2 prints the doubled width next to the literal 2; 0.5.0 and 0.5.1 print the real one."""
        fused = KVLayout.from_status(entry("4 x [64, 8, 16, 2, 256]", "NL_X_NB_NH_BS_TWO_HS", 4 * 8 * 256 * 2))
        assert (fused.planes, fused.is_fused, fused.hidden_dim) == (1, True, 2048)
        assert (fused.num_kv_heads, fused.head_dim) == (8, 128)
        planes = KVLayout.from_status(entry("4 x [64, 16, 8, 2, 128]", "NL_X_NB_BS_NH_TWO_HS", 2 * 4 * 8 * 128 * 2))
        assert (planes.planes, planes.is_fused, planes.hidden_dim) == (2, False, 1024)
        assert (planes.num_kv_heads, planes.head_dim) == (8, 128)

    def test_two_hs_that_is_neither_is_not_guessed(self) -> None:
        with pytest.raises(UnknownLayoutError, match="cache_size_per_token"):
            KVLayout.from_status(entry("4 x [64, 8, 16, 2, 256]", "NL_X_NB_NH_BS_TWO_HS", 4 * 8 * 256 * 2 * 3))
        with pytest.raises(UnknownLayoutError, match="planes are not known"):
            KVLayout.from_status(entry("Unknown (10)", "NL_X_NB_NH_BS_TWO_HS", 16384))

    def test_a_printed_cs_shape_tells_the_heads(self) -> None:
        """No release prints one; should one, the format's own axes read it."""
        layout = KVLayout.from_status(entry("4 x [64, 8, 16, 256]", "NL_X_NB_NH_BS_CS", 4 * 8 * 256 * 2))
        assert (layout.is_fused, layout.num_kv_heads, layout.head_dim, layout.hidden_dim) == (True, 8, 128, 2048)
        with pytest.raises(RemoteProtocolError, match="odd width 255"):
            KVLayout.from_status(entry("4 x [64, 8, 16, 255]", "NL_X_NB_NH_BS_CS", 4 * 8 * 255 * 2))

    def test_opaque_rows_are_known_by_their_bytes_even_when_printed(self) -> None:
        given_ = entry("4 x [90, 1024, 32]", "NL_X_NB_BSV_BSS", 4 * 132, dtype="torch.uint8", is_mla=True)
        layout = KVLayout.from_status(given_)
        assert (layout.hidden_dim, layout.num_kv_heads, layout.head_dim) == (132, 1, 132)

    def test_cross_layer_and_flat_formats_decode_by_their_labels(self) -> None:
        cross = KVLayout.from_status(entry("[40, 4, 2, 8, 16, 128]", "NB_NL_TWO_NH_BS_HS", 16384))
        assert cross.chunk_shape(16) == (2, 4, 16, 1024)
        flat = KVLayout.from_status(entry("4 x [640, 1, 576]", "NL_X_NBBS_ONE_HS", 4608, is_mla=True))
        assert flat.chunk_shape(16) == (1, 4, 16, 576)
        with pytest.raises(RemoteProtocolError, match="axis NL"):
            KVLayout.from_status(entry("[40, 3, 2, 8, 16, 128]", "NB_NL_TWO_NH_BS_HS", 16384))

    def test_no_memory_is_allocated(self) -> None:
        """The block count of this entry would be petabytes."""
        layout = KVLayout.from_status(entry("4 x [2000000000, 2, 16, 8, 128]", "NL_X_NB_TWO_BS_NH_HS", 16384))
        assert layout.hidden_dim == 1024

    @pytest.mark.parametrize(
        ("change", "path"),
        [
            ({"num_layers": 0}, f"{WHERE}.num_layers"),
            ({"num_layers": 10**30}, f"{WHERE}.num_layers"),
            ({"num_layers": True}, f"{WHERE}.num_layers"),
            ({"num_layers": "4"}, f"{WHERE}.num_layers"),
            ({"num_layers": 5}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"tokens_per_block": -1}, f"{WHERE}.tokens_per_block"),
            ({"slots_per_block": 0}, f"{WHERE}.slots_per_block"),
            ({"slots_per_block": 8}, f"{WHERE}.slots_per_block"),
            ({"dtype": None}, f"{WHERE}.dtype"),
            ({"is_mla": True}, f"{WHERE}.is_mla"),
            ({"engine_kv_concrete_shape": ""}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "4 x 40, 2"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "Unknown"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "4 x [40, 2, 16, 8]"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "4 x [40, 3, 16, 8, 128]"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "4 x [0, 2, 16, 8, 128]"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "2 x 4 x [40, 2, 16, 8, 128]"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "[40, 2, 16, 8, 128]"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "4 x [40, 2, 16, 8, -128]"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "4 x [40, 2, 16, 8, ١٢٨]"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "4 x [40, 2, 16, 8, 99999999999]"}, f"{WHERE}.engine_kv_concrete_shape"),
            ({"engine_kv_concrete_shape": "4 x [2, 2, 16, 65536, 65536]"}, f"{WHERE}.engine_kv_concrete_shape"),
            (
                {"engine_kv_concrete_shape": "4 x [2147483647, 2, 16, 2147483647, 2147483647]"},
                f"{WHERE}.engine_kv_concrete_shape",
            ),
            ({"engine_kv_concrete_shape": "4 x [" + "1, " * 10**5 + "1]"}, f"{WHERE}.engine_kv_concrete_shape"),
        ],
    )
    def test_a_wrong_field_is_named_by_its_path(self, change: dict[str, object], path: str) -> None:
        broken = copy.deepcopy(PLAIN)
        broken["kv_cache_layout"]["kernel_groups"][0].update(change)
        with pytest.raises(RemoteProtocolError) as caught:
            KVLayout.from_status(broken)
        assert caught.value.path == path
        assert path in str(caught.value)
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize("field", ["num_layers", "dtype", "engine_kv_format", "engine_kv_concrete_shape"])
    def test_a_missing_field_is_named_by_its_path(self, field: str) -> None:
        broken = copy.deepcopy(PLAIN)
        del broken["kv_cache_layout"]["kernel_groups"][0][field]
        with pytest.raises(RemoteProtocolError) as caught:
            KVLayout.from_status(broken)
        assert caught.value.path.startswith(f"{WHERE}.{field}")
        assert "missing" in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"dtype": "torch.Tensor"}, f"{WHERE}.dtype"),
            ({"dtype": "torch.complex64"}, f"{WHERE}.dtype"),
            ({"engine_kv_format": "NL_X_NB_NEW_THING"}, f"{WHERE}.engine_kv_format"),
        ],
    )
    def test_an_unknown_word_is_an_unknown_layout(self, change: dict[str, object], named: str) -> None:
        broken = copy.deepcopy(PLAIN)
        broken["kv_cache_layout"]["kernel_groups"][0].update(change)
        with pytest.raises(UnknownLayoutError) as caught:
            KVLayout.from_status(broken)
        assert named in str(caught.value)

    @pytest.mark.parametrize(
        "cache_size", [0, -1, 10**30, 4 * 8 * 256 * 2 + 1, "Unknown", pytest.param(7, id="not whole")]
    )
    def test_bytes_that_do_not_divide_are_refused(self, cache_size: Any) -> None:
        broken = entry("Unknown (12)", "NL_X_NB_NH_BS_CS", cache_size)
        with pytest.raises(RemoteProtocolError) as caught:
            KVLayout.from_status(broken)
        assert caught.value.path == "kv_cache_layout.cache_size_per_token"

    def test_a_slot_of_more_rows_than_tokens_is_refused_as_the_servers_fault(self) -> None:
        broken = entry("4 x [40, 2, 32, 8, 128]", "NL_X_NB_TWO_BS_NH_HS", 16384, slots_per_block=32)
        with pytest.raises(RemoteProtocolError, match="slots_per_block"):
            KVLayout.from_status(broken)

    @pytest.mark.parametrize("given_", [None, [], "x", {}, {"kv_cache_layout": None}, {"kv_cache_layout": [1]}])
    def test_what_is_no_entry_is_refused(self, given_: Any) -> None:
        with pytest.raises(RemoteProtocolError) as caught:
            KVLayout.from_status(given_)
        assert caught.value.path == "kv_cache_layout"

    def test_many_groups_are_listed_in_few_words(self) -> None:
        many = copy.deepcopy(PLAIN)
        many["kv_cache_layout"]["kernel_groups"] *= 100
        with pytest.raises(UnsupportedError, match=r"100 kernel groups.*and 92 more"):
            KVLayout.from_status(many)

    @given(
        shape=st.from_regex(r"((\d{1,3}|NP) x ){0,3}\[\d{1,4}(, \d{1,4}){0,6}\]", fullmatch=True)
        | st.sampled_from(["Unknown (12)", "Unknown (EngineKVFormat.X)"])
        | st.text(max_size=30),
        engine_format=st.sampled_from(sorted(FORMATS)),
        cache_size=st.integers(-1, 2**70),
        tokens=st.integers(0, 64),
        slots=st.integers(0, 64),
        num_layers=st.integers(0, 9),
        is_mla=st.booleans(),
    )
    def test_any_entry_is_decoded_or_refused(
        self,
        shape: str,
        engine_format: str,
        cache_size: int,
        tokens: int,
        slots: int,
        num_layers: int,
        is_mla: bool,
    ) -> None:
        given_ = entry(
            shape,
            engine_format,
            cache_size,
            tokens_per_block=tokens,
            slots_per_block=slots,
            num_layers=num_layers,
            is_mla=is_mla,
        )
        try:
            layout = KVLayout.from_status(given_)
        except KVCacheSDKError:
            return
        assert layout.num_layers == num_layers


class TestLayoutFromObject:
    def test_both_ranks(self) -> None:
        assert layout_from_object((2, 4, 256, 64), BF16, 256).chunk_shape(256) == (2, 4, 256, 64)
        for shape in ((1, 4, 256, 64), (4, 256, 64)):
            learned = layout_from_object(shape, BF16, 256)
            assert learned.one_plane
            assert learned.chunk_shape(256) == (1, 4, 256, 64)
            assert (learned.num_kv_heads, learned.head_dim) == (None, None)

    @pytest.mark.parametrize("shape", [(), (64,), (256, 64), (3, 4, 256, 64), (1, 2, 4, 256, 64)])
    def test_what_is_no_object_is_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(UnknownLayoutError):
            layout_from_object(shape, BF16, 256)

    def test_another_number_of_rows_than_tokens_is_unsupported(self) -> None:
        with pytest.raises(UnsupportedError, match="64 slots for a chunk of 256"):
            layout_from_object((1, 3, 64, 24), BF16, 256)
