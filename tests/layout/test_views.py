"""Slots of the pool: the right bytes, and every number that does not fit refused by the name of its field."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.layout import as_chunk, check_disjoint, slot_runs
from lmcache_sdk.protocol import Slot

GOOD: dict[str, Any] = {"offset": 64, "length": 48, "shape": (2, 3, 4), "dtype": "bfloat16"}


def pool() -> bytearray:
    return bytearray(range(256))


def view_of(memory: memoryview, chunk_size: int = 3, **change: Any) -> torch.Tensor:
    """The tensor of one slot."""
    [run] = slot_runs(memory, [Slot(**(GOOD | change))], chunk_size)
    assert run.size(0) == 1
    return run[0]


def test_a_view_has_the_slots_bytes_and_writes_through() -> None:
    memory = pool()
    view = view_of(memoryview(memory))
    assert (view.dtype, tuple(view.shape)) == (torch.bfloat16, (1, 2, 3, 4))
    assert view.view(torch.uint8).flatten().tolist() == list(range(64, 112))
    view.fill_(0)
    assert memory[63:113] == b"\x3f" + bytes(48) + b"\x70"


def test_a_view_reaches_the_last_byte() -> None:
    view = view_of(memoryview(pool()), 1, offset=252, length=4, shape=(1, 1, 1), dtype="float32")
    assert view.view(torch.uint8).flatten().tolist() == [252, 253, 254, 255]


def test_a_pool_of_another_item_format_counts_bytes() -> None:
    view = view_of(memoryview(pool()).cast("Q"), 1, offset=8, length=8, shape=(1, 1, 8), dtype="uint8")
    assert view.flatten().tolist() == list(range(8, 16))


def test_a_read_only_pool_is_copied_without_a_warning() -> None:
    """Warnings are errors here; torch gives this one once a process, and test order is random."""
    memory = bytes(pool())
    view = view_of(memoryview(memory))
    view.fill_(0)
    assert memory == bytes(range(256))


def test_a_view_keeps_its_memory_exported() -> None:
    memory = pool()
    exported = memoryview(memory)
    view = view_of(exported)
    del exported
    with pytest.raises(BufferError):
        memory.extend(b"x")
    del view
    gc.collect()
    memory.extend(b"x")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"offset": -2}, "slots[0].offset"),
        ({"offset": True}, "slots[0].offset"),
        ({"offset": 64.0}, "slots[0].offset"),
        ({"offset": "64"}, "slots[0].offset"),
        ({"offset": 65}, "slots[0].offset"),
        ({"offset": 210}, "slots[0].offset"),
        ({"offset": 256}, "slots[0].offset"),
        ({"offset": 2**63}, "slots[0].offset"),
        ({"offset": 10**40}, "slots[0].offset"),
        ({"length": -48}, "slots[0].length"),
        ({"length": None}, "slots[0].length"),
        ({"length": 0}, "slots[0].length"),
        ({"length": 46}, "slots[0].length"),
        ({"length": 50}, "slots[0].length"),
        ({"length": 2**63}, "slots[0].length"),
        ({"shape": ()}, "slots[0].shape"),
        ({"shape": (1,) * 17}, "slots[0].shape"),
        ({"shape": (2, 3, 0)}, "slots[0].shape"),
        ({"shape": (2, -3, -4)}, "slots[0].shape"),
        ({"shape": (2, 3.0, 4)}, "slots[0].shape"),
        ({"shape": (True, 6, 4)}, "slots[0].shape"),
        ({"shape": (2, 3, "4")}, "slots[0].shape"),
        ({"shape": (2, 3, 10**40)}, "slots[0].shape"),
        ({"shape": (2**40,) * 16}, "slots[0].shape"),
        ({"shape": (2, 3, 5)}, "slots[0].length"),
        ({"dtype": "float32"}, "slots[0].length"),
        ({"dtype": "Tensor"}, "slots[0].dtype"),
        ({"dtype": "torch.bfloat16"}, "slots[0].dtype"),
        ({"dtype": ""}, "slots[0].dtype"),
    ],
)
def test_each_violation_names_its_field(change: dict[str, Any], path: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        view_of(memoryview(pool()), **change)
    assert caught.value.path == path


@given(
    offset=st.integers(-4, 300),
    length=st.integers(-4, 300),
    shape=st.lists(st.integers(-1, 9), max_size=4),
    name=st.sampled_from(["uint8", "bool", "bfloat16", "float32", "int64", "float8_e5m2", "nothing"]),
)
def test_any_numbers_make_a_view_inside_the_pool_or_are_refused(
    offset: int, length: int, shape: list[int], name: str
) -> None:
    memory = pool()
    chunk_size = shape[-2] if len(shape) > 1 else 1
    try:
        view = view_of(memoryview(memory), chunk_size, offset=offset, length=length, shape=tuple(shape), dtype=name)
    except RemoteProtocolError:
        return
    assert view.nbytes == length
    assert view.flatten().view(torch.uint8).tolist() == list(range(offset, offset + length))


def chunk_slots(*offsets: int, shape: tuple[int, ...] = (2, 1, 2, 4)) -> list[Slot]:
    """Slots of 16 bytes."""
    return [Slot(offset=offset, length=16, shape=shape, dtype="uint8") for offset in offsets]


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ([0], [1]),
        ([0, 16, 32, 48], [4]),
        ([0, 32, 64], [3]),
        ([8, 24, 48, 64, 100], [2, 2, 1]),
        ([48, 32, 16], [1, 1, 1]),
        ([0, 16, 0], [2, 1]),
        ([], []),
    ],
)
def test_slots_at_one_distance_are_one_tensor(offsets: list[int], lengths: list[int]) -> None:
    runs = slot_runs(memoryview(pool()), chunk_slots(*offsets), 2)
    assert [run.size(0) for run in runs] == lengths
    assert all(list(run.shape[1:]) == [2, 1, 2, 4] for run in runs)
    found = [chunk.flatten().tolist() for run in runs for chunk in run.unbind(0)]
    assert found == [list(range(offset, offset + 16)) for offset in offsets]


def test_runs_are_cut_where_the_kind_changes_and_write_through() -> None:
    memory = pool()
    flat = chunk_slots(32, shape=(2, 2, 4))
    runs = slot_runs(memoryview(memory), [*chunk_slots(0, 16), *flat, *chunk_slots(48)], 2)
    assert [list(run.shape) for run in runs] == [[2, 2, 1, 2, 4], [1, 1, 2, 2, 4], [1, 2, 1, 2, 4]]
    for run in runs:
        run.fill_(7)
    assert memory[:65] == b"\x07" * 64 + b"\x40"


@pytest.mark.parametrize(
    ("slot", "path"),
    [
        (Slot(offset=248, length=16, shape=(2, 1, 2, 4), dtype="uint8"), "slots[2].offset"),
        (Slot(offset=-16, length=16, shape=(2, 1, 2, 4), dtype="uint8"), "slots[2].offset"),
        (Slot(offset=33, length=16, shape=(2, 1, 2, 2), dtype="int16"), "slots[2].offset"),
        (Slot(offset=32, length=15, shape=(2, 1, 2, 4), dtype="uint8"), "slots[2].length"),
        (Slot(offset=32, length=16, shape=(2, 1, 4, 2), dtype="uint8"), "slots[2].shape"),
        (Slot(offset=32, length=16, shape=(2, 1, 2, 4), dtype="Tensor"), "slots[2].dtype"),
        (Slot(offset=10**30, length=16, shape=(2, 1, 2, 4), dtype="uint8"), "slots[2].offset"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_each_violation_in_a_run_names_its_slot(slot: Slot, path: str, alone: bool) -> None:
    before = chunk_slots(0, 16)
    with pytest.raises(RemoteProtocolError) as caught:
        slot_runs(memoryview(pool()), [slot] if alone else [*before, slot], 2)
    assert caught.value.path == (path.replace("[2]", "[0]") if alone else path)


def test_as_chunk_gives_every_object_four_axes() -> None:
    assert list(as_chunk(torch.zeros(2, 3, 8, 5), 8).shape) == [2, 3, 8, 5]
    assert list(as_chunk(torch.zeros(1, 3, 8, 5), 8).shape) == [1, 3, 8, 5]
    flat = torch.zeros(3, 8, 5)
    chunk = as_chunk(flat, 8)
    assert list(chunk.shape) == [1, 3, 8, 5]
    assert chunk.data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("shape", [(8,), (8, 5), (3, 3, 8, 5), (1, 2, 3, 8, 5), (2, 3, 4, 5), (3, 4, 5)])
def test_as_chunk_refuses_other_objects(shape: tuple[int, ...]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        as_chunk(torch.zeros(shape), 8)
    assert caught.value.path == "object.shape"


def slots(*ranges: tuple[int, int]) -> list[Slot]:
    return [Slot(offset=offset, length=length, shape=(length,), dtype="uint8") for offset, length in ranges]


def test_disjoint_slots_pass_in_any_order() -> None:
    check_disjoint([])
    check_disjoint(slots((0, 4)))
    check_disjoint(slots((8, 4), (0, 4), (4, 4)))


@pytest.mark.parametrize("ranges", [((0, 4), (0, 4)), ((0, 5), (4, 4)), ((4, 4), (0, 12)), ((0, 4), (8, 4), (3, 1))])
def test_overlapping_slots_are_refused_by_index(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="lies inside slot") as caught:
        check_disjoint(slots(*ranges))
    assert caught.value.path.startswith("slots[")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=8))
def test_disjoint_means_that_no_byte_is_shared(ranges: list[tuple[int, int]]) -> None:
    taken = [byte for offset, length in ranges for byte in range(offset, offset + length)]
    try:
        check_disjoint(slots(*ranges))
    except RemoteProtocolError:
        assert len(set(taken)) < len(taken)
    else:
        assert len(set(taken)) == len(taken)
