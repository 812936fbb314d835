"""Rule and Dialect: how one message is laid out on one server release's wire.

A rule names the opcode and the request's fields, one frame each, in order. A dialect is the rules of one release plus
the flags of its behaviour. Both are data; `dialects.py` fills them in and `codec.py` reads them. Nothing here
branches on a version.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

import attrs

from lmcache_sdk.errors import UnsupportedError
from lmcache_sdk.protocol.envelope import PayloadForm
from lmcache_sdk.protocol.messages import Buffer, Request
from lmcache_sdk.values import override

R = TypeVar("R")
Opcode = int | str


class KeyForm(enum.Enum):
    """Which fields a key has on the wire."""

    TOKEN_IDS_8 = "8 fields, token_ids an array"
    TOKEN_IDS_10 = "10 fields, token_ids an array"
    TOKEN_BYTES = "10 fields, token_bytes 4 bytes a token"


class RegistrationForm(enum.Enum):
    """Which fields a registration has on the wire."""

    BASIC = "8 fields"
    PHYSICAL_SLOTS = "and num_physical_slots"
    GROUP_LAYOUTS = "and num_physical_slots, group_layouts"


@attrs.frozen(eq=False, repr=False)
class ReplyForm(Generic[R]):
    """Both directions of one kind of reply. `encode` gives None for a reply of two frames."""

    decode: Callable[[Buffer | None], R]
    encode: Callable[[R], bytes | None]


@attrs.frozen(eq=False, repr=False)
class Rule(Generic[R]):
    """How one request and its reply are laid out."""

    request: type[Request[R]]
    opcode: Opcode
    name: str
    """The server's own name of the operation, lower case."""
    frames: tuple[str, ...]
    """The request's fields that travel, one frame each."""
    reply: ReplyForm[R]


@attrs.frozen(repr=False)
class Dialect:
    """Everything that differs between server releases."""

    release: str
    family: str
    """D1, D2 or D3: releases that share ids, key and payload (PROTOCOL.md section 12)."""
    source: str
    """Where the facts come from."""
    rules: Mapping[type[Request[Any]], Rule[Any]]
    key_form: KeyForm
    registration_form: RegistrationForm
    payload_form: PayloadForm
    config_path: str
    """The HTTP path of the configuration."""
    two_hs_may_be_two_planes: bool
    """`*_TWO_HS` formats: two planes in 0.5.0 and 0.5.1."""
    free_needs_live_session: bool
    """FREE before QUERY consumes the job, FREE after END releases nothing."""
    free_clips_to_hit: bool
    """FREE is clipped to the hit that the session recorded."""
    readers_required: bool
    """LOOKUP and FREE need num_kv_readers >= 1."""
    garbage_after_write_ttl: bool
    """An abandoned reservation becomes readable, with whatever is in the slot, when its TTL ends."""
    get_chunk_size_freezes: bool
    """GET_CHUNK_SIZE has a side effect."""
    op_strings: bool
    """The opcode may be the operation's name."""
    unknown_opcode_kills: bool
    """An opcode that the release does not define ends its message thread."""

    def rule_for(self, request: Request[R]) -> Rule[R]:
        """The rule of a request; raises UnsupportedError when this release has no words for it."""
        rule = self.rules.get(type(request))
        if rule is None:
            name = type(request).__name__
            raise UnsupportedError(
                f"an LMCache {self.release} server has no {name}; nothing was sent", request=name, dialect=self.release
            )
        return cast("Rule[R]", rule)

    @override
    def __repr__(self) -> str:
        return f"<Dialect {self.release} {self.family}>"


def index_rules(*rules: Rule[Any]) -> dict[type[Request[Any]], Rule[Any]]:
    """The table of a dialect, keyed by request."""
    return {rule.request: rule for rule in rules}
