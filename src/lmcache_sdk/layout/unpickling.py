"""The form up to 0.5.6: bytes -> tensors on those bytes, through `opcodes.parse` and a meaning for each allowed name.

A server sends a list of `_rebuild_tensor_v2` calls (`_v3` for dtypes without a storage class), each on a storage that
travels as a legacy stream: five more streams, a count, then the raw little-endian bytes (PROTOCOL.md section 4.1).
Accepted are tensors as servers make them: contiguous, from the start of a storage of their own size. Clients may also
send the hand-written numpy form of `pickling.py`, read only when `stored` is set. Tensors are views; they must not be
written to unless the payload is the reader's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import torch

from lmcache_sdk.layout.dtypes import DTYPES, itemsize
from lmcache_sdk.layout.opcodes import Budget, Name, malformed, parse
from lmcache_sdk.layout.views import dtype_of, shape_nbytes, tensor_on

MAGIC: Final = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL: Final = 1001
REBUILD: Final = Name("torch._utils", "_rebuild_tensor_v2")
REBUILD_TYPED: Final = Name("torch._utils", "_rebuild_tensor_v3")
LOAD: Final = Name("torch.storage", "_load_from_bytes")
ORDERED_DICT: Final = Name("collections", "OrderedDict")
UNTYPED: Final = Name("torch.storage", "UntypedStorage")
STORAGES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "FloatStorage": torch.float32,
        "DoubleStorage": torch.float64,
        "ByteStorage": torch.uint8,
        "CharStorage": torch.int8,
        "ShortStorage": torch.int16,
        "IntStorage": torch.int32,
        "LongStorage": torch.int64,
        "BoolStorage": torch.bool,
    }
)

FROM_BUFFER: Final = Name("numpy", "frombuffer")
FROM_NUMPY: Final = Name("torch", "from_numpy")
VIEW: Final = Name("torch", "Tensor.view")
RESHAPE: Final = Name("torch", "Tensor.reshape")
_ENCODE: Final = Name("_codecs", "encode")
"""How protocol 2 spells bytes: text, and the codec that turns it into them."""

_DTYPE_NAMES: Final = MappingProxyType({Name("torch", name): name for name in DTYPES})
_OUTER: Final = frozenset({REBUILD, REBUILD_TYPED, LOAD, ORDERED_DICT, _ENCODE, *_DTYPE_NAMES})
_STORED: Final = _OUTER | {FROM_BUFFER, FROM_NUMPY, VIEW, RESHAPE}
_INNER: Final = frozenset({UNTYPED, *(Name("torch", name) for name in STORAGES)})
_OPCODES_PER_TENSOR: Final = 256
"""A tensor takes about 35 opcodes and its storage 50."""
_OPCODES_AROUND: Final = 1024


@attrs.frozen(eq=False, repr=False)
class _Storage:
    """Bytes, and the dtype when the storage has one."""

    dtype: torch.dtype | None
    data: memoryview


@attrs.frozen(eq=False, repr=False)
class _Built:
    """A finished tensor, wrapped: comparing a bare one with anything would compare its elements."""

    tensor: torch.Tensor


@attrs.frozen(eq=False, repr=False)
class _Hooks:
    """The empty OrderedDict that stands for no hooks."""


def read_tensors(payload: memoryview, *, max_tensors: int, max_nbytes: int, stored: bool) -> list[torch.Tensor]:
    """Reads a whole payload: at most that many tensors, of at most that many bytes together."""
    budget = Budget(_OPCODES_AROUND + _OPCODES_PER_TENSOR * max_tensors, len(payload))
    reader = _Reader(budget, max_nbytes)
    found, end = parse(payload, 0, names=_STORED if stored else _OUTER, reduce=reader.call, budget=budget)
    if end != len(payload):
        raise malformed(f"{len(payload) - end} bytes follow its end")
    if not isinstance(found, list) and not (stored and isinstance(found, tuple)):
        raise malformed("its value is not a list")
    if len(found) > max_tensors:
        raise malformed(f"{len(found)} tensors, expected at most {max_tensors}")
    tensors = [item.tensor for item in found if isinstance(item, _Built)]
    if len(tensors) != len(found):
        raise malformed("the list holds other things than tensors")
    if sum(tensor.nbytes for tensor in tensors) > max_nbytes:  # a tensor may be listed twice
        raise malformed(f"more than {max_nbytes} bytes of tensors")
    return tensors


class _Reader:
    """What the allowed names mean."""

    def __init__(self, budget: Budget, max_nbytes: int) -> None:
        self._budget = budget
        self._max_nbytes = max_nbytes

    def call(self, name: Name, arguments: tuple[object, ...]) -> object:
        if name == LOAD:
            return self._load_storage(_only_bytes(arguments))
        if name in (REBUILD, REBUILD_TYPED):
            return self._rebuild(name, arguments)
        if name == _ENCODE:
            return self._encode(arguments)
        if name == ORDERED_DICT:
            if arguments:
                raise malformed("hooks")
            return _Hooks()
        return self._call_by_hand(name, arguments)

    def _call_by_hand(self, name: Name, arguments: tuple[object, ...]) -> object:
        match arguments:
            case (memoryview() as data, "u1") if name == FROM_BUFFER:
                return _Storage(None, data)
            case (_Storage() as storage,) if name == FROM_NUMPY:
                return storage
            case (_Storage(dtype=None, data=data), Name() as dtype) if name == VIEW:
                return _Storage(self._dtype(dtype), data)
            case (_Storage(dtype=dtype, data=data), tuple() as shape) if name == RESHAPE:
                return _Built(self._tensor(data, dtype or torch.uint8, shape))
        raise malformed(f"{name.attribute} is called with other arguments than a tensor needs")

    def _encode(self, arguments: tuple[object, ...]) -> memoryview:
        match arguments:
            case (str() as text, "latin1"):
                self._budget.spend_copy(len(text))
                try:
                    return memoryview(bytearray(text, "latin-1"))
                except UnicodeEncodeError as error:
                    raise malformed("text that does not stand for bytes") from error
            case _:
                raise malformed("an encoding other than that of bytes")

    def _rebuild(self, name: Name, arguments: tuple[object, ...]) -> _Built:
        match name, arguments:
            case Name("torch._utils", "_rebuild_tensor_v2"), (
                _Storage(dtype=dtype) as storage,
                0,
                shape,
                stride,
                bool(),
                _Hooks(),
            ):
                pass
            case (
                Name("torch._utils", "_rebuild_tensor_v3"),
                (_Storage(dtype=None) as storage, 0, shape, stride, bool(), _Hooks(), Name() as named),
            ):
                dtype = self._dtype(named)
            case _:
                raise malformed("a tensor that is not a whole storage")
        if dtype is None or not isinstance(shape, tuple) or not isinstance(stride, tuple):
            raise malformed("a tensor without dtype, shape or strides")
        tensor = self._tensor(storage.data, dtype, shape)
        _check_contiguous(tensor.shape, stride)
        return _Built(tensor)

    def _tensor(self, data: memoryview, dtype: torch.dtype, shape: tuple[object, ...]) -> torch.Tensor:
        nbytes = shape_nbytes(shape, dtype, "payload.shape")
        if nbytes != len(data) or nbytes > self._max_nbytes:
            raise malformed(
                f"a shape of {nbytes} bytes on a storage of {len(data)}, at most {self._max_nbytes} allowed"
            )
        return tensor_on(data, dtype, [size for size in shape if isinstance(size, int)])

    def _dtype(self, name: Name) -> torch.dtype:
        return dtype_of(_DTYPE_NAMES.get(name, name.attribute), "payload.dtype")

    def _load_storage(self, data: memoryview) -> _Storage:
        """The five streams, the count and the bytes of one storage."""
        streams: list[object] = []
        position = 0
        for _ in range(5):
            value, position = parse(
                data, position, names=_INNER, reduce=_refuse_call, budget=self._budget, load=_storage_of_id
            )
            streams.append(value)
        match streams:
            case [int() as magic, int() as protocol, {"little_endian": True}, _StorageId() as named, [str() as key]]:
                if magic != MAGIC or protocol != LEGACY_PROTOCOL or key != named.key:
                    raise malformed("a storage of another kind")
            case _:
                raise malformed("not a storage")
        raw = data[position + 8 :]
        count = int.from_bytes(data[position : position + 8], "little", signed=True)
        if count != named.num_elements or len(raw) != count * (1 if named.dtype is None else itemsize(named.dtype)):
            raise malformed(f"a storage of {named.num_elements} elements with {len(raw)} bytes")
        return _Storage(named.dtype, raw)


def _refuse_call(name: Name, _: tuple[object, ...]) -> object:
    raise malformed(f"a call of {name.attribute} inside a storage")


@attrs.frozen(eq=False, repr=False)
class _StorageId:
    """The persistent id of a storage."""

    dtype: torch.dtype | None
    key: str
    num_elements: int


def _storage_of_id(found: object) -> _StorageId:
    match found:
        case ("storage", Name() as kind, str() as key, "cpu", int() as num_elements, None):
            return _StorageId(STORAGES.get(kind.attribute), key, num_elements)  # UntypedStorage has no dtype
        case _:
            raise malformed("a storage that is not on the CPU")


def _only_bytes(arguments: tuple[object, ...]) -> memoryview:
    match arguments:
        case (memoryview() as data,):
            return data
        case _:
            raise malformed("a storage that is not bytes")


def _check_contiguous(shape: Sequence[int], stride: tuple[object, ...]) -> None:
    expected = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # the stride of an axis of length 1 says nothing, and torch writes odd ones for it
    if len(stride) != len(shape) or any(
        size > 1 and found != step for size, found, step in zip(shape, stride, expected, strict=True)
    ):
        raise malformed("a tensor that is not contiguous")
