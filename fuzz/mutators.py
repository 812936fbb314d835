"""Mutations that keep an input well-formed on the outside, so that what is inside gets read.

One mutation in a few is made here, the others by libFuzzer, which is blind but fast. Payloads are cut into opcodes;
MessagePack and JSON are decoded, changed at one place and encoded again; lengths in front are made true.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from . import frames, payloads

Mutate = Callable[[bytes, int], bytes]
"""libFuzzer's own mutation: data, longest result."""

_STRUCTURED: Final = 4
"""One mutation in so many is made here."""

_NAMES: Final = (
    *("torch._utils\n_rebuild_tensor_v2", "torch._utils\n_rebuild_tensor_v3", "torch.storage\n_load_from_bytes"),
    *("collections\nOrderedDict", "_codecs\nencode", "numpy\nfrombuffer", "torch\nfrom_numpy", "torch\nTensor.view"),
    *("torch\nTensor.reshape", "torch\nbfloat16", "torch\nfloat8_e4m3fn", "torch.storage\nUntypedStorage"),
    *("torch\nBoolStorage", "torch\nLongStorage", "os\nsystem", "builtins\neval"),
)
TOKENS: Final[tuple[bytes, ...]] = (
    *(bytes([code]) for code in b"(0N\x88\x89]})t\x85\x86\x87aeuRQ\x94\x93."),
    *(b"c" + name.encode() + b"\n" for name in _NAMES),
    *(b"K\x00", b"K\x01", b"K\x02", b"M\x00\x01", b"J\xff\xff\xff\xff", b"\x8a\x02\xff\x7f", b"h\x00", b"q\x00"),
    *(b"\x8c\x02u1", b"\x8c\x06latin1", b"\x8c\x03cpu", b"\x8c\x07storage", b"X\x01\x00\x00\x000", b"C\x01a", b"C\x00"),
    *(b"B\x04\x00\x00\x00abcd", b"\x80\x04", b"\x80\x02"),
)
_FIXED: Final = {"K": 1, "M": 2, "J": 4, "h": 1, "q": 1, "j": 4, "r": 4}
_COUNTED: Final = {0x8A: 1, 0x8C: 1, ord("C"): 1, ord("X"): 4, ord("B"): 4, 0x8D: 8, 0x8E: 8, 0x96: 8}
_ARGUMENTS: Final = {**{ord(code): size for code, size in _FIXED.items()}, 0x80: 1, 0x95: 8}
_SCALARS: Final[tuple[object, ...]] = (
    *(None, True, False, 0, 1, 2, -1, 16, 255, 256, 2**20, 2**31, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, 1e308, "", "m", "bfloat16", "torch.uint8", "NP", [], {}, [1], [0], {"a": 1}, b"", b"abcd", b"abcde"),
)


def opcodes_of(stream: bytes) -> list[bytes]:
    """Cuts a stream into opcodes with their arguments; what it cannot cut stays in one piece at the end."""
    found, at = [], 0
    while at < len(stream):
        code = stream[at]
        end = at + 1 + _ARGUMENTS.get(code, 0)
        if code in _COUNTED:
            counted = at + 1 + _COUNTED[code]
            end = counted + int.from_bytes(stream[at + 1 : counted], "little")
        elif code == ord("c"):
            second = stream.find(b"\n", at) + 1 and stream.find(b"\n", stream.find(b"\n", at) + 1)
            end = second + 1 if second > 0 else len(stream)
        found.append(stream[at:end])
        at = end
    return found


def payload(data: bytes, max_size: int, seed: int, mutate: Mutate) -> bytes:
    """Mutates an input of the payload target."""
    if seed % _STRUCTURED or len(data) < 3:
        return mutate(data, max_size)
    pick = random.Random(seed)
    if data[0] & payloads.ENVELOPE:
        return (data[:1] + _changed_msgpack(data[1:], pick))[:max_size]
    tokens = opcodes_of(data[1:])  # not empty, and no token is
    at = pick.randrange(len(tokens))
    if pick.random() < 0.5:
        long = [index for index, token in enumerate(tokens) if len(token) > 40 and token[0] in b"BC\x8e"]
        at = pick.choice(long) if long else at
    tokens[at : at + 1] = _changed_token(tokens[at], tokens, pick, mutate)
    return (data[:1] + b"".join(tokens))[:max_size]


