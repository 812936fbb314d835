"""Inline payloads: what we write is what peers load, what peers write is what we read, to the bit."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.errors import LocalProtocolError, RemoteProtocolError, UnsupportedError
from lmcache_sdk.layout import (
    KVLayout,
    as_chunk,
    max_chunks_per_payload,
    payload_frame_nbytes,
    payload_of_tensors,
    read_payload,
    read_stored_payload,
    write_payload_into,
)
from lmcache_sdk.layout.dtypes import DTYPES
from lmcache_sdk.layout.pickling import stored_parts
from lmcache_sdk.protocol import PayloadForm
from tests.layout.frames import frame_of
from tests.layout.golden import raw_bytes
from tests.layout.peers import dumped_elsewhere, loaded_elsewhere
from tests.layout.strategies import bits, layouts

forms = st.sampled_from(PayloadForm)
CHUNK = 4
SPECIAL = {
    torch.bfloat16: [0x7FC1, 0x7F81, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x7F7F],
    torch.float16: [0x7E01, 0x7C01, 0xFE01, 0x7C00, 0xFC00, 0x8000, 0x0001, 0x7BFF],
}
"""Quiet and signalling NaNs with a payload, both infinities, minus zero, the least and the largest number."""


def layout_of(dtype: torch.dtype, **numbers: int | bool) -> KVLayout:
    return KVLayout(**{"num_layers": 2, "dtype": dtype, "num_kv_heads": 2, "head_dim": 4, **numbers})  # type: ignore[arg-type] # a table of numbers and flags


def payload_of_frame(frame: bytearray) -> memoryview:
    """What the MessagePack header announces: everything that follows it."""
    return msgspec.msgpack.decode(frame, type=memoryview)


def kv_of(layout: KVLayout, num_tokens: int, seed: int = 0) -> torch.Tensor:
    return bits((layout.planes, layout.num_layers, num_tokens, layout.hidden_dim), layout.dtype, seed)


def chunk_bytes(kv: torch.Tensor, index: int, chunk_size: int) -> bytes:
    return raw_bytes(kv[:, :, index * chunk_size : (index + 1) * chunk_size])


@given(layouts(), st.integers(1, 5), st.integers(1, 4), forms, st.data())
def test_what_is_written_is_read_to_the_bit(
    layout: KVLayout, chunk_size: int, total: int, form: PayloadForm, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - first))
    kv = kv_of(layout, total * chunk_size, seed=total)
    frame = frame_of(kv, layout, chunk_size, first, count, form)
    assert len(frame) == payload_frame_nbytes(layout, chunk_size, count, form)
    tensors = read_stored_payload(payload_of_frame(frame), form, max_nbytes=count * layout.chunk_nbytes(chunk_size))
    assert len(tensors) == count
    for index, tensor in enumerate(tensors, first):
        assert tensor.dim() == (3 if layout.one_plane else 4)
        assert tensor.dtype == layout.dtype
        chunk = as_chunk(tensor, chunk_size)
        assert tuple(chunk.shape) == layout.chunk_shape(chunk_size)
        assert raw_bytes(chunk) == chunk_bytes(kv, index, chunk_size)


@given(st.lists(st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from(sorted(DTYPES)))), forms)
def test_what_a_server_writes_is_read_to_the_bit(kinds: list[tuple[list[int], str]], form: PayloadForm) -> None:
    tensors = [bits(tuple(shape), DTYPES[name], seed=index) for index, (shape, name) in enumerate(kinds)]
    payload = payload_of_tensors(tensors, form)
    total = sum(tensor.nbytes for tensor in tensors)
    again = read_payload(memoryview(payload), form, num_tensors=len(tensors), max_nbytes=total)
    assert [(t.dtype, t.shape, raw_bytes(t)) for t in again] == [(t.dtype, t.shape, raw_bytes(t)) for t in tensors]


@pytest.mark.parametrize("form", PayloadForm)
def test_many_tensors_are_within_the_budget(form: PayloadForm) -> None:
    """The smallest limit that lets them through is the one that is asked for."""
    tensors = [bits((1, 1, 2, 1), torch.bfloat16, seed) for seed in range(5000)]
    payload = memoryview(payload_of_tensors(tensors, form))
    again = read_payload(payload, form, num_tensors=5000, max_nbytes=5000 * 4)
    assert raw_bytes(again[-1]) == raw_bytes(tensors[-1])


@pytest.mark.parametrize("form", PayloadForm)
def test_source_tensors_may_be_views_with_gradients(form: PayloadForm) -> None:
    layout = layout_of(torch.float32)
    base = torch.arange(2 * 2 * 8 * 2 * CHUNK, dtype=torch.float32).view(2, 2, 8, 2 * CHUNK).requires_grad_()
    kv = base.transpose(2, 3)
    frame = frame_of(kv, layout, CHUNK, 1, 1, form)
    [tensor] = read_stored_payload(payload_of_frame(frame), form, max_nbytes=2**20)
    assert torch.equal(tensor, kv[:, :, CHUNK:].detach())


def test_peers_load_what_we_store() -> None:
    """The stored form through the standard unpickler, warnings being errors: every dtype, one plane and two."""
    kinds = [layout_of(dtype) for dtype in DTYPES.values()]
    kinds += [layout_of(torch.bfloat16, num_kv_heads=1, is_mla=True), layout_of(torch.float16, is_fused=True)]
    sources = [kv_of(layout, 3 * CHUNK, seed) for seed, layout in enumerate(kinds)]
    for dtype, patterns in SPECIAL.items():
        kinds.append(layout_of(dtype, head_dim=len(patterns), num_kv_heads=1))
        numbers = torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(dtype)
        sources.append(numbers.expand(2, 2, 3 * CHUNK, len(patterns)))
    frames = [frame_of(kv, layout, CHUNK, 1, 2, PayloadForm.PICKLE) for kv, layout in zip(sources, kinds, strict=True)]
    answers = loaded_elsewhere([bytes(payload_of_frame(frame)) for frame in frames])
    assert len(answers) == len(DTYPES) + 4
    for (container, tensors), layout, kv in zip(answers, kinds, sources, strict=True):
        assert container == "list"
        shape = list(layout.chunk_shape(CHUNK)[1 if layout.one_plane else 0 :])
        assert tensors == [(str(layout.dtype), shape, chunk_bytes(kv, index, CHUNK)) for index in (1, 2)]


def test_peers_load_what_we_reply() -> None:
    """The server's form; not fp8 and other dtypes without a storage class, which torch 2.13 itself does not load."""
    names = ["bfloat16", "bool", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8"]
    tensors = [bits((2, 1, 4, 2), DTYPES[name], seed) for seed, name in enumerate(names)]
    payloads = [payload_of_tensors([], PayloadForm.PICKLE), payload_of_tensors(tensors, PayloadForm.PICKLE)]
    empty, full = loaded_elsewhere(payloads)
    assert empty == ("list", [])
    assert full == (
        "list",
        [(f"torch.{name}", [2, 1, 4, 2], raw_bytes(t)) for name, t in zip(names, tensors, strict=True)],
    )


def test_we_read_what_peers_dump() -> None:
    """Pickles of torch's own, of every protocol in use, as other clients send them; the largest is beyond one frame."""
    tensors = [bits((2, 1, 4, 2), dtype, seed) for seed, dtype in enumerate(DTYPES.values())]
    large = [bits((2, 2, 64, 300), torch.bfloat16, seed=5)]
    cases = [
        (protocol, kind, part) for protocol in (2, 3, 4, 5) for kind in ("list", "tuple") for part in (tensors, large)
    ]
    for (protocol, kind, part), payload in zip(cases, dumped_elsewhere(cases), strict=True):
        total = sum(tensor.nbytes for tensor in part)
        found = read_stored_payload(memoryview(payload), PayloadForm.PICKLE, max_tensors=len(part), max_nbytes=total)
        assert [raw_bytes(t) for t in found] == [raw_bytes(t) for t in part], (protocol, kind)
        assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in part]


