"""Proof that the server does what we think, before real data is touched: a few bytes stored inline and read back.

On an shm server it proves the mapping: the bytes that the server wrote into its pool must show up in the segment
mapped here, which a segment of the same name on another host or of another server does not do (FAULTS.md 13.2). On a
server whose dialect the caller named it proves the dialect. It runs on a private registration of one layer, one plane
and width 1, leaves one object of one page under a name that nobody asks for, and takes nothing else with it. Verified
on every release (PROTOCOL.md section 13).
"""

from __future__ import annotations

import os
from typing import Final

import torch

from lmcache_sdk.errors import PoolFullError, RemoteProtocolError
from lmcache_sdk.facade.transfer import Endpoint, lookup_chunks, retrieve_prefix, write_range
from lmcache_sdk.layout import KVLayout
from lmcache_sdk.session import Deadline, unproven
from lmcache_sdk.values import MAX_TOKEN_ID, TokenIds

CANARY_LAYOUT: Final = KVLayout(num_layers=1, planes=1, hidden_dim=1, dtype=torch.uint8)
_ATTEMPTS: Final = 12
_PAUSE: Final = 0.1


def prove(endpoint: Endpoint, deadline: Deadline) -> None:
    """Raises PoolFullError when the server has no room for the canary, ConnectError when its bytes do not show up."""
    chunk_size = endpoint.identity.chunk_size
    written = torch.frombuffer(bytearray(os.urandom(chunk_size)), dtype=torch.uint8).view(1, 1, chunk_size, 1)
    tokens = TokenIds(int.from_bytes(os.urandom(4), "big") % MAX_TOKEN_ID for _ in range(chunk_size))
    for attempt in range(_ATTEMPTS):
        if attempt:
            endpoint.session.pause(_PAUSE)
        _store(endpoint, written, tokens, deadline)
        if lookup_chunks(endpoint, tokens, "", deadline, step="connect"):
            read = retrieve_prefix(endpoint, CANARY_LAYOUT, tokens, "", deadline, step="connect")
            if read is not None:
                _compare(endpoint, read, written)
                return
    raise PoolFullError(
        f"connect: the server's memory has no room for a single chunk, and none was evicted in {_ATTEMPTS * _PAUSE:g} "
        "s; wait, clear the cache, or start the server with a larger --l1-size-gb"
    )


def _store(endpoint: Endpoint, written: torch.Tensor, tokens: TokenIds, deadline: Deadline) -> None:
    with endpoint.session.operation("connect", endpoint.identity, tokens, "", deadline, exclusive=True) as operation:
        for _ in write_range(endpoint, operation, CANARY_LAYOUT, written, 0, 1, inline=True):
            pass


def _compare(endpoint: Endpoint, read: torch.Tensor, written: torch.Tensor) -> None:
    if read.shape == written.shape and read.flatten().tolist() == written.flatten().tolist():
        return
    pool = endpoint.session.pool
    if pool is not None:
        raise unproven(pool.name)
    raise RemoteProtocolError(
        "connect: bytes stored and read back differ, so the server does not speak the wire of "
        f"{endpoint.session.dialect.release}"
    )
