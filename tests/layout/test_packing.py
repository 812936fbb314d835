"""A user's tensor: what is refused before anything is sent, and that every bit arrives."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.errors import ArgumentTypeError, Fate, ShapeMismatchError
from lmcache_sdk.layout import KVLayout, check_kv, check_out, new_result, pack, pack_chunk, packing, unpack
from lmcache_sdk.layout.axes import TOKEN
from lmcache_sdk.values import override
from tests.layout.golden import raw_bytes
from tests.layout.strategies import bits, layouts

LAYOUT = KVLayout(num_layers=3, dtype=torch.bfloat16, num_kv_heads=2, head_dim=4)
MLA = KVLayout(num_layers=3, dtype=torch.bfloat16, head_dim=8, is_mla=True)


def kv(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return bits(shape, dtype, seed=1)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a device that this machine does not have."""

    works: ClassVar[bool] = True

    @property
    @override
    def device(self) -> torch.device:  # type: ignore[override] # torch declares it as an attribute
        return torch.device("cuda:0")

    @override
    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.works:
            raise RuntimeError("no such device")
        assert self.numel() == 1, "the probe copies one element, not the cache"
        return torch.zeros(1)


Check = Callable[[torch.Tensor, KVLayout, int], torch.Tensor]

STRIDED: Final = {
    "transposed": kv(2, 3, 8, 16).transpose(2, 3),
    "sliced": kv(2, 3, 32, 8)[:, :, ::2],
    "permuted": torch.zeros(16, 3, 8, 2, dtype=torch.bfloat16).permute(3, 1, 0, 2),
    "parameter": torch.nn.Parameter(torch.zeros(2, 3, 16, 8, dtype=torch.bfloat16)),
    "empty": kv(1, 3, 0, 8).expand(2, 3, 0, 8),
}
NO_TENSORS: Final = {
    "none": (None, "torch.Tensor, got NoneType"),
    "list": ([[1.0]], "got list"),
    "numpy": (np.zeros((2, 3, 16, 8)), "got ndarray"),
    "meta": (torch.zeros(2, 3, 16, 8, dtype=torch.bfloat16, device="meta"), "meta"),
    "sparse": (torch.zeros(2, 3, 16, 8, dtype=torch.bfloat16).to_sparse(), "sparse"),
}


@pytest.mark.parametrize(("check", "name"), [(check_kv, "kv"), (check_out, "out")], ids=["kv", "out"])
class TestBoth:
    """What holds for a tensor to store and for one to fill."""

    def test_the_tensor_itself_comes_back_without_autograd(self, check: Check, name: str) -> None:
        given_ = torch.zeros(2, 3, 16, 8, dtype=torch.bfloat16, requires_grad=True)
        checked = check(given_, LAYOUT, 16)
        assert checked.data_ptr() == given_.data_ptr()
        assert not checked.requires_grad

    @pytest.mark.parametrize("given_", STRIDED.values(), ids=STRIDED)
    def test_any_strided_tensor_passes(self, check: Check, name: str, given_: torch.Tensor) -> None:
        assert check(given_, LAYOUT, given_.size(TOKEN)).shape == given_.shape

    @pytest.mark.parametrize(("given_", "words"), NO_TENSORS.values(), ids=NO_TENSORS)
    def test_what_is_no_dense_tensor_is_refused(self, check: Check, name: str, given_: Any, words: str) -> None:
        with pytest.raises(ArgumentTypeError, match=words) as caught:
            check(given_, LAYOUT, 16)
        assert str(caught.value).startswith(f"{name}: ")

    @pytest.mark.parametrize(
        "given_",
        [kv(2, 3, 15, 8), kv(2, 3, 16, 8, dtype=torch.float16), kv(1, 3, 16, 8), kv(3, 16, 8)],
        ids=["tokens", "dtype", "planes", "axes"],
    )
    def test_another_shape_or_dtype_says_what_is_expected(self, check: Check, name: str, given_: torch.Tensor) -> None:
        with pytest.raises(ShapeMismatchError, match=rf"^{name}: .*\[2, 3, 16, 8\] torch.bfloat16") as caught:
            check(given_, LAYOUT, 16)
        assert caught.value.fate is Fate.NOT_SENT
        assert caught.value.expected == "[2, 3, 16, 8] torch.bfloat16"
        assert caught.value.found == f"{list(given_.shape)} {given_.dtype}"
        assert caught.value.found in str(caught.value)


