"""One user call on the server: one request id, one channel, what must be given back, and END_SESSION after everything
else.

`Operation` makes the keys of the call (its tokens are encoded once), sends its requests under its deadline, and keeps
its *obligations*: a lease to release, a reservation to complete. `finish` fulfils them in order and then ends the
server's session, so that END_SESSION is the last thing of it the server sees: a COMMIT handled later would open it
again (PROTOCOL.md section 5). What cannot be fulfilled in time, because the server does not answer, stays owed: the
session keeps the operation with its channel and finishes it when answers come. Nobody waits for the answer to
END_SESSION: the next call on the channel takes it, and there is none when no engine holds the model any more.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import Final, Protocol, TypeVar

import attrs

from lmcache_sdk.errors import ConnectionLostError, DeadlineExceededError, KVCacheSDKError, TransportError
from lmcache_sdk.protocol import EndSession, InFlight, IPCCacheServerKey, Request
from lmcache_sdk.session.channel import Channel
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.values import InstanceId, RequestId, TokenIds, override

R = TypeVar("R")
_log = logging.getLogger("lmcache_sdk.session")

_SILENCE_SECONDS: Final = 1.0
CLEANUP_SECONDS: Final = 0.5
"""The budget of a call's clean-up, which runs even when the caller's deadline is spent."""


class Obligation(Protocol):
    """Something the server holds for us, and how to give it back."""

    def fulfil(self, deadline: Deadline) -> bool:
        """Goes on giving it back, as far as answers come; whether nothing is owed any more. Raises no error of ours."""

    stuck: str
    """Why only the server's TTL can end it; empty while an answer can."""

    @property
    def transfer_open(self) -> bool:
        """Whether a PREPARE or COMMIT of ours is unresolved: no other transfer of the same key may begin then."""

    @property
    def forbids_unregister(self) -> bool:
        """Whether the server would publish unwritten bytes if our instance left now."""

    def last_resort(self) -> None:
        """What can still be sent, unanswered, when nobody will come back; only what cannot harm others."""


class Probe(Protocol):
    """Asks the server over HTTP what its message port does not say."""

    def instance_has_left(self, instance_id: InstanceId, deadline: Deadline) -> bool:
        """Whether the server answers and does not know this instance any more."""

    def model_has_left(self, model_name: str, deadline: Deadline) -> bool:
        """Whether the server answers and no instance holds this model any more."""

    def close(self) -> None:
        """Frees what it holds."""


@attrs.frozen
class Identity:
    """Whose cache is meant, and who asks."""

    model_name: str
    world_size: int
    instance_id: InstanceId
    chunk_size: int


