from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.layout import batches, consecutive, tail_tokens, whole_chunks

sizes = st.integers(1, 2000)
counts = st.integers(0, 50_000)


@given(counts, sizes)
def test_whole_chunks_and_tail_make_up_the_tokens(num_tokens: int, chunk_size: int) -> None:
    chunks, tail = whole_chunks(num_tokens, chunk_size), tail_tokens(num_tokens, chunk_size)
    assert chunks * chunk_size + tail == num_tokens
    assert 0 <= tail < chunk_size


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 5000))
def test_batches_cover_every_chunk_once_in_order(num_chunks: int, chunk_nbytes: int, max_nbytes: int) -> None:
    found = list(batches(num_chunks, chunk_nbytes, max_nbytes))
    assert [chunk for first, count in found for chunk in range(first, first + count)] == list(range(num_chunks))
    assert all(count >= 1 for _, count in found)
    assert all(count == 1 or count * chunk_nbytes <= max_nbytes for _, count in found)
    if found:  # and no more of them than are needed
        full = found[0][1]
        assert all(count == full for _, count in found[:-1])
        assert full == num_chunks or (full + 1) * chunk_nbytes > max_nbytes


@given(st.sets(st.integers(0, 60)))
def test_consecutive_indices_become_runs_as_long_as_they_can_be(chunks: set[int]) -> None:
    indices = sorted(chunks)
    found = list(consecutive(indices))
    assert [chunk for first, count in found for chunk in range(first, first + count)] == indices
    assert all(count >= 1 for _, count in found)
    assert all(first + count < after for (first, count), (after, _) in itertools.pairwise(found))