def _changed_token(token: bytes, tokens: list[bytes], pick: random.Random, mutate: Mutate) -> list[bytes]:
    """What stands in the place of one opcode."""
    size = _COUNTED.get(token[0])
    if size is not None and len(token) > 1 + size:
        inner = token[1 + size :]
        if b"\x80\x02" in inner[:2] and pick.random() < 0.7:
            parts = opcodes_of(inner)
            index = pick.randrange(len(parts))
            parts[index : index + 1] = _changed_token(parts[index], parts, pick, mutate)
            inner = b"".join(parts)
        else:
            inner = mutate(inner, len(inner) + 8)
        length = min(len(inner), 2 ** (8 * size) - 1)
        return [token[:1] + length.to_bytes(size, "little") + inner[:length]]
    match pick.randrange(6):
        case 0:
            return []
        case 1:
            return [token, token]
        case 2:
            return [pick.choice(TOKENS), token]
        case 3:
            return [pick.choice(tokens), token]
        case 4:
            return [token[:1] + mutate(token[1:], len(token) - 1)] if len(token) > 1 else [pick.choice(TOKENS)]
        case _:
            return [pick.choice(TOKENS)]


def frame(data: bytes, max_size: int, seed: int, mutate: Mutate) -> bytes:
    """Mutates an input of the frames target."""
    if seed % _STRUCTURED or len(data) <= frames.HEAD:
        return mutate(data, max_size)
    pick = random.Random(seed)
    parts = frames.split(data[frames.HEAD :], frames.num_frames(data))
    at = pick.randrange(len(parts))
    parts[at] = _changed_msgpack(parts[at], pick)[: 2**16 - 1]
    return (data[: frames.HEAD] + frames.join(parts))[:max_size]


def document(data: bytes, max_size: int, seed: int, mutate: Mutate) -> bytes:
    """Mutates an input of the documents target."""
    if seed % _STRUCTURED or len(data) < 3:
        return mutate(data, max_size)
    try:
        value: Any = msgspec.json.decode(data[1:])
        # bytes become base64 text here, which is as good as any
        return (data[:1] + msgspec.json.encode(_changed(value, random.Random(seed))))[:max_size]
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return mutate(data, max_size)


def _changed_msgpack(packed: bytes, pick: random.Random) -> bytes:
    try:
        return msgspec.msgpack.encode(_changed(msgspec.msgpack.decode(packed), pick))
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return packed[: pick.randrange(len(packed) + 1)] + bytes([pick.randrange(256)])


def _changed(value: Any, pick: random.Random) -> Any:
    """The value with one thing in it changed; the deeper, the likelier."""
    if not isinstance(value, list | dict) or not value or pick.random() < 0.1:
        return _other(value, pick)
    if isinstance(value, list):
        at = pick.randrange(len(value))
        kept = [*value[:at], *value[at + 1 :]]
        pieces = {0: [], 1: [value[at], value[at]]}.get(pick.randrange(8))
        return [*kept[:at], *([_changed(value[at], pick)] if pieces is None else pieces), *kept[at:]]
    key = pick.choice(list(value))
    changed = dict(value)
    match pick.randrange(10):
        case 0:
            del changed[key]
        case 1:
            changed[pick.choice(list(value))] = value[key]
        case _:
            changed[key] = _changed(value[key], pick)
    return changed


def _other(value: Any, pick: random.Random) -> Any:
    chance = pick.random()
    if isinstance(value, bool) or chance < 0.3:
        return pick.choice(_SCALARS)
    if isinstance(value, int):
        return value + pick.choice((-1, 1, 16, -16, value, -2 * value))
    if isinstance(value, str | bytes) and value:
        at = pick.randrange(len(value))
        kept: Any = value[:at]
        return kept + (value[at + 1 :] if chance < 0.6 else value[max(0, at - 1) :])
    return pick.choice(_SCALARS)


MUTATORS: Final = {"payloads": payload, "frames": frame, "documents": document}
