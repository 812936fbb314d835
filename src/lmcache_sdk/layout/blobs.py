"""Inline payloads: tensors <-> the opaque bytes that travel inside a message.

Reading: whatever arrives, `read_payload` returns tensors or raises `RemoteProtocolError`, in time and memory linear in
what was received. The tensors are views of the payload (a read-only payload is copied once): use them, then let the
frame go. Writing: `write_payload_into` fills one frame, header included, and each chunk's bytes are copied once, from
the user's tensor into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_sdk.errors import LocalProtocolError, RemoteProtocolError, UnsupportedError
from lmcache_sdk.layout.axes import KV
from lmcache_sdk.layout.dtypes import dtype_name
from lmcache_sdk.layout.geometry import KVLayout
from lmcache_sdk.layout.packing import pack_chunk
from lmcache_sdk.layout.pickling import Parts, reply_parts, stored_parts
from lmcache_sdk.layout.unpickling import read_tensors
from lmcache_sdk.layout.views import dtype_of, shape_nbytes, tensor_on
from lmcache_sdk.protocol import (
    MAX_BIN_NBYTES,
    MAX_TENSOR_NBYTES,
    MAX_TENSORS,
    PayloadForm,
    bin_header,
    decode_envelope,
    envelope_head,
    tensor_head,
)

_AROUND_PAYLOAD = 4096
_AROUND_TENSOR = 256
"""More than what both forms put around a payload and around each tensor."""


def read_payload(payload: memoryview, form: PayloadForm, *, num_tensors: int, max_nbytes: int) -> list[torch.Tensor]:
    """Reads what a server sent.

    Args:
        payload: the bytes; results are views of them.
        form: how this server's release writes them.
        num_tensors: how many tensors were asked for; another number is an error.
        max_nbytes: how many bytes they may have together.
    """
    tensors = _read(payload, form, num_tensors, max_nbytes, stored=False)
    if len(tensors) != num_tensors:
        raise RemoteProtocolError(f"payload: {len(tensors)} tensors, {num_tensors} were asked for", path="payload")
    return tensors


def read_stored_payload(
    payload: memoryview, form: PayloadForm, *, max_nbytes: int, max_tensors: int = MAX_TENSORS
) -> list[torch.Tensor]:
    """Reads what a client sent to be stored, for a server: the hand-written form, a tuple, any number of tensors."""
    return _read(payload, form, max_tensors, max_nbytes, stored=True)


def max_chunks_per_payload(layout: KVLayout, chunk_size: int) -> int:
    """How many chunks one frame can carry in either form."""
    nbytes = layout.chunk_nbytes(chunk_size)
    if nbytes > MAX_TENSOR_NBYTES:
        raise UnsupportedError(
            f"a chunk of {nbytes} bytes does not fit a message: {MAX_TENSOR_NBYTES} is the limit", request="store"
        )
    return min(MAX_TENSORS, (MAX_BIN_NBYTES - _AROUND_PAYLOAD) // (nbytes + _AROUND_TENSOR))


def payload_frame_nbytes(layout: KVLayout, chunk_size: int, num_chunks: int, form: PayloadForm) -> int:
    """The length of the frame that `write_payload_into` fills."""
    parts = _parts(layout, chunk_size, num_chunks, form)
    nbytes = parts.nbytes + num_chunks * layout.chunk_nbytes(chunk_size)
    return len(bin_header(nbytes)) + nbytes


def write_payload_into(
    out: memoryview,
    kv: torch.Tensor,
    layout: KVLayout,
    chunk_size: int,
    first_chunk: int,
    num_chunks: int,
    form: PayloadForm,
) -> None:
    """Writes the frame that carries some chunks: a MessagePack bin header, then the payload.

    Args:
        out: a buffer of exactly `payload_frame_nbytes`.
        kv: a tensor that `check_kv` has passed; it holds at least the chunks asked for.
        layout: what the server was told at registration.
        chunk_size: tokens per chunk.
        first_chunk: the first chunk of `kv` to send.
        num_chunks: how many, at most `max_chunks_per_payload`.
        form: how this server's release reads them.
    """
    parts = _parts(layout, chunk_size, num_chunks, form)
    nbytes = layout.chunk_nbytes(chunk_size)
    shape = _sent_shape(layout, chunk_size)
    header = bin_header(parts.nbytes + num_chunks * nbytes)
    for index, place in enumerate(_fill(out, header, parts, [nbytes] * num_chunks), first_chunk):
        pack_chunk(kv, index, chunk_size, tensor_on(place, layout.dtype, shape))


def payload_of_tensors(tensors: Sequence[torch.Tensor], form: PayloadForm) -> bytearray:
    """Writes what a server replies with, without a header: any tensors, each of its own dtype and shape."""
    if form is PayloadForm.PICKLE:
        parts = reply_parts(tensors)
    else:
        before = [tensor_head(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes) for tensor in tensors]
        parts = Parts(envelope_head(len(tensors)), before, [b""] * len(tensors), b"")
    sizes = [tensor.nbytes for tensor in tensors]
    payload = bytearray(parts.nbytes + sum(sizes))
    for place, tensor in zip(_fill(memoryview(payload), b"", parts, sizes), tensors, strict=True):
        tensor_on(place, tensor.dtype, tensor.shape).copy_(tensor.detach())
    return payload


def _read(
    payload: memoryview, form: PayloadForm, max_tensors: int, max_nbytes: int, *, stored: bool
) -> list[torch.Tensor]:
    whole = memoryview(bytearray(payload)) if payload.readonly or not payload.c_contiguous else payload.cast("B")
    if form is PayloadForm.PICKLE:
        return read_tensors(whole, max_tensors=max_tensors, max_nbytes=max_nbytes, stored=stored)
    typed = decode_envelope(whole).tensors
    total = sum(len(each.data) for each in typed)
    if len(typed) > max_tensors or total > max_nbytes:
        problem = f"{len(typed)} tensors of {total} bytes, at most {max_tensors} of {max_nbytes} are allowed"
        raise RemoteProtocolError(f"payload: {problem}", path="payload")
    tensors = []
    for index, each in enumerate(typed):
        where = f"payload.tensors[{index}]"
        dtype = dtype_of(each.dtype, f"{where}.dtype")
        nbytes = shape_nbytes(each.shape, dtype, f"{where}.shape")
        if nbytes != len(each.data):
            problem = f"{len(each.data)} bytes, but {list(each.shape)} of {each.dtype} takes {nbytes}"
            raise RemoteProtocolError(f"{where}.data: {problem}", path=f"{where}.data")
        tensors.append(tensor_on(each.data, dtype, each.shape))
    return tensors


def _sent_shape(layout: KVLayout, chunk_size: int) -> tuple[int, ...]:
    """One plane travels as `[layer, token, hidden]`: servers up to 0.5.6 lose `[1, ...]` (PROTOCOL.md section 13)."""
    shape = layout.chunk_shape(chunk_size)
    return shape[KV + 1 :] if layout.one_plane else shape


def _parts(layout: KVLayout, chunk_size: int, num_chunks: int, form: PayloadForm) -> Parts:
    shape, nbytes = _sent_shape(layout, chunk_size), layout.chunk_nbytes(chunk_size)
    if form is PayloadForm.PICKLE:
        return stored_parts(layout.dtype, shape, num_chunks, nbytes)
    before = tensor_head(dtype_name(layout.dtype), shape, nbytes)
    return Parts(envelope_head(num_chunks), [before] * num_chunks, [b""] * num_chunks, b"")


def _fill(out: memoryview, header: bytes, parts: Parts, sizes: Sequence[int]) -> list[memoryview]:
    """Writes everything but the data, and returns where each tensor's data go."""
    expected = len(header) + parts.nbytes + sum(sizes)
    if len(out) != expected:
        raise LocalProtocolError(f"the payload takes {expected} bytes, the buffer has {len(out)}")
    places = []
    position = _put(out, _put(out, 0, header), parts.head)
    for before, nbytes, after in zip(parts.before, sizes, parts.after, strict=True):
        start = _put(out, position, before)
        places.append(out[start : start + nbytes])
        position = _put(out, start + nbytes, after)
    _put(out, position, parts.tail)
    return places


def _put(out: memoryview, position: int, piece: bytes) -> int:
    end = position + len(piece)
    out[position:end] = piece
    return end
