"""The content of the soak is a function of tokens and salt alone, and a byte that is not of it is seen."""

from __future__ import annotations

import random

import pytest
import torch

from tests.soak.content import Key, change, contents, find_wrong, random_key
from tests.soak.plan import CHUNK, CHUNK_NBYTES, KEY_SPACE_CHUNKS, MAX_CHUNKS, POOL_CHUNKS, SALTS, SHARED_CHUNKS

LONG = Key(21, 0, MAX_CHUNKS)


def _flip_one_bit(kv: torch.Tensor) -> None:
    bits = kv.view(torch.int16)
    bits[1, 2, 700, 33] ^= 1


def _swap_chunks(kv: torch.Tensor) -> None:
    first = kv[:, :, :CHUNK].clone()
    kv[:, :, :CHUNK] = kv[:, :, CHUNK : 2 * CHUNK]
    kv[:, :, CHUNK : 2 * CHUNK] = first


def _half_written(kv: torch.Tensor) -> None:
    kv[1, :, 3 * CHUNK : 4 * CHUNK] = 0


def _of_other_salt(kv: torch.Tensor) -> None:
    kv[:, :, :CHUNK] = contents(Key(LONG.family + 1, 0, 1))


def _swap_planes(kv: torch.Tensor) -> None:
    kv.copy_(kv.flip(0))


@pytest.mark.parametrize("spoil", [_flip_one_bit, _swap_chunks, _half_written, _of_other_salt, _swap_planes])
def test_wrong_bytes_are_seen(spoil: object) -> None:
    assert callable(spoil)
    kv = contents(LONG)
    assert find_wrong(kv, LONG) is None
    spoil(kv)
    wrong = find_wrong(kv, LONG)
    assert wrong is not None
    assert wrong.num_bytes > 0


def test_a_wrong_byte_is_found_where_it_is() -> None:
    kv = contents(LONG)
    _flip_one_bit(kv)
    wrong = find_wrong(kv, LONG)
    assert wrong is not None
    assert (wrong.num_bytes, wrong.chunk) == (1, 700 // CHUNK)
    plane, layer, token, hidden = 1, 2, 700 % CHUNK, 33
    assert wrong.first_byte == (((plane * 4 + layer) * CHUNK + token) * 64 + hidden) * 2


def test_it_says_whose_the_bytes_are() -> None:
    kv = contents(LONG)
    _of_other_salt(kv)
    wrong = find_wrong(kv, LONG)
    assert wrong is not None
    assert wrong.whose == f"chunk 0 of family 22 variant 0 salt {SALTS[1]!r}"


@pytest.mark.parametrize("kv", [torch.zeros(3), torch.zeros((2, 4, CHUNK, 64)), contents(LONG)[:, :, : CHUNK - 1]])
def test_a_wrong_shape_or_dtype_is_wrong(kv: torch.Tensor) -> None:
    assert find_wrong(kv, LONG) is not None


def test_more_than_was_asked_for_is_wrong() -> None:
    assert find_wrong(contents(LONG), LONG.whole(2)) is not None


def test_equal_prefixes_hold_equal_chunks_and_nothing_else_does() -> None:
    shared = SHARED_CHUNKS * CHUNK
    one, other = contents(Key(3, 0, MAX_CHUNKS)), contents(Key(3, 1, MAX_CHUNKS))
    assert torch.equal(one[:, :, :shared].view(torch.int16), other[:, :, :shared].view(torch.int16))
    assert not torch.equal(one[:, :, shared:].view(torch.int16), other[:, :, shared:].view(torch.int16))
    assert torch.equal(Key(3, 0, 2).tokens, Key(3 + 1, 0, 2).tokens)  # two salts, the same tokens
    assert find_wrong(contents(Key(3, 0, 2)), Key(4, 0, 2)) is not None


def test_a_change_makes_the_other_keys_content_and_keeps_what_was_wrong() -> None:
    before, after = Key(5, 1, 3), Key(40, 0, 3)
    kv = contents(before)
    change(kv, before, after)
    assert find_wrong(kv, after) is None
    spoiled = contents(before)
    _flip_one_bit(spoiled)
    change(spoiled, before, after)
    wrong = find_wrong(spoiled, after)
    assert wrong is not None
    assert wrong.num_bytes == 1


def test_the_key_space_is_four_times_the_pool() -> None:
    assert 4 * POOL_CHUNKS <= KEY_SPACE_CHUNKS < 4.2 * POOL_CHUNKS
    kv = contents(LONG)
    assert kv.numel() * kv.element_size() == MAX_CHUNKS * CHUNK_NBYTES
    assert len({random_key(random.Random(n)).family for n in range(2000)}) > 80


def test_tails_have_tokens_and_no_chunk() -> None:
    key = Key(7, 1, 2, tail=9)
    assert len(key.tokens) == contents(key).shape[2] == 2 * CHUNK + 9
    assert find_wrong(contents(key)[:, :, : 2 * CHUNK].contiguous(), key) is None
