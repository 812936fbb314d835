"""One msgspec struct per request and per reply. No version, no opcode and no wire form is in them.

A request knows its reply: `Lookup` is a `Request[Void]`, and whoever calls it gets a `Void`. Which fields travel, in
how many frames and under which opcode, is the dialect's (`rules.py`). Requests are frozen; the codec encodes whatever
they hold, also values that a client must not send: validation sits above this layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from lmcache_sdk.values import InstanceId, RequestId, TokenIds

Buffer = bytes | bytearray | memoryview
R_co = TypeVar("R_co", covariant=True)


class IPCCacheServerKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names a token range of a model's cache, and the session that asks for it.

    The server resolves it to one object per chunk and rank. `request_id`, `request_configs` and `num_kv_readers` are
    not part of an object's name (PROTOCOL.md section 3.1).
    """

    model_name: str
    world_size: int
    worker_id: int | None
    """The rank; None means every rank, which only LOOKUP and FREE_LOOKUP_LOCKS accept."""
    token_ids: TokenIds
    """All tokens from position 0, even when `start` is larger: a chunk's hash covers everything before it."""
    start: int
    end: int
    request_id: RequestId
    cache_salt: str = ""
    request_configs: Mapping[str, object] | None = None
    num_kv_readers: int = 1


class GroupLayout(msgspec.Struct, frozen=True):
    """One kernel group of a registration (0.5.7 only)."""

    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    tokens_per_block: int
    window_tokens: int = 0
    kv_size: int = 0
    window_chunks: int = 0
    recurrent: bool = False


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The geometry with which the server allocates what an instance stores (PROTOCOL.md section 3.2)."""

    instance_id: InstanceId
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    """One plane per object, `[layer, token, hidden]`: MLA and fused layouts alike."""
    num_physical_slots: int | None = None
    group_layouts: tuple[GroupLayout, ...] = ()


class Slot(msgspec.Struct, frozen=True):
    """The byte range of one chunk in the server's pool, with the shape and dtype it was stored with."""

    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: str


# ---- replies --------------------------------------------------------------------------------------------------------


class Void(msgspec.Struct, frozen=True):
    """The server did it and has nothing to say: a reply of two frames."""


class PrefetchStatus(msgspec.Struct, frozen=True):
    """How many leading chunks are ready on all ranks; None while they are still being loaded."""

    ready_chunks: int | None


class Registered(msgspec.Struct, frozen=True):
    """The registration's answer: the pool's name and size, or "" and 0 when tensors travel inline."""

    shm_name: str = ""
    pool_size: int = 0
    null_block_id: int = 0
    """0.5.7 only; engines pad with it, we do not need it."""


class PreparedStore(msgspec.Struct, frozen=True):
    """Where to write. `slots` is None on an inline server; empty slots mean that nothing was reserved."""

    slots: tuple[Slot, ...] | None
    chunk_indices: tuple[int, ...]
    """The chunk of each slot, counted from the key's `start`."""


class PreparedRetrieve(msgspec.Struct, frozen=True):
    """What was hit: inline bytes in `data`, or one slot per chunk in order. All or nothing for the asked range."""

    success: bool
    data: memoryview | bytes
    slots: tuple[Slot, ...] | None


class Committed(msgspec.Struct, frozen=True):
    """The answer to a commit."""

    success: bool


class ChunkSize(msgspec.Struct, frozen=True):
    """Tokens per chunk."""

    num_tokens: int


class Experimental(msgspec.Struct, frozen=True):
    """The optional features that the server was started with."""

    names: tuple[str, ...]


class Pong(msgspec.Struct, frozen=True):
    """The answer to a ping; it says nothing about a registration."""

    alive: bool


class NoopAnswer(msgspec.Struct, frozen=True):
    """The answer to a no-op: "OK"."""

    text: str


