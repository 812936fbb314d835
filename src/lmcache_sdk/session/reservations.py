"""Write slots that the server promised, from PREPARE_STORE to COMMIT_STORE; and inline stores, which need no promise.

A `Reservation` is one range of chunks and an obligation of its operation. What it guarantees (PROTOCOL.md section 6,
FAULTS.md 2.2, 6.3, 9.3):

- a reservation can only be committed: there is no abort, and UNREGISTER or a late TTL publishes what the slots hold.
  So after PREPARE_STORE nothing may fail: the arguments have been checked before, an interrupted copy is done again
  and committed, then the interruption goes on;
- empty slots are never committed: that would publish another caller's half-written slots;
- a PREPARE that was not answered in time is never sent again. The writer becomes a snapshot, and whoever finishes the
  operation later fills and commits the slots when the answer comes;
- slots older than half the write TTL are not written and not committed: they may be another's by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from lmcache_sdk.errors import KVCacheSDKError, LeaseExpiredError, RemoteProtocolError, TransportError
from lmcache_sdk.protocol import Buffer, CommitStore, Committed, InFlight, PreparedStore, PrepareStore
from lmcache_sdk.session.deadline import Deadline, boot_time
from lmcache_sdk.session.operation import Operation
from lmcache_sdk.session.states import Event, ReservationState, reservation_machine
from lmcache_sdk.values import override

_log = logging.getLogger("lmcache_sdk.session")

_WRITE_ATTEMPTS: Final = 3
_DONE: Final = (ReservationState.EMPTY, ReservationState.REJECTED, ReservationState.PUBLISHED)


class SlotWriter(Protocol):
    """Fills the slots of one range of chunks. Everything it needs was checked before the reservation."""

    def check(self, prepared: PreparedStore) -> None:
        """Raises RemoteProtocolError when the slots do not fit what is to be written; writes nothing."""

    def write(self, prepared: PreparedStore) -> None:
        """Writes every slot whole; doing it again does no harm."""

    def snapshot(self) -> SlotWriter:
        """A writer of a copy of the same data, for slots that come after the caller has gone."""


class Reservation:
    """The slots of one range of chunks of one operation, or its inline payload."""

    def __init__(
        self,
        operation: Operation,
        first_chunk: int,
        num_chunks: int,
        ttl: float | None,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self._operation = operation
        self._key = operation.key(first_chunk, num_chunks)
        self._num_chunks = num_chunks
        self._first_chunk = first_chunk
        self._half_ttl = None if ttl is None else ttl / 2
        self._clock = clock
        self._machine = reservation_machine()
        self._writer: SlotWriter | None = None
        self._is_snapshot = False
        self._prepare: InFlight[PreparedStore] | None = None
        self._commit: InFlight[Committed] | None = None
        self._indices: tuple[int, ...] = ()
        self._prepared_at = 0.0
        self.stuck: str = ""
        """Why only the server's TTL can end it; empty while an answer can."""
        self.written: tuple[int, ...] = ()
        """The chunks that were published, counted from the operation's first."""

    @property
    def state(self) -> ReservationState:
        """Where the reservation is."""
        return self._machine.state

    # ---- the call ---------------------------------------------------------------------------------------------------

    def prepare(self, writer: SlotWriter) -> None:
        """Sends PREPARE_STORE, without waiting."""
        self._writer = writer
        self._prepared_at = self._clock()
        instance_id = self._operation.identity.instance_id
        self._prepare = self._operation.submit(PrepareStore(key=self._key, instance_id=instance_id))
        self._machine.record(Event.PREPARE_SENT)
        self._operation.owe(self)

    def fill(self) -> None:
        """Waits for the slots, fills exactly those that were given and sends COMMIT_STORE, without waiting."""
        assert self._prepare is not None and self._writer is not None  # `prepare` came first
        prepared = self._operation.wait(self._prepare)
        self._take_slots(prepared)
        if self._machine.state is not ReservationState.RESERVED:
            return
        interruption = self._fill(prepared, self._writer)
        try:
            self._check_alive()
            self._send_commit(b"")
        except KVCacheSDKError as error:
            if interruption is not None:
                raise interruption from error
            raise
        if interruption is not None:
            raise interruption

    def send_inline(self, payload: Buffer) -> None:
        """Sends COMMIT_STORE with the chunks themselves, without waiting; `payload` brings its MessagePack header."""
        self._indices = tuple(range(self._num_chunks))
        self._prepared_at = self._clock()
        self._send_commit(payload)
        self._operation.owe(self)

    def verdict(self) -> tuple[int, ...]:
        """Waits for the answer to COMMIT_STORE, if one was sent; gives the chunks that were published."""
        if self._commit is not None:
            self._take_verdict(self._operation.wait(self._commit).success)
        return self.written

    def _take_slots(self, prepared: PreparedStore) -> None:
        """Notes what PREPARE_STORE gave; refuses what it cannot have given."""
        if prepared.slots is None:
            # an illegal answer says nothing about what was reserved
            where = "prepare_store.context"
            self.stuck = f"{where}: no slots from a server that announced a pool"
            raise RemoteProtocolError(self.stuck, path=where)
        self._machine.record(Event.SLOTS_GIVEN if prepared.slots else Event.NO_SLOTS_GIVEN)
        self._indices = prepared.chunk_indices
        if self._indices and self._indices[-1] >= self._num_chunks:
            where = "prepare_store.context.chunk_indices"
            self.stuck = f"{where}: {self._indices[-1]} of {self._num_chunks} chunks"
            raise RemoteProtocolError(self.stuck, path=where)

    def _fill(self, prepared: PreparedStore, writer: SlotWriter) -> BaseException | None:
        """Writes the slots whole; gives the interruption that came meanwhile, to be raised after the commit."""
        writer.check(prepared)
        interruption: BaseException | None = None
        for attempt in range(_WRITE_ATTEMPTS):
            self._check_alive()
            try:
                writer.write(prepared)
                break
            except BaseException as error:
                interruption = error
                if attempt + 1 == _WRITE_ATTEMPTS:
                    raise
        return interruption

    def _send_commit(self, data: Buffer) -> None:
        instance_id = self._operation.identity.instance_id
        request = CommitStore(key=self._key, instance_id=instance_id, data=data, framed=bool(len(data)))
        self._commit = self._operation.submit(request)
        self._machine.record(Event.COMMIT_SENT)

    def _take_verdict(self, accepted: bool) -> None:
        self._machine.record(Event.COMMIT_ACCEPTED if accepted else Event.COMMIT_REFUSED)
        if accepted:
            self.written = tuple(self._first_chunk + index for index in self._indices)
        self._commit = None  # with an inline store's payload
        self._operation.fulfilled(self)

    def _check_alive(self) -> None:
        if self._half_ttl is not None and self._clock() - self._prepared_at > self._half_ttl:
            # it stays owed until the whole TTL is over: to unregister before would publish the slots
            raise LeaseExpiredError(
                f"{self._operation.name}: the reserved slots are older than half their TTL of {2 * self._half_ttl:g} "
                "s (a suspended process, or a copy that took too long); nothing was published"
            )

    # ---- what an interrupted call leaves ----------------------------------------------------------------------------

    def fulfil(self, deadline: Deadline) -> bool:
        """Completes the reservation as far as answers come; see `Obligation`."""
        if self._machine.state in (ReservationState.PREPARING, ReservationState.COMMITTING):
            self._machine.record(Event.DEADLINE_PASSED)
        if self._machine.state not in _DONE and self._commit is None:
            self._complete(deadline)
        if self._machine.state not in _DONE and self._commit is not None:
            commit = self._commit
            committed = self._operation.settle(commit, deadline)
            if committed is not None:
                self._take_verdict(committed.success)
            elif commit.settled:
                self._take_verdict(accepted=False)  # answered, illegally: no reservation any more, and no proof
        if self._machine.state in _DONE:
            return True
        self._keep_copy()
        return self._expired()

    def _complete(self, deadline: Deadline) -> None:
        """Fills and commits the slots of a PREPARE whose answer came late, or whose call was interrupted."""
        if self._prepare is None or self._writer is None or self.stuck:
            return
        prepared = self._operation.settle(self._prepare, deadline)
        if prepared is None:
            if self._prepare.settled:
                self.stuck = "PREPARE_STORE was answered illegally"
            return
        try:
            if self._machine.state is not ReservationState.RESERVED:
                self._take_slots(prepared)
            if self._machine.state is ReservationState.RESERVED:
                self._fill(prepared, self._writer)
                self._check_alive()
                self._send_commit(b"")
        except TransportError:
            raise
        except (KVCacheSDKError, RuntimeError, ValueError, TypeError, IndexError) as error:
            # illegal slots, or too late: nothing may be published, and UNREGISTER would do that, so it stays owed
            self.stuck = str(error)
            _log.warning("%s: a reservation could not be completed: %s", self._operation.name, str(error))

    def _keep_copy(self) -> None:
        """From here on the caller may change its tensor."""
        if self._writer is not None and self._commit is None and not self._is_snapshot:
            self._writer, self._is_snapshot = self._writer.snapshot(), True

    def _expired(self) -> bool:
        """Whether the write TTL has ended it, so that there is nothing to wait for any more."""
        if self._half_ttl is None or self._clock() - self._prepared_at < 2 * self._half_ttl:
            return False
        self._machine.record(Event.TTL_PASSED)
        return True

    @property
    def transfer_open(self) -> bool:
        """Whether it is unresolved."""
        return self._machine.state not in _DONE

    @property
    def forbids_unregister(self) -> bool:
        """Whether slots of ours may be reserved and unpublished; an inline payload reserves nothing."""
        return self._prepare is not None and self._machine.state not in _DONE

    def last_resort(self) -> None:
        """Nothing: what cannot be committed must not be touched."""

    @override
    def __repr__(self) -> str:
        return f"<Reservation {self._operation.request_id} {self.state.name} {self._num_chunks} chunks>"
