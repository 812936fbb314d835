"""The typed envelope of 0.5.7, MessagePack `{version: 1, tensors: [{dtype, shape, data}, ...]}`; and bin headers.

`decode_envelope` takes a payload and returns the struct, its data zero-copy views of the payload, or raises
`RemoteProtocolError`. Whether a tensor's bytes fit its dtype and shape is not known here: the layout layer checks it.
The writer gets the pieces that stand around the data (`envelope_head`, `tensor_head`), so that tensor bytes are copied
once, straight into the frame that goes out. Limits: PROTOCOL.md section 4.2. The multi-group form is refused, as is
any other field.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from lmcache_sdk.errors import LocalProtocolError, RemoteProtocolError

MAX_RANK: Final = 16
MAX_TENSORS: Final = 65536
MAX_TENSOR_NBYTES: Final = 2**31
MAX_ENVELOPE_NBYTES: Final = 2**34
MAX_BIN_NBYTES: Final = 2**32 - 1
"""MessagePack's longest bin: what one frame can carry."""
_MAX_DIMENSION: Final = 2**40
_MAX_DTYPE_NAME: Final = 64

_Dimension = Annotated[int, msgspec.Meta(ge=1, le=_MAX_DIMENSION)]


class PayloadForm(enum.Enum):
    """How tensors travel inline."""

    PICKLE = "pickle"
    """Up to 0.5.6; read by a parser of our own and written by hand (PROTOCOL.md section 4.1)."""
    ENVELOPE = "envelope"
    """From 0.5.7."""


class TypedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: C order, little endian, no padding."""

    dtype: Annotated[str, msgspec.Meta(max_length=_MAX_DTYPE_NAME)]
    shape: Annotated[tuple[_Dimension, ...], msgspec.Meta(min_length=1, max_length=MAX_RANK)]
    data: memoryview


class TensorEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensors of one payload, in chunk order."""

    version: Literal[1]
    # the length limit is checked before msgspec makes the list, so a header cannot make it allocate what it claims
    tensors: Annotated[list[TypedTensor], msgspec.Meta(max_length=MAX_TENSORS)]


_DECODER: Final = msgspec.msgpack.Decoder(TensorEnvelope, strict=True)


def decode_envelope(payload: memoryview) -> TensorEnvelope:
    """Reads a payload; the tensors' data are views of it."""
    try:
        envelope = _DECODER.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise RemoteProtocolError(f"payload: not a tensor envelope: {error}", path="payload") from error
    total = 0
    for index, tensor in enumerate(envelope.tensors):
        nbytes = len(tensor.data)
        total += nbytes
        if nbytes > MAX_TENSOR_NBYTES or total > MAX_ENVELOPE_NBYTES:
            where = f"payload.tensors[{index}].data"
            raise RemoteProtocolError(f"{where}: {nbytes} bytes are over the envelope's limits", path=where)
    return envelope


def envelope_head(num_tensors: int) -> bytes:
    """What stands before the first tensor."""
    if not 0 <= num_tensors <= MAX_TENSORS:
        raise LocalProtocolError(f"an envelope holds at most {MAX_TENSORS} tensors, not {num_tensors}")
    return b"\x82\xa7version\x01\xa7tensors" + _array_header(num_tensors)


def tensor_head(dtype: str, shape: Sequence[int], nbytes: int) -> bytes:
    """What stands before the bytes of one tensor; nothing stands after them."""
    if not 1 <= len(shape) <= MAX_RANK or not 0 <= nbytes <= MAX_TENSOR_NBYTES:
        raise LocalProtocolError(
            f"an envelope takes 1 to {MAX_RANK} axes and 2 GiB a tensor: {list(shape)}, {nbytes} bytes"
        )
    encode = msgspec.msgpack.encode
    return b"\x83\xa5dtype" + encode(dtype) + b"\xa5shape" + encode(tuple(shape)) + b"\xa4data" + bin_header(nbytes)


def bin_header(nbytes: int) -> bytes:
    """The shortest MessagePack header of `nbytes` bytes of binary data."""
    if not 0 <= nbytes <= MAX_BIN_NBYTES:
        raise LocalProtocolError(f"a frame carries at most {MAX_BIN_NBYTES} bytes, not {nbytes}")
    if nbytes < 2**8:
        return b"\xc4" + nbytes.to_bytes(1, "big")
    if nbytes < 2**16:
        return b"\xc5" + nbytes.to_bytes(2, "big")
    return b"\xc6" + nbytes.to_bytes(4, "big")


def _array_header(length: int) -> bytes:
    if length < 2**4:
        return bytes([0x90 | length])
    if length < 2**16:
        return b"\xdc" + length.to_bytes(2, "big")
    return b"\xdd" + length.to_bytes(4, "big")