Reply = (
    Void
    | PrefetchStatus
    | Registered
    | PreparedStore
    | PreparedRetrieve
    | Committed
    | ChunkSize
    | Experimental
    | Pong
    | NoopAnswer
)


# ---- requests -------------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, Generic[R_co], frozen=True, kw_only=True):
    """Base of all requests; generic in the reply."""


class Lookup(Request[Void], frozen=True, kw_only=True):
    """Queues a lookup that takes a read lock on every chunk of the hit prefix."""

    key: IPCCacheServerKey
    tp_size: int = 1


class QueryPrefetchStatus(Request[PrefetchStatus], frozen=True, kw_only=True):
    """Asks for a lookup's result; the number is delivered once."""

    request_id: RequestId


class WaitPrefetchStatus(Request[PrefetchStatus], frozen=True, kw_only=True):
    """The same, but the server waits; with its default of one worker it makes every other client wait too."""

    request_id: RequestId
    timeout: float


class FreeLookupLocks(Request[Void], frozen=True, kw_only=True):
    """Gives back one read lock on each chunk of the key's range. Sent twice it takes another reader's."""

    key: IPCCacheServerKey
    tp_size: int = 1
    extra_ranges: tuple[tuple[int, int], ...] = ()


class EndSession(Request[Void], frozen=True, kw_only=True):
    """Makes the server forget the session. It releases no lock and no reservation."""

    request_id: RequestId


class Register(Request[Registered], frozen=True, kw_only=True):
    """REGISTER_KV_CACHE_ENGINE_DRIVEN_CONTEXT."""

    registration: Registration


class Unregister(Request[Void], frozen=True, kw_only=True):
    """UNREGISTER_KV_CACHE_ENGINE_DRIVEN_CONTEXT. It publishes what is reserved and not committed."""

    instance_id: InstanceId


class PrepareStore(Request[PreparedStore], frozen=True, kw_only=True):
    """Reserves the chunks of the key's range that nobody holds."""

    key: IPCCacheServerKey
    instance_id: InstanceId
    skipped_chunks: tuple[tuple[int, ...], ...] = ()


class CommitStore(Request[Committed], frozen=True, kw_only=True):
    """Publishes: empty `data` means that the slots were written, other bytes are the chunks themselves.

    With `framed`, `data` starts with its own MessagePack bin header and goes out as it is, without a copy.
    """

    key: IPCCacheServerKey
    instance_id: InstanceId
    data: Buffer = b""
    framed: bool = False


class PrepareRetrieve(Request[PreparedRetrieve], frozen=True, kw_only=True):
    """Fetches the key's range, which a LOOKUP has locked."""

    key: IPCCacheServerKey
    instance_id: InstanceId


class CommitRetrieve(Request[Committed], frozen=True, kw_only=True):
    """Gives the read locks of a PREPARE_RETRIEVE back; its answer is always true."""

    key: IPCCacheServerKey
    instance_id: InstanceId


class Clear(Request[Void], frozen=True, kw_only=True):
    """Empties the first tier for everybody. Without `force` (0.5.6 on) it keeps what is locked."""

    force: bool = False


class GetChunkSize(Request[ChunkSize], frozen=True, kw_only=True):
    """Tokens per chunk. On 0.5.7 it freezes them: read /status instead."""


class Ping(Request[Pong], frozen=True, kw_only=True):
    """Liveness. With an instance id it shortens the reaper's patience with that instance: send None."""

    instance_id: InstanceId | None = None


class Noop(Request[NoopAnswer], frozen=True, kw_only=True):
    """Answered by the socket loop itself."""


class GetExperimental(Request[Experimental], frozen=True, kw_only=True):
    """The optional features; has another opcode in 0.5.3 and 0.5.4 than later, and none before."""


class NegotiateChunkSize(Request[ChunkSize], frozen=True, kw_only=True):
    """An engine's request to raise the chunk size to a multiple of `alignment` (0.5.7 only)."""

    alignment: int
