"""What a caller passes, checked before anything is sent: each refusal names the argument, what came, and what to do.

`TokenIds` made here are in the server's range; a request with other ids would never be answered (PROTOCOL.md section
3.1).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

import torch

from lmcache_sdk.errors import ArgumentTypeError, UsageError
from lmcache_sdk.values import MAX_TOKEN_ID, TokenIds

MAX_SALT: Final = 128
"""Characters (code points), as the server counts."""
_SALT_REFUSED: Final = "@/\\\0"
_SHOWN_BITS: Final = 256
API_KEY_VARIABLE: Final = "LMCACHE_SDK_API_KEY"


@runtime_checkable
class IntArray(Protocol):
    """A one-dimensional array of integers, such as a numpy array."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def dtype(self) -> object:
        """The type of its elements."""

    def tolist(self) -> object:
        """Its elements as a list of Python ints."""


TokenSequence: TypeAlias = Sequence[int] | torch.Tensor | IntArray
"""What every call takes as `tokens`: ids 0 … 2**32-1 in order, from position 0."""


def checked_tokens(tokens: object) -> TokenIds:
    """Validates and packs token ids."""
    values = _listed(tokens)
    kinds = set(map(type, values))
    if not kinds <= {int}:
        values = [_as_int(value, index) for index, value in enumerate(values)]
    try:
        return TokenIds(values)
    except OverflowError:
        index, value = next((i, v) for i, v in enumerate(values) if not 0 <= v <= MAX_TOKEN_ID)
        shown = str(value) if value.bit_length() < _SHOWN_BITS else f"an integer of {value.bit_length()} bits"
        raise UsageError(f"tokens[{index}]: expected a token id from 0 to 2**32-1, got {shown}") from None


def _listed(tokens: object) -> Sequence[int]:
    if isinstance(tokens, (str, bytes, bytearray, memoryview)):
        raise ArgumentTypeError(f"tokens: expected token ids, got {type(tokens).__name__}: tokenize the text first")
    if isinstance(tokens, torch.Tensor):
        return _from_tensor(tokens)
    if isinstance(tokens, Sequence):
        return tokens
    if isinstance(tokens, IntArray):
        return _from_array(tokens)
    raise ArgumentTypeError(
        "tokens: expected a sequence of ints, or a 1-D integer torch tensor or numpy array, got "
        f"{type(tokens).__name__}"
    )


def _from_tensor(tokens: torch.Tensor) -> Sequence[int]:
    if tokens.is_nested or tokens.layout is not torch.strided or tokens.is_quantized:
        raise ArgumentTypeError("tokens: expected a plain (strided) tensor, got a nested, sparse or quantized one")
    if tokens.ndim != 1:
        raise UsageError(f"tokens: expected a 1-D tensor, got shape {tuple(tokens.shape)}; pass one sequence at a time")
    if tokens.dtype == torch.bool or tokens.dtype.is_floating_point or tokens.dtype.is_complex:
        raise ArgumentTypeError(f"tokens: expected a tensor of an integer dtype, got {tokens.dtype}")
    if tokens.is_meta:
        raise UsageError("tokens: a meta tensor has no values")
    listed: list[int] = tokens.tolist()
    return listed


def _from_array(tokens: IntArray) -> Sequence[int]:
    if tokens.ndim != 1:
        raise UsageError(f"tokens: expected a 1-D array, got {tokens.ndim} axes; pass one sequence at a time")
    if getattr(tokens.dtype, "kind", "") not in ("i", "u"):
        raise ArgumentTypeError(f"tokens: expected an array of an integer dtype, got {tokens.dtype}")
    listed = tokens.tolist()
    if not isinstance(listed, list):
        raise ArgumentTypeError(f"tokens: {type(tokens).__name__}.tolist() gave {type(listed).__name__}, not a list")
    return listed


def _as_int(value: object, index: int) -> int:
    """An int, or what stands for one exactly (numpy.int64); a bool is a flag, not a token."""
    flag = isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)
    if not flag and hasattr(value, "__index__") and type(value).__name__ not in ("bool_", "bool"):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ArgumentTypeError(f"tokens[{index}]: expected an int, got {type(value).__name__} {str(value)[:40]!r}")


def checked_salt(cache_salt: object) -> str:
    """The salt, if the server will take it."""
    if not isinstance(cache_salt, str):
        raise ArgumentTypeError(f'cache_salt: expected a str ("" for none), got {type(cache_salt).__name__}')
    if len(cache_salt) > MAX_SALT:
        raise UsageError(f"cache_salt: expected at most {MAX_SALT} characters, got {len(cache_salt)}")
    refused = sorted({char for char in cache_salt if char in _SALT_REFUSED})
    if refused:
        raise UsageError(f"cache_salt: must not contain any of @ / \\ NUL, got {', '.join(map(repr, refused))}")
    return _encodable(cache_salt, "cache_salt")


def checked_model_name(model_name: object) -> str:
    """The model name, if the server will take it."""
    if not isinstance(model_name, str):
        raise ArgumentTypeError(f"model_name: expected a str, got {type(model_name).__name__}")
    if not model_name or "@" in model_name:
        raise UsageError(
            f"model_name: expected the name that the engine registered (not empty, without '@'), got {model_name!r}"
        )
    return _encodable(model_name, "model_name")


def checked_api_key(api_key: object) -> str | None:
    """The key given, or that of the environment; None when there is neither."""
    name, found = "api_key", api_key
    if api_key is None:
        name, found = f"the environment's {API_KEY_VARIABLE}", os.environ.get(API_KEY_VARIABLE) or None
    if found is None:
        return None
    if not isinstance(found, str):
        raise ArgumentTypeError(f"{name}: expected a str, got {type(found).__name__}")
    if not found or not found.isascii() or not found.isprintable() or found != found.strip():
        raise UsageError(f"{name}: expected printable ASCII text without spaces around it (not shown: it is a secret)")
    return found


def checked_choice(value: object, name: str, choices: Iterable[str]) -> str:
    """One of a closed set of words."""
    allowed = tuple(choices)
    if value not in allowed or not isinstance(value, str):
        raise UsageError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def checked_nbytes(value: object, name: str) -> int:
    """A number of bytes, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 0:
        raise UsageError(f"{name}: expected 0 or more bytes, got {value}")
    return value


def _encodable(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name}: contains a lone surrogate, which cannot be sent") from error
    return text
