"""Values that every layer speaks: identities, token ids. No I/O, no wire form, no tensor.

`TokenIds` is validated once, when made; whoever receives one does not check it again.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NewType

if TYPE_CHECKING:
    from typing_extensions import override as override  # noqa: PLC0414  # re-exported
else:
    # typing.override is there from Python 3.12 on, and its backport is not one of our six dependencies

    def override(method: Callable[..., object]) -> Callable[..., object]:
        """Marks a method that replaces one of a base class; the type checker verifies it."""
        return method


CorrelationId = NewType("CorrelationId", int)
"""Pairs a reply with its request on one socket; strictly increasing."""
RequestId = NewType("RequestId", str)
"""Names a session on the server. One request id belongs to one token sequence (PROTOCOL.md section 5)."""
InstanceId = NewType("InstanceId", int)
"""Names a registration on the server; 63 random bits, so that it fits an int64 field."""

PRIVATE_MODEL_PREFIX: Final = "lmcache-sdk/"
"""Names under which clients of this library register; no engine has them."""

MAX_TOKEN_ID: Final = 2**32 - 1
"""The server hashes token ids as unsigned 32-bit integers and never answers for others."""

# array type codes have platform sizes: take the one that is 4 bytes here
_UINT32: Final = next(code for code in ("I", "L") if array.array(code).itemsize == 4)


class TokenIds:
    """A sequence of token ids, each 0 … 2**32-1, held as packed 32-bit integers.

    The wire form is made once per call and kept here (`wire_forms`, written by the protocol layer): every key of a call
    carries the same tokens, and 128k of them cost more to encode than everything else in a lookup.
    """

    __slots__ = ("_values", "wire_forms")

    def __init__(self, values: Iterable[int]) -> None:
        """Takes ints in range; raises OverflowError or TypeError otherwise (the facade words it for people)."""
        self._values = array.array(_UINT32, values)
        self.wire_forms: dict[str, bytes] = {}

    @classmethod
    def from_big_endian(cls, packed: bytes) -> TokenIds:
        """Reads 4 bytes a token, most significant first; raises ValueError on another length."""
        made = cls(())
        made._values.frombytes(packed)
        made._swap_if_little()
        return made

    def big_endian(self) -> bytes:
        """Gives 4 bytes a token, most significant first."""
        copy = TokenIds(())
        copy._values = self._values[:]
        copy._swap_if_little()
        return copy._values.tobytes()

    def _swap_if_little(self) -> None:
        if array.array(_UINT32, [1]).tobytes()[0]:
            self._values.byteswap()

    def prefix(self, num_tokens: int) -> TokenIds:
        """The first `num_tokens` ids; itself when that is all of them."""
        if num_tokens >= len(self._values):
            return self
        made = TokenIds(())
        made._values = self._values[:num_tokens]
        return made

    def to_list(self) -> list[int]:
        """The ids as Python ints."""
        return self._values.tolist()

    def __len__(self) -> int:
        return len(self._values)

    @override
    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, TokenIds) else NotImplemented

    @override
    def __hash__(self) -> int:
        return hash(self._values.tobytes())

    @override
    def __repr__(self) -> str:
        return f"<TokenIds {len(self)} tokens>"
