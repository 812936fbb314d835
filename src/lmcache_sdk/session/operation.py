"""One user call on the server: one request id, one channel, and an END_SESSION that always comes, after everything
else.

`Operation` makes the keys of the call (its tokens are encoded once), sends its requests under its deadline, and keeps
what must still be answered. Leaving it waits, within a short budget of its own, for replies that are out, so that
END_SESSION is the last thing of the session the server sees: a COMMIT handled after it would open the session again
(PROTOCOL.md section 5). END_SESSION itself gets no answer when no engine holds the model any more; that is not an
error of the call.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any, Final, TypeVar

import attrs

from lmcache_sdk.errors import DeadlineExceededError, KVCacheSDKError
from lmcache_sdk.protocol import EndSession, InFlight, IPCCacheServerKey, Request
from lmcache_sdk.session.channel import Channel
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.values import InstanceId, RequestId, TokenIds, override

R = TypeVar("R")
_log = logging.getLogger("lmcache_sdk.session")

CLEANUP_SECONDS: Final = 2.0
"""The budget of clean-up, which runs even when the caller's deadline is spent."""
_END_SECONDS: Final = 1.0


@attrs.frozen
class Identity:
    """Whose cache is meant, and who asks."""

    model_name: str
    world_size: int
    instance_id: InstanceId
    chunk_size: int


class Operation:
    """See the module. Made by `Session.operation`, which owns its channel and ends it."""

    def __init__(
        self, name: str, channel: Channel, identity: Identity, tokens: TokenIds, cache_salt: str, deadline: Deadline
    ) -> None:
        self.name = name
        self.channel = channel
        self.identity = identity
        self.tokens = tokens
        self.cache_salt = cache_salt
        self.deadline = deadline
        self.request_id = RequestId(f"{name}-{uuid.uuid4().hex}")
        self._sent: list[InFlight[Any]] = []

    @property
    def num_chunks(self) -> int:
        """Whole chunks of the call's tokens."""
        return len(self.tokens) // self.identity.chunk_size

    def key(self, first_chunk: int, num_chunks: int, *, worker_id: int | None = 0) -> IPCCacheServerKey:
        """The key of a range of chunks; the tokens in it always start at position 0."""
        size = self.identity.chunk_size
        return IPCCacheServerKey(
            model_name=self.identity.model_name,
            world_size=self.identity.world_size,
            worker_id=worker_id,
            token_ids=self.tokens,
            start=first_chunk * size,
            end=(first_chunk + num_chunks) * size,
            request_id=self.request_id,
            cache_salt=self.cache_salt,
        )

    def submit(self, request: Request[R]) -> InFlight[R]:
        """Sends a request of this session."""
        entry = self.channel.submit(request)
        self._sent.append(entry)
        return entry

    def wait(self, entry: InFlight[R]) -> R:
        """Waits for a reply under the call's deadline."""
        return self.channel.wait(entry, self.deadline, self.name)

    def call(self, request: Request[R]) -> R:
        """Sends a request and waits for its reply."""
        return self.wait(self.submit(request))

    def settle(self, entry: InFlight[R], cleanup: Deadline) -> R | None:
        """Waits for a reply during clean-up; None when it does not come or is illegal. Never raises an error of
        ours.
        """
        try:
            return self.channel.wait(entry, cleanup, self.name, interruptible=False)
        except KVCacheSDKError as error:
            _log.debug("%s: clean-up without an answer: %s", self.name, error)
            return None

    def settle_call(self, request: Request[R], cleanup: Deadline) -> R | None:
        """Sends a request during clean-up and waits as `settle` does."""
        try:
            return self.settle(self.submit(request), cleanup)
        except KVCacheSDKError as error:
            _log.debug("%s: clean-up request not sent: %s", self.name, error)
            return None

    def end(self) -> None:
        """Ends the server's session, after the last reply of the operation or when the clean-up budget is spent."""
        if not self._sent or self.channel.broken:
            return
        cleanup = Deadline.after(CLEANUP_SECONDS)
        for entry in self._sent:
            if not entry.settled:
                self.settle(entry, cleanup)
        ending = EndSession(request_id=self.request_id)
        try:
            self.channel.wait(self.channel.submit(ending), Deadline.after(_END_SECONDS), self.name, interruptible=False)
        except DeadlineExceededError:
            _log.debug("%s: END_SESSION was not answered; the server's session ends by its TTL", self.name)
        except KVCacheSDKError as error:
            _log.debug("%s: END_SESSION failed: %s", self.name, error)

    @override
    def __repr__(self) -> str:
        return f"<Operation {self.name} {self.num_chunks} chunks>"