class TestCheckKV:
    def test_an_array_is_told_how_to_become_a_tensor(self) -> None:
        with pytest.raises(ArgumentTypeError, match=r"torch\.from_numpy"):
            check_kv(np.zeros((2, 3, 16, 8)), LAYOUT, 16)

    def test_rows_that_share_memory_pass(self) -> None:
        given_ = kv(1, 3, 16, 8).expand(2, 3, 16, 8)
        assert check_kv(given_, LAYOUT, 16).shape == given_.shape

    def test_one_plane_and_empty_pass(self) -> None:
        check_kv(kv(1, 3, 16, 8), MLA, 16)
        check_kv(torch.zeros(2, 3, 0, 8, dtype=torch.bfloat16), LAYOUT, 0)

    def test_a_device_that_cannot_be_read_is_found_before_anything_is_sent(self) -> None:
        assert check_kv(torch.zeros(2, 3, 16, 8).to(torch.bfloat16).as_subclass(Elsewhere), LAYOUT, 16) is not None
        Elsewhere.works = False
        try:
            with pytest.raises(ArgumentTypeError, match="on cuda:0 cannot be copied to the CPU"):
                check_kv(torch.zeros(2, 3, 16, 8).to(torch.bfloat16).as_subclass(Elsewhere), LAYOUT, 16)
        finally:
            Elsewhere.works = True

    @pytest.mark.parametrize(
        ("given_", "words"),
        [
            (kv(2, 3, 16, 8, dtype=torch.float32), "kv.to\\(torch.bfloat16\\)"),
            (kv(2, 3, 16, 8, dtype=torch.float16), "kv.to\\(torch.bfloat16\\)"),
            (kv(2, 3, 16, 8, dtype=torch.int16), "kv.view\\(torch.bfloat16\\)"),
            (kv(2, 3, 16, 8, dtype=torch.int64), "is not converted"),
            (kv(3, 16, 8), "four axes are needed, not 3"),
            (kv(2, 3, 16, 2, 4), "flatten"),
            (kv(1, 3, 16, 8), "2 planes, this tensor 1"),
            (kv(2, 4, 16, 8), "3 layers, this tensor 4"),
            (kv(2, 3, 16, 9), "8 elements per token and layer, this tensor 9"),
            (kv(2, 3, 17, 8), "16 ids, 17 rows"),
            (kv(2, 3, 15, 8), "16 ids, 15 rows"),
            (kv(2, 3, 1, 8), "16 ids, 1 rows"),
            (kv(16, 3, 2, 8), "planes"),
        ],
    )
    def test_another_shape_or_dtype_says_what_to_do(self, given_: torch.Tensor, words: str) -> None:
        with pytest.raises(ShapeMismatchError, match=words) as caught:
            check_kv(given_, LAYOUT, 16)
        assert caught.value.expected == "[2, 3, 16, 8] torch.bfloat16"
        assert caught.value.found == f"{list(given_.shape)} {given_.dtype}"

    def test_one_plane_without_its_axis_is_told_to_add_it(self) -> None:
        with pytest.raises(ShapeMismatchError, match=r"unsqueeze\(0\)"):
            check_kv(kv(3, 16, 8), MLA, 16)


@given(layouts(), st.integers(1, 4), st.integers(1, 6), st.sampled_from(["plain", "transposed", "strided"]))
def test_what_is_packed_comes_back_to_the_bit(layout: KVLayout, num_chunks: int, chunk_size: int, kind: str) -> None:
    num_tokens = num_chunks * chunk_size
    shape = (layout.planes, layout.num_layers, num_tokens, layout.hidden_dim)
    source = bits(shape, layout.dtype, seed=num_tokens)
    if kind == "transposed":
        source = bits((shape[1], shape[0], shape[3], shape[2]), layout.dtype, seed=3).transpose(0, 1).transpose(2, 3)
    elif kind == "strided":
        source = bits((*shape[:2], 2 * num_tokens, shape[3]), layout.dtype, seed=4)[:, :, ::2]
    assert tuple(source.shape) == shape
    chunks = []
    for index in range(num_chunks):
        flat = layout.one_plane and index % 2 == 0
        slot = torch.empty(layout.chunk_shape(chunk_size)[1 if flat else 0 :], dtype=layout.dtype)
        pack_chunk(source, index, chunk_size, slot)
        chunks.append(slot.unsqueeze(0) if flat else slot)
    result = new_result(layout.chunk_shape(chunk_size), num_chunks, layout.dtype)
    assert result.is_contiguous()
    assert tuple(result.shape) == shape
    unpack([chunk.unsqueeze(0) for chunk in chunks[:1]], result, 0)
    unpack([torch.stack(chunks[1:])] if chunks[1:] else [], result, 1)
    assert raw_bytes(result) == raw_bytes(source)
    run = torch.empty(num_chunks, *layout.chunk_shape(chunk_size), dtype=layout.dtype)
    pack(source, 0, run)
    assert raw_bytes(run) == b"".join(raw_bytes(chunk) for chunk in chunks)
    if kind == "plain":  # and each chunk holds its own tokens
        for index, chunk in enumerate(chunks):
            expected = source[:, :, index * chunk_size : (index + 1) * chunk_size]
            assert raw_bytes(chunk) == raw_bytes(expected)


