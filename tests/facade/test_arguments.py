"""What a user may pass, and each refusal by the name of its argument, before anything is sent."""

from __future__ import annotations

import array
import collections
import enum
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.errors import ArgumentTypeError, Fate, KVCacheSDKError, UsageError
from lmcache_sdk.facade.arguments import (
    API_KEY_VARIABLE,
    checked_api_key,
    checked_choice,
    checked_model_name,
    checked_salt,
    checked_tokens,
)
from lmcache_sdk.values import MAX_TOKEN_ID, override


class Token(enum.IntEnum):
    ONE = 1


class Indexed:
    def __index__(self) -> int:
        return 7


class Own(Sequence[int]):
    """A sequence of somebody's own."""

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    @override
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return [5, 6][index]

    @override
    def __len__(self) -> int:
        return 2


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ((1, 2), [1, 2]),
        (range(3), [0, 1, 2]),
        ([0, MAX_TOKEN_ID], [0, MAX_TOKEN_ID]),
        (array.array("I", [1, 2]), [1, 2]),
        (array.array("q", [3]), [3]),
        (collections.deque([1, 2]), [1, 2]),
        (collections.UserList([1]), [1]),
        (Own(), [5, 6]),
        ([Token.ONE, np.int64(2), np.uint32(3), Indexed(), torch.tensor(4)], [1, 2, 3, 7, 4]),
        (torch.tensor([1, 2, 3]), [1, 2, 3]),
        (torch.tensor([1, 2, 3, 4])[::2], [1, 3]),
        (torch.tensor([], dtype=torch.int64), []),
        *((torch.tensor([1, 2], dtype=dtype), [1, 2]) for dtype in (torch.int32, torch.int16, torch.uint8, torch.int8)),
        *((torch.tensor([1, 2], dtype=dtype), [1, 2]) for dtype in (torch.uint16, torch.uint32, torch.uint64)),
        *((np.array([1, 2], dtype=kind), [1, 2]) for kind in ("i8", "i4", "u4", "u8", "i2", ">i4")),
        (np.arange(10)[::3], [0, 3, 6, 9]),
        (np.array([], dtype=np.int64), []),
    ],
)
def test_tokens_that_are_taken(tokens: object, expected: list[int]) -> None:
    assert checked_tokens(tokens).to_list() == expected


@pytest.mark.parametrize(
    "tokens",
    [
        *("1 2 3", "", b"abc", bytearray(b"a"), memoryview(b"ab")),
        *(None, 5, 1.5, object(), {1, 2}, frozenset({1}), {1: 2}),
        *([1.0], [1, "2"], [None], [b"1"], [True], [False, 1], [[1]], [(1,)], [object()], [1j]),
        *([np.float32(1)], [np.True_], [torch.tensor(1.0)], [torch.tensor(True)], [torch.tensor([1, 2])]),
        *(torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1j]), torch.tensor([1.0], dtype=torch.bfloat16)),
        *(np.array([1.0]), np.array([True]), np.array(["1"]), np.array([1, None], dtype=object), np.array([1j])),
    ],
    ids=repr,
)
def test_tokens_of_another_type(tokens: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^tokens(\[\d+\])?: ") as caught:
        checked_tokens(tokens)
    assert caught.value.fate is Fate.NOT_SENT
    assert len(str(caught.value)) < 200


def test_a_generator_is_not_a_sequence() -> None:
    def tokens() -> Iterator[int]:
        yield 1

    with pytest.raises(ArgumentTypeError, match=r"^tokens: .*generator"):
        checked_tokens(tokens())


@pytest.mark.parametrize(
    ("tokens", "where"),
    [
        ([0, -1], "tokens[1]"),
        ([1, 2, 2**32], "tokens[2]"),
        ([2**64], "tokens[0]"),
        ([-(2**70)], "tokens[0]"),
        ([np.int64(-5)], "tokens[0]"),
        (torch.tensor([3, -1]), "tokens[1]"),
        (np.array([2**40]), "tokens[0]"),
        (range(-2, 2), "tokens[0]"),
        pytest.param([10**5000], "tokens[0]", id="huge"),
        pytest.param([-(10**5000)], "tokens[0]", id="huge negative"),
    ],
)
def test_token_ids_that_the_server_would_never_answer(tokens: object, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_tokens(tokens)
    assert str(caught.value).startswith(f"{where}: expected a token id from 0 to 2**32-1")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros((2, 2), dtype=torch.int64),
        torch.tensor(5),
        torch.zeros((1, 4), dtype=torch.int64),
        np.zeros((2, 2), dtype=np.int64),
        np.array(5),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    ],
    ids=["2-D", "0-D", "batch", "numpy 2-D", "numpy 0-D", "meta"],
)
def test_tensors_that_are_no_sequence(tokens: object) -> None:
    with pytest.raises(UsageError, match=r"^tokens: "):
        checked_tokens(tokens)


