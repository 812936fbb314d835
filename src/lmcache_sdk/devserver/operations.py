"""Which handler answers which request, and in which of the server's three threads it runs.

SYNC operations run in the socket loop itself, so they are answered whatever the others do. NORMAL and AFFINITY have one
worker each, as the real server has by default: lookups wait for lookups, transfers for transfers, in the order in which
they came.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from lmcache_sdk import protocol as p
from lmcache_sdk.devserver.core import Core
from lmcache_sdk.devserver.lookups import LookupHandlers
from lmcache_sdk.devserver.management import ManagementHandlers
from lmcache_sdk.devserver.sessions import RefusedError
from lmcache_sdk.devserver.transfers import TransferHandlers


class Lane(enum.Enum):
    """Where a handler runs."""

    SYNC = "sync"
    NORMAL = "normal"
    AFFINITY = "affinity"


_LANES = {
    p.Register: Lane.SYNC,
    p.Unregister: Lane.SYNC,
    p.GetChunkSize: Lane.SYNC,
    p.NegotiateChunkSize: Lane.SYNC,
    p.Noop: Lane.SYNC,
    p.GetExperimental: Lane.SYNC,
    p.PrepareStore: Lane.AFFINITY,
    p.CommitStore: Lane.AFFINITY,
    p.PrepareRetrieve: Lane.AFFINITY,
    p.CommitRetrieve: Lane.AFFINITY,
}

_ENGINE_DRIVEN = (p.Register, p.Unregister, p.PrepareStore, p.CommitStore, p.PrepareRetrieve, p.CommitRetrieve)


def lane_of(request: p.Request[Any]) -> Lane:
    """Where the request is handled."""
    return _LANES.get(type(request), Lane.NORMAL)


class Operations:
    """All handlers of a server."""

    def __init__(self, core: Core) -> None:
        lookups, transfers, management = LookupHandlers(core), TransferHandlers(core), ManagementHandlers(core)
        self._core = core
        self._handlers: dict[type[p.Request[Any]], Callable[[Any], p.Reply]] = {
            p.Lookup: lookups.lookup,
            p.QueryPrefetchStatus: lookups.query_status,
            p.WaitPrefetchStatus: lookups.wait_status,
            p.FreeLookupLocks: lookups.free_locks,
            p.EndSession: lookups.end_session,
            p.PrepareStore: transfers.prepare_store,
            p.CommitStore: transfers.commit_store,
            p.PrepareRetrieve: transfers.prepare_retrieve,
            p.CommitRetrieve: transfers.commit_retrieve,
            p.Register: management.register,
            p.Unregister: management.unregister,
            p.Ping: management.ping,
            p.Clear: management.clear,
            p.GetChunkSize: management.get_chunk_size,
            p.NegotiateChunkSize: management.negotiate,
            p.Noop: management.noop,
            p.GetExperimental: management.get_experimental,
        }

    def answer(self, request: p.Request[Any]) -> p.Reply:
        """The reply; raises RefusedError when the client is to hear nothing."""
        if isinstance(request, _ENGINE_DRIVEN) and not self._core.settings.engine_driven:
            raise RefusedError("the engine-driven operations are not loaded")
        if getattr(request, "instance_id", 0) is None and not isinstance(request, p.Ping):
            raise RefusedError("an instance id is missing")
        key = getattr(request, "key", None)
        if key is not None:
            self._core.check_key(key)
        return self._handlers[type(request)](request)
