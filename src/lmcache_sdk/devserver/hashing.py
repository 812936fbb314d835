"""Chunk hashes: rolling over all tokens from position 0, so that the same text behind another prefix is another chunk.

The hash function is our own choice (the real server's is not in the standard library); clients never see it.
"""

from __future__ import annotations

import hashlib
from typing import Final

_TOKEN_NBYTES: Final = 4
_FIRST_PREFIX: Final = b"lmcache-sdk devserver"


def chunk_hash(prefix: bytes, packed_chunk: bytes | memoryview) -> bytes:
    """The hash of one chunk (4 bytes a token) that follows `prefix`, the hash before it."""
    return hashlib.blake2b(packed_chunk, digest_size=32, key=prefix[:32]).digest()


class RollingHashes:
    """The hashes of a token sequence, computed as far as they were asked for and kept.

    `extend` is given the tokens each time and computes only what is missing: after the tokens were exchanged for
    others, the hashes that exist stay those of the old ones. That is how the server behaves, and why a request id must
    not be reused.
    """

    def __init__(self, chunk_size: int) -> None:
        self._stride = chunk_size * _TOKEN_NBYTES
        self._hashes: list[bytes] = []

    def extend(self, packed: bytes, num_chunks: int) -> None:
        """Computes up to `num_chunks` hashes; beyond the end of the tokens it hashes what is not there."""
        view = memoryview(packed)
        while len(self._hashes) < num_chunks:
            offset = len(self._hashes) * self._stride
            prefix = self._hashes[-1] if self._hashes else _FIRST_PREFIX
            self._hashes.append(chunk_hash(prefix, view[offset : offset + self._stride]))

    def between(self, first_chunk: int, end_chunk: int) -> list[bytes]:
        """The hashes of the chunks from `first_chunk` to `end_chunk`, the latter not included."""
        return self._hashes[first_chunk:end_chunk]


def whole_chunk_hashes(packed: bytes, chunk_size: int, start: int = 0, end: int | None = None) -> list[bytes]:
    """The hashes of the whole chunks that begin at `start` or later and end at `end` or before."""
    num_tokens = len(packed) // _TOKEN_NBYTES
    num_chunks = max(0, (num_tokens if end is None else min(num_tokens, end)) // chunk_size)
    hashes = RollingHashes(chunk_size)
    hashes.extend(packed, num_chunks)
    return [found for index, found in enumerate(hashes.between(0, num_chunks)) if index * chunk_size >= start]
