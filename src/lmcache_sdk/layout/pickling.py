"""The form up to 0.5.6, written by hand: the bytes around tensor data; the data themselves are copied once, in place.

Two forms. `stored_parts` is what a client sends, which a server loads with `pickle.loads`: per tensor
`torch.Tensor.reshape(torch.Tensor.view(torch.from_numpy(numpy.frombuffer(DATA, "u1")), DTYPE), SHAPE)`, public names
only, exact for every dtype on every release (torch's own form fails for fp8 on torch 2.13: PROTOCOL.md section 13).
DATA is a protocol-5 bytearray: numpy then makes a writable array, and the server's log stays free of a warning.
`reply_parts` is what a server sends: `_rebuild_tensor_v2` (`_v3`) on a legacy storage stream, in the structure of the
recorded replies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs
import torch

from lmcache_sdk.layout import unpickling as names
from lmcache_sdk.layout.dtypes import dtype_name, itemsize
from lmcache_sdk.layout.opcodes import Name

_MARK: Final = b"("
_TUPLE: Final = b"t"
_TUPLE1: Final = b"\x85"
_TUPLE2: Final = b"\x86"
_REDUCE: Final = b"R"
_MEMOIZE: Final = b"\x94"
_POP: Final = b"0"
_STOP: Final = b"."
_EMPTY_LIST: Final = b"]"
_APPENDS: Final = b"e"
_FALSE: Final = b"\x89"
_PROTOCOL_2: Final = b"\x80\x02"
_STORAGE_NAMES: Final = {dtype: name for name, dtype in names.STORAGES.items()}


@attrs.frozen(eq=False, repr=False)
class Parts:
    """What stands before all data, before and after the data of each tensor, and after all of it."""

    head: bytes
    before: Sequence[bytes]
    after: Sequence[bytes]
    tail: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of everything but the data."""
        return sum(map(len, (self.head, *self.before, *self.after, self.tail)))


def stored_parts(dtype: torch.dtype, shape: Sequence[int], num_tensors: int, nbytes: int) -> Parts:
    """The client's form for tensors of one dtype and shape, `nbytes` each."""
    # names and the shape are remembered once, under 0 to 5, and taken off the stack again
    functions = (names.RESHAPE, names.VIEW, names.FROM_NUMPY, names.FROM_BUFFER, Name("torch", dtype_name(dtype)))
    remembered = b"".join(_global(name) + _MEMOIZE + _POP for name in functions) + _shape(shape) + _MEMOIZE + _POP
    before = b"h\x00h\x01h\x02h\x03" + b"\x96" + nbytes.to_bytes(8, "little")
    array = _text("u1") + _TUPLE2 + _REDUCE
    viewed = _TUPLE1 + _REDUCE + b"h\x04" + _TUPLE2 + _REDUCE
    after = array + viewed + b"h\x05" + _TUPLE2 + _REDUCE
    head = b"\x80\x05" + remembered + _EMPTY_LIST + _MARK
    return Parts(head, [before] * num_tensors, [after] * num_tensors, _APPENDS + _STOP)


def reply_parts(tensors: Sequence[torch.Tensor]) -> Parts:
    """The server's form."""
    known: dict[Name, int] = {}
    before, after = [], []
    for index, tensor in enumerate(tensors):
        storage = _STORAGE_NAMES.get(tensor.dtype)
        rebuild = names.REBUILD_TYPED if storage is None else names.REBUILD
        stream = _storage_stream(tensor, storage, str(index))
        nbytes = len(stream) + tensor.nbytes
        data = b"B" + nbytes.to_bytes(4, "little") if nbytes < 2**32 else b"\x8e" + nbytes.to_bytes(8, "little")
        before.append(_named(rebuild, known) + _MARK + _named(names.LOAD, known) + data + stream)
        shape = tuple(tensor.shape)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        hooks = _named(names.ORDERED_DICT, known) + b")" + _REDUCE
        typed = b"" if storage is not None else _named(Name("torch", dtype_name(tensor.dtype)), known)
        call = b"K\x00" + _shape(shape) + _shape(strides) + _FALSE + hooks + typed + _TUPLE + _REDUCE
        after.append(_TUPLE1 + _REDUCE + call)
    head, tail = b"\x80\x04" + _EMPTY_LIST, _STOP
    return Parts(head + _MARK, before, after, _APPENDS + tail) if tensors else Parts(head, before, after, tail)


def _storage_stream(tensor: torch.Tensor, storage: str | None, key: str) -> bytes:
    """The five streams and the count that stand before a storage's bytes."""
    count = tensor.nbytes if storage is None else tensor.nbytes // itemsize(tensor.dtype)
    sizes = (("short", 2), ("int", 4), ("long", 4))
    type_sizes = b"}" + _MARK + b"".join(_long_text(name) + _int(size) for name, size in sizes) + b"u"
    system = (
        _long_text("protocol_version")
        + _int(names.LEGACY_PROTOCOL)
        + _long_text("little_endian")
        + b"\x88"
        + _long_text("type_sizes")
        + type_sizes
    )
    kind = names.UNTYPED if storage is None else Name("torch", storage)
    identity = _long_text("storage") + f"c{kind.module}\n{kind.attribute}\n".encode() + _long_text(key)
    streams = (
        b"\x8a\x0a" + names.MAGIC.to_bytes(10, "little"),
        _int(names.LEGACY_PROTOCOL),
        b"}" + _MARK + system + b"u",
        _MARK + identity + _long_text("cpu") + _int(count) + b"N" + _TUPLE + b"Q",
        _EMPTY_LIST + _long_text(key) + b"a",
    )
    return b"".join(_PROTOCOL_2 + stream + _STOP for stream in streams) + count.to_bytes(8, "little")


def _named(name: Name, known: dict[Name, int]) -> bytes:
    """A name: in full and remembered the first time, by its number after that."""
    if name in known:
        return b"h" + known[name].to_bytes(1, "little")
    known[name] = len(known)
    return _global(name) + _MEMOIZE


def _global(name: Name) -> bytes:
    return _text(name.module) + _text(name.attribute) + b"\x93"


def _shape(sizes: Sequence[int]) -> bytes:
    return _MARK + b"".join(_int(size) for size in sizes) + _TUPLE


def _int(value: int) -> bytes:
    if value < 2**16:
        return b"M" + value.to_bytes(2, "little")
    nbytes = value.bit_length() // 8 + 1
    return b"\x8a" + nbytes.to_bytes(1, "little") + value.to_bytes(nbytes, "little")


def _text(text: str) -> bytes:
    return b"\x8c" + len(text).to_bytes(1, "little") + text.encode()


def _long_text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()