class OddArray:
    """An array of somebody's own whose list is none."""

    ndim = 1
    dtype = np.dtype("i8")

    def tolist(self) -> object:
        return (1, 2)


@pytest.mark.parametrize("tokens", [torch.tensor([1, 0, 2]).to_sparse(), OddArray()], ids=["sparse", "odd array"])
def test_tensors_and_arrays_of_a_form_that_is_not_plain(tokens: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^tokens: "):
        checked_tokens(tokens)


@given(st.lists(st.integers() | st.booleans() | st.floats() | st.text() | st.none(), max_size=8))
def test_any_list_is_tokens_or_refused(tokens: list[Any]) -> None:
    try:
        checked = checked_tokens(tokens)
    except KVCacheSDKError:
        assert any(type(token) is not int or not 0 <= token <= MAX_TOKEN_ID for token in tokens)
    else:
        assert checked.to_list() == tokens and all(type(token) is int for token in tokens)


# ---- salts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", ["", "a", "x" * 128, "\U0001f9c2" * 128, "\u00fc:#?%&", "a b\n"])
def test_salts_that_the_server_takes(salt: str) -> None:
    assert checked_salt(salt) == salt


@pytest.mark.parametrize("salt", ["x" * 129, "a@b", "a/b", "a\\b", "a\0b", "\ud800", "@/\\"])
def test_salts_that_the_server_would_never_answer(salt: str) -> None:
    with pytest.raises(UsageError, match=r"^cache_salt: "):
        checked_salt(salt)


@pytest.mark.parametrize("salt", [None, 5, b"x", ["x"], True])
def test_salts_of_another_type(salt: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^cache_salt: "):
        checked_salt(salt)


# ---- names, keys, choices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m", "Qwen/Qwen3-8B", "\u6a21\u578b", "a b", "m##query", "/models/x"])
def test_model_names(name: str) -> None:
    assert checked_model_name(name) == name


@pytest.mark.parametrize("name", ["", "a@b", "@", "\udfff"])
def test_model_names_that_no_engine_has(name: str) -> None:
    with pytest.raises(UsageError, match=r"^model_name: "):
        checked_model_name(name)


@pytest.mark.parametrize("name", [None, 5, b"m", ["m"]])
def test_model_names_of_another_type(name: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^model_name: "):
        checked_model_name(name)


def test_the_key_is_the_callers_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert checked_api_key(None) is None
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    assert checked_api_key(None) is None
    monkeypatch.setenv(API_KEY_VARIABLE, "from-the-environment")
    assert checked_api_key(None) == "from-the-environment"
    assert checked_api_key("given") == "given"
    assert API_KEY_VARIABLE == "LMCACHE_SDK_API_KEY"


SECRETS = ["", "s3cret\n", "s3cret\r\nX: y", "s3cr\u00e9t", "s3cret\t", " s3cret", "s3cret ", "s3cret\x7f", "\ud83d"]


@pytest.mark.parametrize("key", SECRETS)
def test_a_key_that_cannot_travel_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^api_key: ") as caught:
        checked_api_key(key)
    assert "s3c" not in str(caught.value)
    if key and "\ud83d" not in key:
        monkeypatch.setenv(API_KEY_VARIABLE, key)
        with pytest.raises(UsageError, match=API_KEY_VARIABLE) as caught:
            checked_api_key(None)
        assert "s3c" not in str(caught.value)


@pytest.mark.parametrize("key", [5, b"key", ["key"], True])
def test_a_key_of_another_type(key: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^api_key: "):
        checked_api_key(key)


def test_choices() -> None:
    assert checked_choice("shm", "transport", ("shm", "inline")) == "shm"
    for wrong in ("SHM", "", None, 5, ["shm"], b"shm"):
        with pytest.raises(UsageError, match=r"^transport: expected one of 'shm', 'inline'"):
            checked_choice(wrong, "transport", ("shm", "inline"))