def test_a_server_is_not_expected_to_send_the_clients_form() -> None:
    layout = layout_of(torch.bfloat16)
    frame = frame_of(kv_of(layout, CHUNK), layout, CHUNK, 0, 1, PayloadForm.PICKLE)
    with pytest.raises(RemoteProtocolError, match=r"'Tensor\.reshape' is not allowed"):
        read_payload(payload_of_frame(frame), PayloadForm.PICKLE, num_tensors=1, max_nbytes=2**20)


@pytest.mark.parametrize("form", PayloadForm)
def test_reading_copies_nothing_that_is_writable(form: PayloadForm) -> None:
    payload = payload_of_tensors([torch.full((1000,), 5, dtype=torch.uint8)], form)
    [tensor] = read_payload(memoryview(payload), form, num_tensors=1, max_nbytes=1000)
    payload[payload.index(b"\x05" * 1000) + 7] = 9
    assert tensor[7] == 9


@pytest.mark.parametrize("form", PayloadForm)
def test_reading_leaves_read_only_bytes_alone(form: PayloadForm) -> None:
    payload = bytes(payload_of_tensors([torch.zeros(1000, dtype=torch.uint8)], form))
    before = bytes(bytearray(payload))
    [tensor] = read_payload(memoryview(payload), form, num_tensors=1, max_nbytes=1000)
    tensor.fill_(1)
    assert payload == before


