"""Target 1: any bytes as an inline payload are tensors within bounds, or `RemoteProtocolError`.

The first byte of an input chooses how the rest is read:
bit 0 envelope (else pickle), bit 1 as a server reads what clients store, bit 2 read-only memory,
bits 3 and 4 the number of tensors asked for, bits 5 and 6 how many bytes they may have.
"""

from __future__ import annotations

from typing import Final

import torch

from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.layout import read_payload, read_stored_payload
from lmcache_sdk.layout.dtypes import DTYPES
from lmcache_sdk.protocol import PayloadForm

from .guard import MARKS, Violation

MAX_LEN: Final = 1536
ENVELOPE: Final = 1
STORED: Final = 2
READ_ONLY: Final = 4
COUNT_SHIFT: Final = 3
ROOM_SHIFT: Final = 5
_DTYPES: Final = tuple(DTYPES.values())


def check(data: bytes) -> None:
    """One execution."""
    if not data:
        return
    how, payload = data[0], data[1:]
    form = PayloadForm.ENVELOPE if how & ENVELOPE else PayloadForm.PICKLE
    room = (len(payload), 64, len(payload) // 2, 2**40)[how >> ROOM_SHIFT & 3]
    memory: bytes | bytearray = payload if how & READ_ONLY else bytearray(payload)
    num_tensors = how >> COUNT_SHIFT & 3
    try:
        if how & STORED:
            tensors = read_stored_payload(memoryview(memory), form, max_nbytes=room)
        else:
            tensors = read_payload(memoryview(memory), form, num_tensors=num_tensors, max_nbytes=room)
    except RemoteProtocolError:
        return
    if not how & STORED and len(tensors) != num_tensors:
        raise Violation(f"{len(tensors)} tensors, {num_tensors} asked for")
    for tensor in tensors:
        MARKS.hit(how & (ENVELOPE | STORED) | tensor.dim() << 2 | _DTYPES.index(tensor.dtype) << 7)
    _check_tensors(tensors, len(payload), room)
    if memory != payload:
        raise Violation("the payload was written to")


def _check_tensors(tensors: list[torch.Tensor], nbytes: int, room: int) -> None:
    """Plain tensors whose bytes are all there, and no more of them than arrived."""
    distinct: dict[int, int] = {}
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.requires_grad or not tensor.is_contiguous():
            raise Violation(f"not a plain tensor: {type(tensor)}")
        storage = tensor.untyped_storage()
        if tensor.storage_offset() or storage.nbytes() < tensor.nbytes:
            raise Violation(f"a tensor of {tensor.nbytes} bytes on a storage of {storage.nbytes()}")
        distinct[tensor.data_ptr()] = tensor.nbytes
        tensor.view(-1).view(torch.uint8).sum()  # reads every byte: memory that is not ours would crash here
    if sum(tensor.nbytes for tensor in tensors) > room:
        raise Violation(f"more than {room} bytes of tensors")
    if sum(distinct.values()) > nbytes:
        raise Violation(f"{sum(distinct.values())} bytes of tensors from {nbytes} bytes")
