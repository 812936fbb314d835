"""How each release behaves where the wire looks the same: data, with the release in which each behaviour appeared.

The dialect (protocol layer) says what a client must know. What only an imitation must know stands here: it was read in,
and run against, the releases that it names (PROTOCOL.md sections 5 to 8 and 13). `of_dialect` gives the flags of one
release; nothing else in this package compares releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from lmcache_sdk.protocol import DIALECTS, Dialect, PayloadForm, RegistrationForm


@attrs.frozen(kw_only=True)
class Behaviour:
    """The flags of one release."""

    end_is_checked: bool
    """A key whose end lies beyond its tokens is refused; before, it was hashed as if it had them."""
    sessions_expire: bool
    """Sessions are swept by their age."""
    release_needs_layout: bool
    """FREE of a range and END are not answered once the model's last registration has left."""
    lookup_drops_partial_chunks: bool
    """Ranks locked beyond the last chunk that all ranks have are unlocked at once."""
    counts_ranks_by_key: bool
    """LOOKUP of one rank counts chunks by the ranks it locked, not by the world size."""
    store_names_session: bool
    """A store or retrieve without LOOKUP leaves its key in the session, so END has something to touch."""
    status_opens_session: bool
    """A consumed prefetch status writes the hit into the session, and opens one when there is none."""
    lookup_resets_hit: bool
    """A second LOOKUP forgets the hit that the first one recorded."""
    lookup_heeds_end: bool
    """LOOKUP stops at the key's end instead of using every whole chunk of its tokens."""
    lookup_heeds_start: bool
    """LOOKUP skips what lies before the key's start and counts it as found."""
    writes_are_staged: bool
    """A reservation is no object until it is committed; after its time the next writer gets its buffer."""
    physical_slots: bool
    """A registration may give the slots per chunk."""
    inline_is_strict: bool
    """Inline data that does not fit the registration is not answered and reserves nothing."""
    clear_has_force: bool
    """CLEAR over ZMQ says whether it is forced; before, it always was."""
    forced_by_default: bool
    """POST /cache/clear forces unless told otherwise."""
    cache_api: bool
    """HTTP paths under /cache; before, there was /clear-cache."""
    has_api_key: bool
    """HTTP may be guarded by an API key."""
    fused_has_one_plane: bool
    """An engine's fused cache is stored as one plane; before, as two."""
    fused_is_unprintable: bool
    """A fused cache is shown in a format whose shape the server cannot print."""
    names_unprintable: bool
    """Such a format is shown by its name; before, by its number."""
    inline_by_default: bool
    """Without a pool name the server is an inline one; before, it made a pool with a name of its own."""
    default_mode: str
    """The transfer mode of a server that was given none."""


_SINCE: Final[Mapping[str, str]] = {
    "sessions_expire": "0.5.1",
    "release_needs_layout": "0.5.1",
    "cache_api": "0.5.1",
    "fused_has_one_plane": "0.5.2",
    "fused_is_unprintable": "0.5.3",
    "lookup_drops_partial_chunks": "0.5.3",
    "store_names_session": "0.5.4",
    "status_opens_session": "0.5.4",
    "inline_by_default": "0.5.4",
    "end_is_checked": "0.5.5",
    "lookup_resets_hit": "0.5.5",
    "names_unprintable": "0.5.5",
    "counts_ranks_by_key": "0.5.6",
    "lookup_heeds_end": "0.5.6",
    "clear_has_force": "0.5.6",
    "lookup_heeds_start": "0.5.7rc2",
    "has_api_key": "0.5.7rc2",
}

HIGHEST_OPCODE: Final[Mapping[str, int]] = {
    "0.5.0": 36,
    "0.5.1": 36,
    "0.5.2": 36,
    "0.5.3": 40,
    "0.5.4": 40,
    "0.5.5": 33,
    "0.5.6": 33,
    "0.5.7rc2": 33,
}
"""Opcodes run from 1 to here without a gap (0.5.6 retired 11); `operation_ids` of the golden vectors."""

_ORDER: Final = {release: position for position, release in enumerate(DIALECTS)}


def of_dialect(dialect: Dialect) -> Behaviour:
    """The behaviour of the dialect's release."""

    def has(flag: str) -> bool:
        return _ORDER[dialect.release] >= _ORDER[_SINCE[flag]]

    return Behaviour(
        **{flag: has(flag) for flag in _SINCE},
        writes_are_staged=not dialect.garbage_after_write_ttl,
        physical_slots=dialect.registration_form is not RegistrationForm.BASIC,
        inline_is_strict=dialect.payload_form is PayloadForm.ENVELOPE,
        forced_by_default=not has("clear_has_force"),
        default_mode="lmcache_driven" if has("inline_by_default") else "auto",
    )


def defines_opcode(dialect: Dialect, opcode: object) -> bool:
    """Whether the release defines this opcode at all, imitated here or not."""
    return isinstance(opcode, int) and 1 <= opcode <= HIGHEST_OPCODE[dialect.release]