class Operation:
    """See the module. Made by `Session.operation`, which owns its channel and finishes it."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        identity: Identity,
        tokens: TokenIds,
        cache_salt: str,
        deadline: Deadline,
        probe: Probe | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        self.name: str = name
        self.channel: Channel = channel
        self.identity: Identity = identity
        self.tokens: TokenIds = tokens
        self.cache_salt: str = cache_salt
        self.deadline: Deadline = deadline
        self.request_id: RequestId = RequestId(f"{name}-{uuid.uuid4().hex}")
        self.in_order: bool = in_order
        """Whether the server handles LOOKUP and what follows it on the same socket one after the other."""
        self._probe = probe
        self._obligations: list[Obligation] = []
        self._open = False
        """Whether the server may have made a session for our request id."""

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
        self._open = True
        return self.channel.submit(request)

    def wait(self, entry: InFlight[R]) -> R:
        """Waits for a reply under the call's deadline.

        A server that has forgotten our instance never answers its transfers. So when an answer takes long, it is asked
        over HTTP whether it still knows us; ConnectionLostError when it does not.
        """
        patience = _SILENCE_SECONDS
        while self._probe is not None and patience < self.deadline.remaining() / 2:
            try:
                return self.channel.wait(entry, self.deadline.capped(patience), self.name)
            except DeadlineExceededError:
                if self._probe.instance_has_left(self.identity.instance_id, self.deadline.capped(_SILENCE_SECONDS)):
                    raise ConnectionLostError(
                        f"{self.name}: {entry.name.upper()}: the server no longer knows this instance"
                    ) from None
            patience *= 2
        return self.channel.wait(entry, self.deadline, self.name)

    def call(self, request: Request[R]) -> R:
        """Sends a request and waits for its reply."""
        return self.wait(self.submit(request))

    def model_has_left(self, deadline: Deadline) -> bool:
        """Whether the server says that no instance holds the model any more; False when it cannot be asked."""
        return self._probe is not None and self._probe.model_has_left(self.identity.model_name, deadline)

    def owe(self, obligation: Obligation) -> None:
        """Adds what must be given back before the session ends."""
        self._obligations.append(obligation)

    def fulfilled(self, obligation: Obligation) -> None:
        """Takes out what is done before the end: a long store must not keep every payload that it sent."""
        self._obligations = [owed for owed in self._obligations if owed is not obligation]

    def settle(self, entry: InFlight[R], cleanup: Deadline) -> R | None:
        """Waits for a reply during clean-up; None when it does not come or is illegal. Raises no error of ours."""
        try:
            return self.channel.wait(entry, cleanup, self.name, interruptible=False)
        except KVCacheSDKError as error:
            _log.debug("%s: clean-up without an answer: %s", self.name, str(error))
            return None

    def finish(self, deadline: Deadline) -> bool:
        """Gives back what is owed, then ends the server's session; whether nothing is owed any more."""
        if not self._fulfil_all(deadline):
            return False
        self._send_end()
        return True

    def end_early(self) -> None:
        """Sends END_SESSION where nothing is owed, before the caller does something else."""
        if self._fulfil_all(Deadline.after(0.0)):
            self._send_end()

    def _fulfil_all(self, deadline: Deadline) -> bool:
        while self._obligations and not self.channel.broken:
            obligation = self._obligations[0]
            try:
                done = obligation.fulfil(deadline)
            except TransportError as error:
                _log.debug("%s: clean-up request not sent: %s", self.name, str(error))
                if not self.channel.broken:
                    return False
                break  # nothing more can be said on it
            if not done:
                return False
            self.fulfilled(obligation)
        return True

    def _send_end(self) -> None:
        if self._open and not self.channel.broken:
            self._open = False
            try:
                # nobody waits for the answer: there is none when no engine holds the model any more
                self.channel.exchange.abandon(self.channel.submit(EndSession(request_id=self.request_id)))
            except KVCacheSDKError as error:
                _log.debug("%s: END_SESSION was not sent: %s", self.name, str(error))

    def give_up(self) -> None:
        """The last words of an operation that nobody will finish."""
        for obligation in self._obligations:
            try:
                obligation.last_resort()
            except KVCacheSDKError as error:
                _log.debug("%s: %s", self.name, str(error))
        if self._open and not self.channel.broken:
            self._open = False
            with contextlib.suppress(KVCacheSDKError):
                # it cancels nothing, and nothing of this session follows any more
                self.channel.submit(EndSession(request_id=self.request_id))

    @property
    def stuck(self) -> str:
        """Why only the server's TTL can end what is owed; empty while an answer can."""
        return next((obligation.stuck for obligation in self._obligations if obligation.stuck), "")

    @property
    def transfer_open(self) -> bool:
        """Whether a transfer of ours is unresolved on the server."""
        return any(obligation.transfer_open for obligation in self._obligations)

    @property
    def owing(self) -> bool:
        """Whether something must still be given back, and can be."""
        return bool(self._obligations) and not self.channel.broken

    @property
    def forbids_unregister(self) -> bool:
        """Whether something is open that the server would publish if our instance left."""
        return any(obligation.forbids_unregister for obligation in self._obligations)

    @override
    def __repr__(self) -> str:
        return f"<Operation {self.name} {self.num_chunks} chunks {len(self._obligations)} owed>"
