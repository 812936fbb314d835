"""The KV of every key of the soak, so that every byte that comes back can be checked.

Contract: `contents` is a pure function of (tokens, salt): what chunk i holds is decided by the tokens 0 … end of
chunk i and the salt, as in a real cache. Each chunk is a window of one fixed field of random bits, under a mask; two
chunks agree nowhere that matters, so a chunk at the wrong place, of other tokens, of another salt, half written or
never written cannot compare equal. `find_wrong` says how many bytes are wrong and whose they are.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from tests.soak.plan import (
    CHUNK,
    CHUNK_NBYTES,
    FAMILIES,
    HOT_FAMILIES,
    HOT_SHARE,
    ITEMSIZE,
    LAYERS,
    MAX_CHUNKS,
    SALTS,
    SHARED_CHUNKS,
    VARIANTS,
    WIDTH,
)

_NUMEL: Final = CHUNK_NBYTES // ITEMSIZE
_WINDOWS: Final = _NUMEL
_SHAPE: Final = (2, LAYERS, CHUNK, WIDTH)


@dataclass(frozen=True)
class Key:
    """One sequence of the key space: so many chunks of a variant of a family, and some tokens more."""

    family: int
    variant: int
    num_chunks: int
    tail: int = 0

    @property
    def salt(self) -> str:
        """The salt of its family."""
        return SALTS[self.family % len(SALTS)]

    @property
    def tokens(self) -> torch.Tensor:
        """Its token ids, on the odd variants a slice of the even ones' first chunks and then others."""
        return _all_tokens(self.family // len(SALTS), self.variant)[: self.num_chunks * CHUNK + self.tail]

    def whole(self, num_chunks: int) -> Key:
        """Its first chunks, without a tail."""
        return Key(self.family, self.variant, num_chunks)


def random_key(rng: random.Random) -> Key:
    """A key; some families are asked for far more often than the others."""
    family = rng.randrange(HOT_FAMILIES if rng.random() < HOT_SHARE else FAMILIES)
    num_chunks = rng.randint(1, MAX_CHUNKS)
    tail = rng.randrange(CHUNK) if num_chunks < MAX_CHUNKS else 0
    return Key(family, rng.randrange(VARIANTS), num_chunks, tail)


@cache
def _all_tokens(text: int, variant: int) -> torch.Tensor:
    position = torch.arange(MAX_CHUNKS * CHUNK, dtype=torch.int64)
    own = (position >= SHARED_CHUNKS * CHUNK).to(torch.int64) * variant
    return (text * 7919 + position * 31 + own * 40_009) % 90_001 + 1 + (position == 0) * (100_000 + text)


@cache
def _field() -> torch.Tensor:
    generator = torch.Generator().manual_seed(20_240_229)
    return torch.randint(-(2**15), 2**15, (_WINDOWS + _NUMEL,), dtype=torch.int16, generator=generator)


def _digests(tokens: torch.Tensor, salt: str) -> list[bytes]:
    """One for each whole chunk, over everything up to its end."""
    rolling = hashlib.blake2b(digest_size=16, key=salt.encode())
    digests = []
    for start in range(0, len(tokens) - len(tokens) % CHUNK, CHUNK):
        rolling.update(repr(tokens[start : start + CHUNK].tolist()).encode())
        digests.append(rolling.digest())
    return digests


@cache
def _key_digests(family: int, variant: int) -> list[bytes]:
    key = Key(family, variant, MAX_CHUNKS)
    return _digests(key.tokens, key.salt)


def _bits(digest: bytes) -> tuple[int, int]:
    window = int.from_bytes(digest[:8], "little") % _WINDOWS
    return window, int.from_bytes(digest[8:10], "little", signed=True)


def _chunk(digest: bytes) -> torch.Tensor:
    window, mask = _bits(digest)
    return (_field()[window : window + _NUMEL] ^ mask).view(_SHAPE)


def contents(key: Key) -> torch.Tensor:
    """The KV of a key's whole chunks and of its tail, `[2, layer, token, hidden]` bfloat16; the tail is of no chunk."""
    digests = _key_digests(key.family, key.variant)[: key.num_chunks]
    kv = torch.empty((2, LAYERS, key.num_chunks * CHUNK + key.tail, WIDTH), dtype=torch.int16)
    for index, digest in enumerate(digests):
        kv[:, :, index * CHUNK : (index + 1) * CHUNK] = _chunk(digest)
    kv[:, :, key.num_chunks * CHUNK :] = 0x7FFF
    return kv.view(torch.bfloat16)


def change(kv: torch.Tensor, before: Key, after: Key) -> None:
    """Turns the KV of one key into that of another in place, bit by bit: a wrong bit stays wrong."""
    bits = kv.view(torch.int16)
    bits ^= contents(before).view(torch.int16) ^ contents(after).view(torch.int16)


@dataclass(frozen=True)
class Wrong:
    """Bytes that are not what their tokens must hold."""

    num_bytes: int
    chunk: int
    first_byte: int
    """Of the first wrong chunk, in the order `[2, layer, token, hidden]`."""
    whose: str


def find_wrong(kv: torch.Tensor, key: Key) -> Wrong | None:
    """What is wrong with a retrieved tensor; None when nothing is."""
    num_chunks = kv.shape[2] // CHUNK if kv.dim() == 4 else 0
    right_shape = (2, LAYERS, num_chunks * CHUNK, WIDTH)
    if tuple(kv.shape) != right_shape or kv.dtype != torch.bfloat16 or not 0 < num_chunks <= key.num_chunks:
        return Wrong(max(1, kv.numel() * kv.element_size()), 0, 0, f"a tensor {list(kv.shape)} {kv.dtype}")
    found, right = kv.view(torch.int16), contents(key.whole(num_chunks)).view(torch.int16)
    if torch.equal(found, right):
        return None
    wrong = found.contiguous().view(torch.uint8) != right.contiguous().view(torch.uint8)
    per_chunk = (
        wrong.view(2, LAYERS, num_chunks, CHUNK, WIDTH * ITEMSIZE).permute(2, 0, 1, 3, 4).reshape(num_chunks, -1)
    )
    chunk = int(per_chunk.any(dim=1).int().argmax())
    first = int(per_chunk[chunk].int().argmax())
    piece = found[:, :, chunk * CHUNK : (chunk + 1) * CHUNK].reshape(-1)
    return Wrong(int(wrong.sum()), chunk, first, _whose(piece, first // ITEMSIZE))


def _whose(piece: torch.Tensor, position: int) -> str:
    """To which chunk of the key space the bits from `position` on belong."""
    sample = piece[position : position + 8]
    if not sample.any():
        return "zeros"
    for family in range(FAMILIES):
        for variant in range(VARIANTS):
            for index, digest in enumerate(_key_digests(family, variant)):
                window, mask = _bits(digest)
                start = window + position
                if torch.equal(sample ^ mask, _field()[start : start + len(sample)]):
                    salt = Key(family, variant, 1).salt
                    return f"chunk {index} of family {family} variant {variant} salt {salt!r}"
    return "nothing of the key space"


def warm_up() -> None:
    """Computes what every client needs once, before the clients are forked."""
    _field()
    for family in range(FAMILIES):
        for variant in range(VARIANTS):
            _key_digests(family, variant)
