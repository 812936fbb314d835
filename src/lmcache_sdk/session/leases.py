"""Read locks that the server holds for us, from LOOKUP to COMMIT_RETRIEVE or FREE_LOOKUP_LOCKS.

`ReadLease` walks the lease states of `states.py` and is an obligation of its operation. What it guarantees
(PROTOCOL.md sections 5 and 13):

- LOOKUP starts at 0 with worker_id None, over whole chunks; its result is polled, never waited for on the server. The
  first question goes out together with LOOKUP where the server handles them in order: elsewhere it might be handled
  first, and the job would be left behind;
- PREPARE_RETRIEVE is sent for ranges in order, each once;
- FREE_LOOKUP_LOCKS is sent at most once, and only for the rest for which no PREPARE_RETRIEVE was sent: twice, or for
  chunks whose lock a PREPARE took, it would take another reader's lock;
- when the hit is not known it is asked for first, also later, when the server answers again. If nobody will ask any
  more, FREE is a last word only where the server binds it to the session (`free_needs_live_session`); if the number
  came and was no number, FREE is sent where the server clips it to its own record (`free_clips_to_hit`). Elsewhere the
  TTL does it: leaking beats stealing;
- a PREPARE that is not answered is committed all the same on an shm server: its answer may come late and holds locks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import attrs

from lmcache_sdk.errors import DeadlineExceededError, LeaseExpiredError, RemoteProtocolError
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
from lmcache_sdk.session.operation import Operation
from lmcache_sdk.session.states import Event, LeaseState, lease_machine
from lmcache_sdk.values import override

_log = logging.getLogger("lmcache_sdk.session")

_FIRST_PAUSE: Final = 0.0001
_LONGEST_PAUSE: Final = 0.02
_FREE_SECONDS: Final = 0.3
"""How long FREE_LOOKUP_LOCKS may take before the reason is asked for."""


@attrs.define(eq=False, repr=False)
class _Prepared:
    """One PREPARE_RETRIEVE, and its COMMIT_RETRIEVE once that was sent."""

    entry: InFlight[PreparedRetrieve]
    first_chunk: int
    num_chunks: int
    commit: InFlight[Committed] | None = None


class ReadLease:
    """The read locks of one operation. `shm` says whether PREPARE leaves them held until COMMIT."""

    def __init__(
        self, operation: Operation, ttl: float | None, *, shm: bool, clock: Callable[[], float] = boot_time
    ) -> None:
        self._operation = operation
        self._shm = shm
        self._machine = lease_machine()
        self._half_ttl = None if ttl is None else ttl / 2
        self._clock = clock
        self._taken_at = 0.0
        self._lookup: InFlight[Void] | None = None
        self._query: InFlight[Status] | None = None
        self._free: InFlight[Void] | None = None
        self._prepared: list[_Prepared] = []
        self._num_prepared = 0
        self.stuck: str = ""
        self.num_chunks: int = 0
        """Chunks of the hit prefix that are locked."""

    @property
    def state(self) -> LeaseState:
        """Where the lease is."""
        return self._machine.state

    # ---- taking -----------------------------------------------------------------------------------------------------

    def acquire(self) -> int:
        """Looks the operation's tokens up and locks the hit prefix; gives its number of chunks."""
        operation = self._operation
        self._taken_at = self._clock()  # before the request: the server's clock cannot have started earlier
        self._lookup = operation.submit(Lookup(key=self._whole()))
        self._machine.record(Event.LOOKUP_SENT)
        operation.owe(self)
        if operation.in_order:
            self._ask()
        operation.wait(self._lookup)
        return self._found(self._prefetched())

    def _prefetched(self) -> int:
        """Asks until the prefetch has ended; a timeout after an answer says that the server was still loading."""
        operation = self._operation
        step = f"{operation.name}: QUERY_PREFETCH_STATUS (still loading at the server's last answer)"
        ready = operation.wait(self._query or self._ask()).ready_chunks
        pause = _FIRST_PAUSE
        while ready is None:
            self._query = None
            operation.channel.pause(pause, operation.deadline)
            operation.deadline.check(step)
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                ready = operation.wait(self._ask()).ready_chunks
            except DeadlineExceededError as error:
                raise operation.deadline.exceeded(step) from error
        return ready

    def _ask(self) -> InFlight[Status]:
        self._query = self._operation.submit(QueryPrefetchStatus(request_id=self._operation.request_id))
        return self._query

    def _found(self, ready: int) -> int:
        asked = self._operation.num_chunks
        if ready > asked:
            raise RemoteProtocolError(f"prefetch_status: {ready} chunks of {asked} asked for", path="prefetch_status")
        self.num_chunks = ready
        self._machine.record(Event.PREFETCH_READY if ready else Event.NOTHING_CACHED)
        return ready

    def check_alive(self) -> None:
        """Raises LeaseExpiredError when half of the locks' TTL is over: what was copied since may be another's."""
        if self._half_ttl is not None and self._clock() - self._taken_at > self._half_ttl:
            raise LeaseExpiredError(
                f"{self._operation.name}: the read locks are older than half their TTL of {2 * self._half_ttl:g} s (a "
                "suspended process, or a copy that took too long); the bytes were discarded"
            )

    def prepare(self, num_chunks: int) -> InFlight[PreparedRetrieve]:
        """Sends PREPARE_RETRIEVE for the next `num_chunks` chunks; the caller waits for it with `received`."""
        first, self._num_prepared = self._num_prepared, self._num_prepared + num_chunks
        instance_id = self._operation.identity.instance_id
        request = PrepareRetrieve(key=self._operation.key(first, num_chunks), instance_id=instance_id)
        entry = self._operation.submit(request)
        self._prepared.append(_Prepared(entry, first, num_chunks))
        return entry

    def received(self, entry: InFlight[PreparedRetrieve]) -> PreparedRetrieve:
        """What a PREPARE_RETRIEVE gave; raises LeaseExpiredError when the server no longer has what it had locked."""
        reply = self._operation.wait(entry)
        if not reply.success:
            raise LeaseExpiredError(
                f"{self._operation.name}: the server found {self.num_chunks} chunks and then could not give them: "
                "they were cleared in between"
            )
        return reply

    def commit(self, entry: InFlight[PreparedRetrieve]) -> None:
        """Gives the locks of one PREPARE back, without waiting; on an inline server they went with the reply."""
        prepared = next(item for item in self._prepared if item.entry is entry)
        if self._shm:
            self._send_commit(prepared)
        else:
            self._prepared.remove(prepared)

    def _send_commit(self, prepared: _Prepared) -> None:
        if prepared.commit is None:
            key = self._operation.key(prepared.first_chunk, prepared.num_chunks)
            instance_id = self._operation.identity.instance_id
            prepared.commit = self._operation.submit(CommitRetrieve(key=key, instance_id=instance_id))

    # ---- giving back ------------------------------------------------------------------------------------------------

    def fulfil(self, deadline: Deadline) -> bool:
        """Gives back what is still held; see `Obligation`."""
        if self._machine.state is LeaseState.WAITING:
            self._machine.record(Event.DEADLINE_PASSED)
        if self._machine.state is LeaseState.UNCERTAIN and not self._find_out(deadline):
            return self._expired()
        if self._machine.state is LeaseState.HELD and not (self._commit_rest(deadline) and self._free_rest(deadline)):
            return self._expired()
        return True

    def _expired(self) -> bool:
        """Whether the TTL has taken the locks away, so that there is nothing to wait for any more."""
        if self._half_ttl is None or self._clock() - self._taken_at < 2 * self._half_ttl:
            return False
        self._machine.record(Event.TTL_PASSED)
        return True

    def _find_out(self, deadline: Deadline) -> bool:
        """Asks for the result of a lookup that the call gave up on; whether the hit is known now."""
        operation = self._operation
        if self._lookup is None or (not self._lookup.settled and operation.settle(self._lookup, deadline) is None):
            return False
        while True:
            query = self._query or self._ask()
            status = operation.settle(query, deadline)
            if not query.settled:
                return False
            if status is None or (status.ready_chunks or 0) > operation.num_chunks:
                return self._free_unknown(deadline)
            if status.ready_chunks is not None:
                self._found(status.ready_chunks)
                return True
            self._query = None  # answered, but still loading: ask again
            operation.channel.pause(_LONGEST_PAUSE, deadline, interruptible=False)
            if deadline.passed:
                return False

    def _free_unknown(self, deadline: Deadline) -> bool:
        """The number was delivered, once, and was no number: what is locked will never be known.

        From 0.5.4 on the server clips FREE to the hit that its session recorded. Before, the TTL must do it.
        """
        if not self._operation.channel.exchange.dialect.free_clips_to_hit:
            self._machine.record(Event.GIVEN_UP)
            return True
        if self._free is None:
            self._free = self._operation.submit(FreeLookupLocks(key=self._whole()))
        if self._operation.settle(self._free, deadline) is None:
            return False
        self._machine.record(Event.FREED)
        return True

    def _commit_rest(self, deadline: Deadline) -> bool:
        """COMMIT_RETRIEVE for what was prepared and not committed; whether all answers have come."""
        while self._prepared:
            prepared = self._prepared[0]
            if self._shm:
                reply = self._operation.settle(prepared.entry, deadline)
                if not prepared.entry.settled:
                    self._send_commit(prepared)
                    return False
                # an SHM PREPARE that answers false has released its locks already; an illegal answer may hold them
                if reply is None or reply.success:
                    self._send_commit(prepared)
                if prepared.commit is not None and self._operation.settle(prepared.commit, deadline) is None:
                    return False
            elif self._operation.settle(prepared.entry, deadline) is None and not prepared.entry.settled:
                return False
            self._prepared.pop(0)
        return True

    def _free_rest(self, deadline: Deadline) -> bool:
        rest = self.num_chunks - self._num_prepared
        if rest and self._free is None:
            key = self._operation.key(self._num_prepared, rest, worker_id=None)
            self._free = self._operation.submit(FreeLookupLocks(key=key))
        if self._free is not None and self._operation.settle(self._free, deadline.capped(_FREE_SECONDS)) is None:
            return self._free_by_reading(deadline)
        self._machine.record(Event.FREED if rest else Event.COMMITTED)
        return True

    def _free_by_reading(self, deadline: Deadline) -> bool:
        """FREE is never answered, and releases nothing, once the model's last registration has left; a read does
        both.
        """
        if self._free is None or self._free.settled or not self._operation.model_has_left(deadline):
            return False
        self._free = None
        self.prepare(self.num_chunks - self._num_prepared)
        return self._commit_rest(deadline) and self._free_rest(deadline)

    @property
    def transfer_open(self) -> bool:
        """Whether a PREPARE_RETRIEVE of ours is unresolved; a LOOKUP that is not forbids nothing."""
        return bool(self._prepared)

    @property
    def forbids_unregister(self) -> bool:
        """Never: read locks do not publish anything."""
        return False

    def last_resort(self) -> None:
        """FREE without waiting, where the server binds it to the session and its own record of the hit."""
        if self._free is None and self._operation.channel.exchange.dialect.free_needs_live_session:
            start = self._num_prepared
            key = self._operation.key(start, self._operation.num_chunks - start, worker_id=None)
            self._free = self._operation.submit(FreeLookupLocks(key=key))

    def _whole(self) -> IPCCacheServerKey:
        return self._operation.key(0, self._operation.num_chunks, worker_id=None)

    @override
    def __repr__(self) -> str:
        return f"<ReadLease {self._operation.request_id} {self.state.name} {self.num_chunks} chunks>"