def test_gradients_and_repeated_memory_are_copied_as_numbers() -> None:
    source = torch.ones(1, 3, 8, 8, dtype=torch.bfloat16, requires_grad=True).expand(2, 3, 8, 8)
    slot = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16)
    pack_chunk(source, 1, 4, slot)
    assert not slot.requires_grad
    assert slot.eq(1).all()


def test_negated_views_are_resolved() -> None:
    source = torch.view_as_complex(torch.ones(2, 3, 8, 8, 2)).conj().imag
    assert source.is_neg()
    slot = torch.zeros(2, 3, 4, 8)
    pack_chunk(source, 0, 4, slot)
    assert slot.eq(-1).all()


@pytest.mark.parametrize(
    "slot",
    [
        torch.zeros(2, 3, 4, 9, dtype=torch.bfloat16),
        torch.zeros(2, 3, 4, 8, dtype=torch.float32),
        torch.zeros(3, 4, 8, dtype=torch.bfloat16),
        torch.zeros(2, 2, 3, 4, 8, dtype=torch.bfloat16),
    ],
)
def test_a_slot_that_copy_would_broadcast_or_convert_into_is_refused(slot: torch.Tensor) -> None:
    with pytest.raises(ShapeMismatchError):
        pack_chunk(kv(2, 3, 8, 8), 0, 4, slot)
    assert slot.eq(0).all()


@pytest.mark.parametrize("chunk", [torch.ones(1, 3, 4, 8), torch.ones(2, 3, 4, 8, dtype=torch.float64)])
def test_a_chunk_that_copy_would_broadcast_or_convert_is_refused(chunk: torch.Tensor) -> None:
    out = torch.zeros(2, 3, 8, 8)
    with pytest.raises(ShapeMismatchError):
        unpack([chunk.unsqueeze(0)], out, 1)
    assert out.eq(0).all()


def test_the_token_axis_is_the_third() -> None:
    assert TOKEN == 2


class TestCheckOut:
    @pytest.mark.parametrize(
        "given_",
        [
            kv(1, 3, 16, 8).expand(2, 3, 16, 8),
            torch.zeros(999, dtype=torch.bfloat16).as_strided((2, 3, 16, 8), (384, 128, 4, 1)),
        ],
        ids=["stride 0", "overlapping rows"],
    )
    def test_elements_that_share_memory_are_refused(self, given_: torch.Tensor) -> None:
        with pytest.raises(ShapeMismatchError, match="share memory") as caught:
            check_out(given_, LAYOUT, 16)
        assert caught.value.fate is Fate.NOT_SENT


def forbid_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's copy is called by nobody."""

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("a kernel of torch")

    monkeypatch.setattr(torch.Tensor, "copy_", refuse)


