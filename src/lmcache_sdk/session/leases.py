"""Read locks that the server holds for us, from LOOKUP to COMMIT_RETRIEVE or FREE_LOOKUP_LOCKS.

`ReadLease` walks the lease states of `states.py`. What it guarantees (PROTOCOL.md sections 5 and 13):

- LOOKUP starts at 0 with worker_id None, over whole chunks; its result is polled, never waited for on the server;
- PREPARE_RETRIEVE is sent for ranges in order, each once;
- FREE_LOOKUP_LOCKS is sent at most once, and only for the rest for which no PREPARE_RETRIEVE was sent: twice, or for
  chunks whose lock a PREPARE took, it would take another reader's lock;
- when the hit is not known it is first asked for, within the clean-up budget; if it stays unknown, releases up to
  0.5.5 are left to their TTL, because their FREE would be unconditional. Leaking beats stealing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from lmcache_sdk.errors import KVCacheSDKError, LeaseExpiredError, RemoteProtocolError
from lmcache_sdk.protocol import (
    CommitRetrieve,
    Committed,
    FreeLookupLocks,
    InFlight,
    IPCCacheServerKey,
    Lookup,
    PreparedRetrieve,
    PrepareRetrieve,
    QueryPrefetchStatus,
    Void,
)
from lmcache_sdk.protocol import PrefetchStatus as Status
from lmcache_sdk.session.deadline import Deadline, boot_time
from lmcache_sdk.session.operation import CLEANUP_SECONDS, Operation
from lmcache_sdk.session.states import Event, LeaseState, lease_machine
from lmcache_sdk.values import override

_log = logging.getLogger("lmcache_sdk.session")

_FIRST_PAUSE: Final = 0.0001
_LONGEST_PAUSE: Final = 0.02


class ReadLease:
    """The read locks of one operation."""

    def __init__(self, operation: Operation, ttl: float | None, clock: Callable[[], float] = boot_time) -> None:
        self._operation = operation
        self._machine = lease_machine()
        self._half_ttl = None if ttl is None else ttl / 2
        self._clock = clock
        self._taken_at = 0.0
        self._lookup: InFlight[Void] | None = None
        self._query: InFlight[Status] | None = None
        self._num_prepared = 0
        self._uncommitted: list[tuple[InFlight[PreparedRetrieve], int, int]] = []
        self.num_chunks = 0
        """Chunks of the hit prefix that are locked."""

    @property
    def state(self) -> LeaseState:
        """Where the lease is."""
        return self._machine.state

    def acquire(self) -> int:
        """Looks the operation's tokens up and locks the hit prefix; gives its number of chunks."""
        self._taken_at = self._clock()  # before the request: the server's clock cannot have started earlier
        self._lookup = self._operation.submit(Lookup(key=self._whole()))
        self._machine.record(Event.LOOKUP_SENT)
        self._operation.wait(self._lookup)
        pause = _FIRST_PAUSE
        while (ready := self._ask()) is None:
            self._operation.channel.pause(pause, self._operation.deadline)
            self._operation.deadline.check(
                f"{self._operation.name}: QUERY_PREFETCH_STATUS (the server is still loading)"
            )
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self._found(ready)

    def _ask(self) -> int | None:
        self._query = self._operation.submit(QueryPrefetchStatus(request_id=self._operation.request_id))
        return self._operation.wait(self._query).ready_chunks

    def _found(self, ready: int) -> int:
        asked = self._operation.num_chunks
        if ready > asked:
            # what it locked cannot be known then; nothing is freed
            raise RemoteProtocolError(f"prefetch_status: {ready} chunks of {asked} asked for", path="prefetch_status")
        self.num_chunks = ready
        self._machine.record(Event.PREFETCH_READY if ready else Event.NOTHING_CACHED)
        return ready

    def check_alive(self) -> None:
        """Raises LeaseExpiredError when half of the read locks' TTL is over: what was copied since may be another's."""
        if self._half_ttl is not None and self._clock() - self._taken_at > self._half_ttl:
            raise LeaseExpiredError(
                f"{self._operation.name}: the read locks are older than half their TTL of {2 * self._half_ttl:g} s "
                "(a suspended "
                "process, or a copy that took too long); the bytes were discarded"
            )

    def prepare(self, num_chunks: int) -> InFlight[PreparedRetrieve]:
        """Sends PREPARE_RETRIEVE for the next `num_chunks` chunks; the caller waits for it with `prepared`."""
        first, self._num_prepared = self._num_prepared, self._num_prepared + num_chunks
        request = PrepareRetrieve(
            key=self._operation.key(first, num_chunks), instance_id=self._operation.identity.instance_id
        )
        entry = self._operation.submit(request)
        self._uncommitted.append((entry, first, num_chunks))
        return entry

    def prepared(self, entry: InFlight[PreparedRetrieve]) -> PreparedRetrieve:
        """What a PREPARE_RETRIEVE gave; raises LeaseExpiredError when the server no longer has what it had locked."""
        reply = self._operation.wait(entry)
        if not reply.success:
            self._uncommitted = [item for item in self._uncommitted if item[0] is not entry]
            raise LeaseExpiredError(
                f"{self._operation.name}: the server found {self.num_chunks} chunks and then could not give them: "
                "they were "
                "cleared in between"
            )
        return reply

    def commit(self, entry: InFlight[PreparedRetrieve], *, shm: bool) -> InFlight[Committed] | None:
        """Gives the locks of one PREPARE back; on an inline server they went with the reply."""
        index = next(i for i, item in enumerate(self._uncommitted) if item[0] is entry)
        _, first, num_chunks = self._uncommitted.pop(index)
        if not shm:
            return None
        key = self._operation.key(first, num_chunks)
        return self._operation.submit(CommitRetrieve(key=key, instance_id=self._operation.identity.instance_id))

    def release(self, *, shm: bool) -> None:
        """Gives back what is still held. Runs once, on every path, within its own budget; raises no error of ours."""
        cleanup = Deadline.after(CLEANUP_SECONDS)
        if self._machine.state is LeaseState.WAITING:
            self._machine.record(Event.DEADLINE_PASSED)
            self._find_out(cleanup)
        if self._machine.state is LeaseState.UNCERTAIN:
            self._free_unasked()
        if self._machine.state is LeaseState.HELD:
            self._commit_rest(cleanup, shm=shm)
            self._free_rest(cleanup)

    def _find_out(self, cleanup: Deadline) -> None:
        """Asks for the result of a lookup that the call gave up on."""
        if self._lookup is None or self._operation.channel.broken:
            return
        if not self._lookup.settled and self._operation.settle(self._lookup, cleanup) is None:
            return
        status = None
        if self._query is not None:
            status = self._operation.settle(self._query, cleanup)
        while (status is None or status.ready_chunks is None) and not cleanup.passed:
            status = self._operation.settle_call(QueryPrefetchStatus(request_id=self._operation.request_id), cleanup)
            if status is None:
                return
            if status.ready_chunks is None:
                self._operation.channel.pause(_LONGEST_PAUSE, cleanup, interruptible=False)
        if status is not None and status.ready_chunks is not None:
            try:
                self._found(status.ready_chunks)
            except RemoteProtocolError as error:
                _log.warning("%s: %s", self._operation.name, error)

    def _free_unasked(self) -> None:
        """The last word of a call whose lookup nobody answered: safe only where FREE is bound to the session."""
        if self._operation.channel.broken or not self._operation.channel.exchange.dialect.free_needs_live_session:
            return
        try:
            self._operation.submit(FreeLookupLocks(key=self._whole()))
        except KVCacheSDKError as error:
            _log.debug("%s: FREE_LOOKUP_LOCKS not sent: %s", self._operation.name, error)

    def _commit_rest(self, cleanup: Deadline, *, shm: bool) -> None:
        """COMMIT_RETRIEVE for what was prepared and not committed: an answer that comes late holds locks too."""
        pending, self._uncommitted = self._uncommitted, []
        for entry, first, num_chunks in pending:
            reply = self._operation.settle(entry, cleanup)
            if shm and (reply is None or reply.success):
                key = self._operation.key(first, num_chunks)
                request = CommitRetrieve(key=key, instance_id=self._operation.identity.instance_id)
                self._operation.settle_call(request, cleanup)

    def _free_rest(self, cleanup: Deadline) -> None:
        rest = self.num_chunks - self._num_prepared
        if rest:
            key = self._operation.key(self._num_prepared, rest, worker_id=None)
            self._operation.settle_call(FreeLookupLocks(key=key), cleanup)
        self._machine.record(Event.FREED if rest else Event.COMMITTED)

    def _whole(self) -> IPCCacheServerKey:
        return self._operation.key(0, self._operation.num_chunks, worker_id=None)

    @override
    def __repr__(self) -> str:
        return f"<ReadLease {self._operation.request_id} {self.state.name} {self.num_chunks} chunks>"
