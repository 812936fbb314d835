"""Sessions and lookup jobs, both by request id.

A session keeps the chunk hashes of its request and never computes one twice, whatever tokens come later. A job is a
lookup's result that nobody has asked for yet; it has no end of its own.
"""

from __future__ import annotations

import attrs

from lmcache_sdk.devserver.clocks import Clock
from lmcache_sdk.devserver.hashing import RollingHashes
from lmcache_sdk.protocol import IPCCacheServerKey
from lmcache_sdk.values import RequestId


class RefusedError(Exception):
    """The server would raise here: it logs, and the client hears nothing."""


@attrs.define(eq=False)
class Session:
    """What the server remembers of one request."""

    created_at: float
    hashes: RollingHashes
    packed_tokens: bytes = b""
    key: IPCCacheServerKey | None = None
    """Which objects END_SESSION touches; from LOOKUP, later releases also from a store."""
    hit_chunks: int | None = None
    """What the last lookup found, once its result was asked for."""
    storing: bool = False
    retrieving: bool = False

    def chunk_hashes(self, chunk_size: int, start: int, end: int | None, *, end_is_checked: bool) -> list[bytes]:
        """The hashes of a range of tokens; `end` None means the last whole chunk."""
        num_tokens = len(self.packed_tokens) // 4
        if end is None:
            end = num_tokens // chunk_size * chunk_size
        elif end_is_checked and end > num_tokens:
            raise RefusedError(f"end {end} lies beyond the {num_tokens} tokens")
        if start % chunk_size or end % chunk_size:
            raise RefusedError(f"{start} to {end} is not a range of whole chunks")
        self.hashes.extend(self.packed_tokens, end // chunk_size)
        return self.hashes.between(start // chunk_size, end // chunk_size)


class SessionTable:
    """All sessions."""

    def __init__(self, clock: Clock, ttl: float) -> None:
        self.ttl = ttl
        self._clock = clock
        self._sessions: dict[RequestId, Session] = {}

    def open(self, request_id: RequestId, chunk_size: int) -> Session:
        """The session of a request, made when there is none."""
        session = self._sessions.get(request_id)
        if session is None:
            session = Session(self._clock(), RollingHashes(chunk_size))
            self._sessions[request_id] = session
        return session

    def close(self, request_id: RequestId) -> Session | None:
        """Forgets a session."""
        return self._sessions.pop(request_id, None)

    def sweep(self) -> None:
        """Forgets sessions that are older than the time they are given, however busy they were."""
        now = self._clock()
        for request_id in [known for known, session in self._sessions.items() if now - session.created_at > self.ttl]:
            del self._sessions[request_id]

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """The requests that have a session."""
        return tuple(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)


@attrs.frozen
class LookupJob:
    """A lookup's result, waiting to be asked for."""

    hit_chunks: int
