"""What the calls answer: values that people hold."""

from __future__ import annotations

import attrs


@attrs.frozen
class LookupResult:
    """How much of a token sequence is cached.

    Attributes:
        hit_tokens: tokens of the cached prefix; a multiple of the chunk size.
        total_tokens: tokens that were asked for.
        tail_tokens: tokens behind the last whole chunk, which can never be cached.
    """

    hit_tokens: int
    total_tokens: int
    tail_tokens: int


@attrs.frozen
class StoreResult:
    """What became of a store; true when every whole chunk is in the cache now.

    Attributes:
        written_chunks: chunks that this call wrote and published. On an inline server a cached chunk behind a gap
            cannot be told from a written one and counts as written.
        already_cached_chunks: chunks that were in the cache; their data was kept, the first writer wins.
        missing_chunks: chunks that are not in the cache after the call.
        tail_tokens: tokens behind the last whole chunk, which were not stored.
        reason: why the result is not true; empty when it is.
    """

    written_chunks: int
    already_cached_chunks: int
    missing_chunks: int
    tail_tokens: int
    reason: str = ""

    @property
    def total_chunks(self) -> int:
        """Whole chunks that were to be stored."""
        return self.written_chunks + self.already_cached_chunks + self.missing_chunks

    def __bool__(self) -> bool:
        return self.missing_chunks == 0 and self.total_chunks > 0