@pytest.mark.parametrize("form", PayloadForm)
def test_a_buffer_of_another_length_is_our_own_mistake(form: PayloadForm) -> None:
    layout = layout_of(torch.bfloat16)
    kv, length = kv_of(layout, CHUNK), payload_frame_nbytes(layout, CHUNK, 1, form)
    for wrong in (length - 1, length + 1):
        with pytest.raises(LocalProtocolError, match=f"takes {length} bytes"):
            write_payload_into(memoryview(bytearray(wrong)), kv, layout, CHUNK, 0, 1, form)
    buffer = bytearray(length)
    write_payload_into(memoryview(buffer), kv, layout, CHUNK, 0, 1, form)
    assert buffer == frame_of(kv, layout, CHUNK, 0, 1, form)


@pytest.mark.parametrize("form", PayloadForm)
@pytest.mark.parametrize(("layers", "chunk_size"), [(1, 1), (36, 256), (61, 256), (2**20, 256)])
def test_the_largest_payload_fits_a_frame_and_one_more_chunk_would_not(
    form: PayloadForm, layers: int, chunk_size: int
) -> None:
    layout = KVLayout(num_layers=layers, dtype=torch.bfloat16, hidden_dim=1 if layers > 100 else 1024)
    most = max_chunks_per_payload(layout, chunk_size)
    assert payload_frame_nbytes(layout, chunk_size, most, form) < 2**32
    around = 4096 + 256 * (most + 1)
    assert most == 65536 or (most + 1) * layout.chunk_nbytes(chunk_size) + around > 2**32


def test_what_stands_around_the_data_is_less_than_what_is_allowed_for_it() -> None:
    shape = [2**31 - 1] * 4
    parts = stored_parts(torch.float8_e4m3fnuz, shape, 1, 2**31)
    assert len(parts.head) + len(parts.tail) <= 4096
    assert len(parts.before[0]) + len(parts.after[0]) <= 256


def test_a_chunk_too_large_for_a_message_is_unsupported() -> None:
    layout = KVLayout(num_layers=2**20, dtype=torch.bfloat16, hidden_dim=1024)
    with pytest.raises(UnsupportedError, match="does not fit a message"):
        max_chunks_per_payload(layout, 256)


@pytest.mark.parametrize("form", PayloadForm)
def test_more_than_was_allowed_is_refused(form: PayloadForm) -> None:
    payload = memoryview(payload_of_tensors([torch.zeros(4), torch.zeros(4)], form))
    with pytest.raises(RemoteProtocolError, match="tensors"):
        read_stored_payload(payload, form, max_tensors=1, max_nbytes=2**20)
    with pytest.raises(RemoteProtocolError, match="bytes"):
        read_stored_payload(payload, form, max_tensors=2, max_nbytes=31)
    assert len(read_stored_payload(payload, form, max_tensors=2, max_nbytes=32)) == 2
