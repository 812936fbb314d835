"""The table of server releases: one Dialect constant per release, data only, with sources.

Everything here was read in, and run against, the release that it names (PROTOCOL.md sections 2, 3, 5, 8 and 12; the
opcode tables stand as `operation_ids` in the golden vectors of each release). A release that is not in the table is
refused: in two public releases the same integer first meant "clear the cache" and later "how far is the prefetch", so
the nearest guess can delete data, and an unknown opcode ends the message thread of releases up to 0.5.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import attrs

from lmcache_sdk.errors import UnsupportedError
from lmcache_sdk.protocol import messages as m
from lmcache_sdk.protocol import replies
from lmcache_sdk.protocol.envelope import PayloadForm
from lmcache_sdk.protocol.rules import Dialect, KeyForm, Opcode, RegistrationForm, ReplyForm, Rule, index_rules

_REGISTER: Final = "register_kv_cache_engine_driven_context"
_UNREGISTER: Final = "unregister_kv_cache_engine_driven_context"

_OPCODES_A: Final[Mapping[type[m.Request[Any]], Opcode]] = {
    m.Lookup: 5,
    m.QueryPrefetchStatus: 6,
    m.WaitPrefetchStatus: 7,
    m.FreeLookupLocks: 9,
    m.EndSession: 10,
    m.Register: 11,
    m.Unregister: 12,
    m.PrepareStore: 13,
    m.CommitStore: 14,
    m.PrepareRetrieve: 15,
    m.CommitRetrieve: 16,
    m.Clear: 17,
    m.GetChunkSize: 18,
    m.Ping: 19,
    m.Noop: 21,
}
"""0.5.0 to 0.5.2. QUERY_PREFETCH_LOOKUP_HITS (8) is left out: retired in 0.5.6, and we do not need it."""

_OPCODES_B: Final[Mapping[type[m.Request[Any]], Opcode]] = {
    m.Lookup: 8,
    m.QueryPrefetchStatus: 9,
    m.WaitPrefetchStatus: 10,
    m.FreeLookupLocks: 12,
    m.EndSession: 13,
    m.Register: 14,
    m.Unregister: 15,
    m.PrepareStore: 16,
    m.CommitStore: 17,
    m.PrepareRetrieve: 18,
    m.CommitRetrieve: 19,
    m.Clear: 20,
    m.GetChunkSize: 21,
    m.Ping: 22,
    m.Noop: 24,
}
"""0.5.3 on. GET_EXPERIMENTAL is 40 in 0.5.3 and 0.5.4, 32 after; 40 sent to 0.5.5 kills it."""


def _rules(
    opcodes: Mapping[type[m.Request[Any]], Opcode],
    *also: Rule[Any],
    clear: tuple[str, ...] = (),
    free: tuple[str, ...] = ("key", "tp_size"),
    prepare_store: tuple[str, ...] = ("key", "instance_id"),
    registered: ReplyForm[m.Registered] = replies.REGISTERED,
) -> dict[type[m.Request[Any]], Rule[Any]]:
    """The rules of one release: its opcodes, and the frames in which releases differ."""
    op = opcodes
    return index_rules(
        Rule(m.Lookup, op[m.Lookup], "lookup", ("key", "tp_size"), replies.VOID),
        Rule(
            m.QueryPrefetchStatus, op[m.QueryPrefetchStatus], "query_prefetch_status", ("request_id",), replies.PREFETCH
        ),
        Rule(
            m.WaitPrefetchStatus,
            op[m.WaitPrefetchStatus],
            "wait_prefetch_status",
            ("request_id", "timeout"),
            replies.PREFETCH,
        ),
        Rule(m.FreeLookupLocks, op[m.FreeLookupLocks], "free_lookup_locks", free, replies.VOID),
        Rule(m.EndSession, op[m.EndSession], "end_session", ("request_id",), replies.VOID),
        Rule(m.Register, op[m.Register], _REGISTER, ("registration",), registered),
        Rule(m.Unregister, op[m.Unregister], _UNREGISTER, ("instance_id",), replies.VOID),
        Rule(m.PrepareStore, op[m.PrepareStore], "prepare_store", prepare_store, replies.PREPARED_STORE),
        Rule(m.CommitStore, op[m.CommitStore], "commit_store", ("key", "instance_id", "data"), replies.COMMITTED),
        Rule(
            m.PrepareRetrieve,
            op[m.PrepareRetrieve],
            "prepare_retrieve",
            ("key", "instance_id"),
            replies.PREPARED_RETRIEVE,
        ),
        Rule(m.CommitRetrieve, op[m.CommitRetrieve], "commit_retrieve", ("key", "instance_id"), replies.COMMITTED),
        Rule(m.Clear, op[m.Clear], "clear", clear, replies.VOID),
        Rule(m.GetChunkSize, op[m.GetChunkSize], "get_chunk_size", (), replies.CHUNK_SIZE),
        Rule(m.Ping, op[m.Ping], "ping", ("instance_id",), replies.PONG),
        Rule(m.Noop, op[m.Noop], "noop", (), replies.NOOP),
        *also,
    )


def _get_experimental(opcode: int) -> Rule[m.Experimental]:
    return Rule(m.GetExperimental, opcode, "get_experimental", (), replies.EXPERIMENTAL)


_NEGOTIATE: Final = Rule(
    m.NegotiateChunkSize, "negotiate_chunk_size", "negotiate_chunk_size", ("alignment",), replies.CHUNK_SIZE
)

V0_5_0: Final = Dialect(
    release="0.5.0",
    family="D1",
    source="lmcache 0.5.0 multiprocess/protocols, run on a 0.5.0 server; config path PROTOCOL.md section 10",
    rules=_rules(_OPCODES_A),
    key_form=KeyForm.TOKEN_IDS_8,
    registration_form=RegistrationForm.BASIC,
    payload_form=PayloadForm.PICKLE,
    config_path="/conf",
    two_hs_may_be_two_planes=True,
    free_needs_live_session=False,
    free_clips_to_hit=False,
    readers_required=False,
    garbage_after_write_ttl=True,
    get_chunk_size_freezes=False,
    op_strings=False,
    unknown_opcode_kills=True,
)
V0_5_1: Final = attrs.evolve(V0_5_0, release="0.5.1", source="golden vectors of 0.5.1", config_path="/config")
V0_5_2: Final = attrs.evolve(
    V0_5_1,
    release="0.5.2",
    source="vectors equal those of 0.5.1 byte for byte; fused planes LAYOUT.md section 2",
    two_hs_may_be_two_planes=False,
)
V0_5_3: Final = attrs.evolve(
    V0_5_2,
    release="0.5.3",
    family="D2",
    source="golden vectors of 0.5.3",
    rules=_rules(_OPCODES_B, _get_experimental(40)),
)
V0_5_4: Final = attrs.evolve(
    V0_5_3, release="0.5.4", source="vectors equal those of 0.5.3 byte for byte", free_clips_to_hit=True
)
V0_5_5: Final = attrs.evolve(
    V0_5_4,
    release="0.5.5",
    source="lmcache 0.5.5 multiprocess/protocols, run on a 0.5.5 server; PROTOCOL.md sections 2 and 3.1",
    rules=_rules(_OPCODES_B, _get_experimental(32)),
    key_form=KeyForm.TOKEN_IDS_10,
    registration_form=RegistrationForm.PHYSICAL_SLOTS,
    readers_required=True,
)
V0_5_6: Final = attrs.evolve(
    V0_5_5,
    release="0.5.6",
    source="golden vectors of 0.5.6",
    rules=_rules(_OPCODES_B, _get_experimental(32), clear=("force",)),
    free_needs_live_session=True,
    garbage_after_write_ttl=False,
    op_strings=True,
    unknown_opcode_kills=False,
)
V0_5_7RC2: Final = attrs.evolve(
    V0_5_6,
    release="0.5.7rc2",
    family="D3",
    source="golden vectors of 0.5.7rc2",
    rules=_rules(
        _OPCODES_B,
        _get_experimental(32),
        _NEGOTIATE,
        clear=("force",),
        free=("key", "tp_size", "extra_ranges"),
        prepare_store=("key", "instance_id", "skipped_chunks"),
        registered=replies.REGISTERED_NULL_BLOCK,
    ),
    key_form=KeyForm.TOKEN_BYTES,
    registration_form=RegistrationForm.GROUP_LAYOUTS,
    payload_form=PayloadForm.ENVELOPE,
    get_chunk_size_freezes=True,
)

DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.release: dialect for dialect in (V0_5_0, V0_5_1, V0_5_2, V0_5_3, V0_5_4, V0_5_5, V0_5_6, V0_5_7RC2)
}

_VERSION: Final = re.compile(r"^v?(\d+\.\d+\.\d+)((?:rc|a|b)\d+)?(\.post\d+)?(\.dev\d+)?(?:[+-].*)?$")


def dialect_named(release: str) -> Dialect:
    """The dialect that a caller names; raises UnsupportedError with the list of those there are."""
    dialect = DIALECTS.get(release)
    if dialect is None:
        raise UnsupportedError(
            f"dialect={release!r} is not known; known are {', '.join(DIALECTS)}", request="connect", dialect=release
        )
    return dialect


def dialect_of_server(version: str) -> Dialect:
    """The dialect of the version string that a server reports; raises UnsupportedError when it is not in the table.

    Build and post-release suffixes do not change the wire and are dropped. Pre-releases do: 0.5.7's candidates speak
    D3 (all of them, PROTOCOL.md section 12), while a development build may speak either side of a change and is
    refused.
    """
    match = _VERSION.match(version)
    if match is not None and match[4] is None:
        release, candidate = match[1], match[2] or ""
        if release == "0.5.7" and candidate.startswith("rc"):
            return V0_5_7RC2
        if not candidate and release in DIALECTS:
            return DIALECTS[release]
    raise UnsupportedError(
        f"the server reports LMCache version {version!r}, which this library has not been verified against; it speaks "
        f"to {', '.join(DIALECTS)}. If you know that the server speaks one of these wires, pass dialect=..., for "
        "example "
        'dialect="0.5.6"',
        request="connect",
        dialect=version,
    )
