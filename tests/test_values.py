"""Token ids and ranges: what may be in them, their packed form, equality, and that nobody shares their memory."""

from __future__ import annotations

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.values import MAX_TOKEN_ID, TokenIds

TOKENS = st.lists(st.integers(min_value=0, max_value=MAX_TOKEN_ID), max_size=50)


@given(TOKENS)
def test_tokens_come_back_as_they_were(values: list[int]) -> None:
    tokens = TokenIds(values)
    assert tokens.to_list() == values
    assert len(tokens) == len(values)


@given(TOKENS)
def test_packed_form_is_four_bytes_a_token_most_significant_first(values: list[int]) -> None:
    packed = TokenIds(values).big_endian()
    assert packed == b"".join(value.to_bytes(4, "big") for value in values)
    assert TokenIds.from_big_endian(packed) == TokenIds(values)


def test_packing_does_not_turn_the_tokens_around() -> None:
    tokens = TokenIds([1, 2])
    tokens.big_endian()
    assert tokens.to_list() == [1, 2]


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_torn_packed_form_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"multiple of item size"):
        TokenIds.from_big_endian(bytes(length))


@pytest.mark.parametrize("value", [-1, 2**32, 2**64, -(2**70)])
def test_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        TokenIds([0, value])


@pytest.mark.parametrize("value", ["1", 1.0, None, b"1"])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        TokenIds([value])  # type: ignore[list-item]  # that is the point


@given(TOKENS, st.integers(min_value=0, max_value=60))
def test_prefix(values: list[int], length: int) -> None:
    tokens = TokenIds(values)
    prefix = tokens.prefix(length)
    assert prefix.to_list() == values[:length]
    assert (prefix is tokens) == (length >= len(values))


def test_a_prefix_has_wire_forms_of_its_own() -> None:
    tokens = TokenIds([1, 2, 3])
    tokens.wire_forms["array"] = b"three"
    assert tokens.prefix(2).wire_forms == {}


@given(TOKENS, TOKENS)
def test_equal_tokens_are_equal_and_hash_alike(one: list[int], other: list[int]) -> None:
    assert (TokenIds(one) == TokenIds(other)) == (one == other)
    assert hash(TokenIds(one)) == hash(TokenIds(list(one)))
    assert TokenIds(one) != one


def test_tokens_do_not_share_the_memory_of_what_they_were_made_of() -> None:
    source = array.array("I", [1, 2])
    tokens = TokenIds(source)
    source[0] = 9
    listed = tokens.to_list()
    listed.append(3)
    assert tokens.to_list() == [1, 2]


def test_repr_tells_the_number_and_no_token() -> None:
    assert repr(TokenIds([7, 8])) == "<TokenIds 2 tokens>"
