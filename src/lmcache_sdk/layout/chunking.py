"""Tokens <-> chunks: all rounding of the library.

A chunk is the server's unit of caching, `chunk_size` tokens; only whole chunks are stored and found. Chunk indices
count from the first token. Sizes are positive and counts not negative: the callers have checked them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def whole_chunks(num_tokens: int, chunk_size: int) -> int:
    """How many whole chunks that many tokens fill."""
    return num_tokens // chunk_size


def tail_tokens(num_tokens: int, chunk_size: int) -> int:
    """How many tokens are left behind the last whole chunk; they are never cached."""
    return num_tokens % chunk_size


def batches(num_chunks: int, chunk_nbytes: int, max_batch_nbytes: int) -> Iterator[tuple[int, int]]:
    """Cuts chunks into runs of at most that many bytes: `(first_chunk, num_chunks)` in order; at least one a run."""
    per_batch = max(1, max_batch_nbytes // chunk_nbytes)
    for first in range(0, num_chunks, per_batch):
        yield first, min(per_batch, num_chunks - first)


def consecutive(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cuts ascending chunk indices into runs without a gap: `(first_chunk, num_chunks)` in order."""
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield indices[start], end - start
            start = end