class TestLittle:
    """A copy of a few megabytes at most in long pieces: one call a piece, and no thread of torch's is woken."""

    @pytest.mark.parametrize(("hidden", "calls"), [(512, 12), (4096, 12)])
    def test_pieces_are_moved_by_this_thread(self, monkeypatch: pytest.MonkeyPatch, hidden: int, calls: int) -> None:
        source, run = kv(2, 3, 16, hidden), torch.zeros(2, 2, 3, 8, hidden, dtype=torch.bfloat16)
        moved: list[int] = []
        move = ctypes.memmove

        def counted(to: int, of: int, nbytes: int) -> None:
            moved.append(nbytes)
            move(to, of, nbytes)

        monkeypatch.setattr(ctypes, "memmove", counted)
        forbid_kernels(monkeypatch)
        pack(source, 0, run)
        monkeypatch.undo()
        assert moved == [8 * hidden * 2] * calls
        assert raw_bytes(run.movedim(0, 2).reshape(2, 3, 16, hidden)) == raw_bytes(source)

    @pytest.mark.parametrize("source", [kv(2, 3, 16, 64), kv(2, 3, 2048, 1024)], ids=["short pieces", "many bytes"])
    def test_the_rest_is_torchs(self, monkeypatch: pytest.MonkeyPatch, source: torch.Tensor) -> None:
        forbid_kernels(monkeypatch)
        run = torch.zeros(2, *source.shape[:2], source.size(2) // 2, source.size(3), dtype=source.dtype)
        with pytest.raises(RuntimeError, match="a kernel of torch"):
            pack(source, 0, run)


class Wrapper(torch.Tensor):
    """A tensor around another, without memory of its own, as DTensor and FakeTensor are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    @override
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.empty(0)


def test_a_tensor_without_memory_is_refused_before_anything_is_sent() -> None:
    zeros: torch.Tensor = torch._efficientzerotensor((2, 3, 16, 8), dtype=torch.bfloat16)
    for without in (Wrapper(kv(2, 3, 16, 8)), zeros):
        with pytest.raises(ArgumentTypeError, match="no memory of its own"):
            check_kv(without, LAYOUT, 16)
        with pytest.raises(ArgumentTypeError, match="no memory of its own"):
            check_out(without, LAYOUT, 16)


def test_a_negative_view_takes_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    run = torch.randn(2, 2, 3, 8, 1024).to(torch.bfloat16)
    out = torch._neg_view(torch.zeros(2, 3, 16, 1024, dtype=torch.bfloat16))
    unpack([run], out, 0)
    assert torch.equal(out.resolve_neg(), run.movedim(0, 2).reshape(2, 3, 16, 1024))


def test_autograd_sees_that_a_tensor_was_written() -> None:
    out = torch.zeros(2, 3, 16, 1024, dtype=torch.bfloat16)
    before = out._version
    unpack([kv(2, 2, 3, 8 * 1024).view(2, 2, 3, 8, 1024)], out.detach(), 0)
    assert out._version > before


class TestInAForkedChild:
    """Where torch's kernels may hang or fail, whoever calls them: bytes are moved without them."""

    @pytest.fixture(autouse=True)
    def child(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packing, "_PID", -1)

    @pytest.mark.parametrize("shape", [(2, 3, 32, 64), (1, 3, 32, 64), (2, 1, 32, 64), (2, 3, 8, 64)])
    def test_whole_rows_are_moved_without_torch(
        self, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int]
    ) -> None:
        source = kv(*shape)
        chunks = shape[2] // 8
        run, back, copy = torch.zeros(chunks, *shape[:2], 8, 64, dtype=source.dtype), torch.zeros_like(source), None
        forbid_kernels(monkeypatch)
        pack(source, 0, run)
        unpack([run], back, 0)
        copy = packing.copied(source[:, :, 1:7])
        assert raw_bytes(back) == raw_bytes(source)
        monkeypatch.undo()
        assert raw_bytes(copy) == raw_bytes(source[:, :, 1:7])
        for index in range(chunks):
            assert raw_bytes(run[index]) == raw_bytes(source[:, :, index * 8 : (index + 1) * 8])

    def test_a_wide_source_with_steps_between_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wide = kv(2, 3, 64, 128)
        source = wide[:, :, ::2, :64]
        run = torch.zeros(4, 2, 3, 8, 64, dtype=source.dtype)
        forbid_kernels(monkeypatch)
        pack(source, 0, run)
        monkeypatch.undo()
        assert raw_bytes(run.movedim(0, 2).reshape(2, 3, 32, 64)) == raw_bytes(source)

    def test_scattered_elements_are_left_to_torch_in_pieces(self) -> None:
        source = kv(2, 3, 64, 1024).transpose(2, 3)[:, :, :512]
        out = torch.zeros(2, 3, 512, 64, dtype=source.dtype)
        packing._copy(source, out)
        assert raw_bytes(out) == raw_bytes(source)

    def test_nothing_is_nothing(self) -> None:
        packing._copy(kv(2, 3, 0, 64), kv(2, 3, 0, 64))
