"""Write slots that the server promised, from PREPARE_STORE to COMMIT_STORE; and inline stores, which need no promise.

`store_slots` and `store_inline` store one range of chunks. What they guarantee (PROTOCOL.md section 6, FAULTS.md 2.2,
6.3, 9.3):

- a reservation can only be committed: there is no abort, and UNREGISTER or a late TTL publishes what the slots hold.
  So after PREPARE_STORE nothing may fail: the writer has been checked before, an interrupted copy is done again and
  committed, then the interruption goes on;
- empty slots are never committed: that would publish another caller's half-written slots;
- a PREPARE that nobody answered in time is never sent again. The range is kept as a snapshot (`Unresolved`); whoever
  uses the session next fills and commits it when the answer comes;
- slots older than half the write TTL are not written and not committed: they may be another's by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

import attrs

from lmcache_sdk.errors import LeaseExpiredError, RemoteProtocolError
from lmcache_sdk.protocol import Buffer, CommitStore, Committed, InFlight, PreparedStore, PrepareStore
from lmcache_sdk.session.deadline import Deadline, boot_time
from lmcache_sdk.session.operation import CLEANUP_SECONDS, Operation
from lmcache_sdk.session.states import Event, ReservationState, reservation_machine
from lmcache_sdk.values import override

_log = logging.getLogger("lmcache_sdk.session")

_WRITE_ATTEMPTS: Final = 3


class SlotWriter(Protocol):
    """Fills the slots of one range of chunks. Everything it needs was checked before the reservation."""

    def check(self, prepared: PreparedStore) -> None:
        """Raises RemoteProtocolError when the slots do not fit what is to be written; writes nothing."""

    def write(self, prepared: PreparedStore) -> None:
        """Writes every slot whole; doing it again does no harm."""

    def snapshot(self) -> SlotWriter:
        """A writer of a copy of the same data, for slots that come after the caller has gone."""


@attrs.define(eq=False)
class Unresolved:
    """A reservation whose PREPARE or COMMIT was not answered in time, and how to finish it."""

    operation: Operation
    reservation: Reservation
    writer: SlotWriter | None

    def finish(self, deadline: Deadline) -> bool:
        """Waits for the answer that is out and completes the reservation; whether it is resolved now."""
        return self.reservation.finish_late(self.writer, deadline)


class Reservation:
    """The slots of one range of chunks of one operation."""

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
        self._prepare: InFlight[PreparedStore] | None = None
        self._commit: InFlight[Committed] | None = None
        self._prepared_at = 0.0
        self.written: tuple[int, ...] = ()
        """The chunks that were published, counted from the operation's first."""

    @property
    def state(self) -> ReservationState:
        """Where the reservation is."""
        return self._machine.state

    @property
    def unresolved(self) -> bool:
        """Whether the server may still hold it for us."""
        return self._machine.state in (
            ReservationState.PREPARING,
            ReservationState.RESERVED,
            ReservationState.COMMITTING,
            ReservationState.UNCERTAIN,
        )

    def store_slots(self, writer: SlotWriter) -> None:
        """PREPARE_STORE, fill exactly the given slots, COMMIT_STORE."""
        self._prepared_at = self._clock()
        self._prepare = self._operation.submit(
            PrepareStore(key=self._key, instance_id=self._operation.identity.instance_id)
        )
        self._machine.record(Event.PREPARE_SENT)
        prepared = self._operation.wait(self._prepare)
        self._take_slots(prepared)
        if self._machine.state is ReservationState.RESERVED:
            self._fill_and_commit(prepared, writer)

    def store_inline(self, payload: Buffer) -> None:
        """COMMIT_STORE with the chunks themselves; `payload` brings its own MessagePack header."""
        self._send_commit(payload)
        self._take_verdict(tuple(range(self._num_chunks)), self._wait_commit())

    def _take_slots(self, prepared: PreparedStore) -> None:
        if prepared.slots is None:
            self._machine.record(Event.NO_SLOTS_GIVEN)
            raise RemoteProtocolError(
                "prepare_store: no slots from a server that announced a pool", path="prepare_store.context"
            )
        if prepared.chunk_indices and prepared.chunk_indices[-1] >= self._num_chunks:
            where = "prepare_store.context.chunk_indices"
            raise RemoteProtocolError(f"{where}: {prepared.chunk_indices[-1]} of {self._num_chunks} chunks", path=where)
        self._machine.record(Event.SLOTS_GIVEN if prepared.slots else Event.NO_SLOTS_GIVEN)

    def _fill_and_commit(self, prepared: PreparedStore, writer: SlotWriter) -> None:
        writer.check(prepared)
        interruption: BaseException | None = None
        for attempt in range(_WRITE_ATTEMPTS):
            self._check_alive()
            try:
                writer.write(prepared)
                break
            except BaseException as error:
                # Ctrl-C in mid-copy: half-written slots must not stay, so the copy is done again, then the
                # interruption goes on
                interruption = error
                if attempt + 1 == _WRITE_ATTEMPTS:
                    raise
        self._check_alive()
        self._send_commit(b"")
        self._take_verdict(prepared.chunk_indices, self._wait_commit())
        if interruption is not None:
            raise interruption

    def _send_commit(self, data: Buffer) -> None:
        self._commit = self._operation.submit(
            CommitStore(
                key=self._key, instance_id=self._operation.identity.instance_id, data=data, framed=bool(len(data))
            )
        )
        self._machine.record(Event.COMMIT_SENT)

    def _wait_commit(self) -> bool:
        assert self._commit is not None
        return self._operation.wait(self._commit).success

    def _take_verdict(self, indices: tuple[int, ...], accepted: bool) -> None:
        self._machine.record(Event.COMMIT_ACCEPTED if accepted else Event.COMMIT_REFUSED)
        if accepted:
            self.written = tuple(self._first_chunk + index for index in indices)

    def _check_alive(self) -> None:
        if self._half_ttl is not None and self._clock() - self._prepared_at > self._half_ttl:
            self._machine.record(Event.TTL_PASSED)
            raise LeaseExpiredError(
                f"{self._operation.name}: the reserved slots are older than half their TTL of "
                f"{2 * self._half_ttl:g} s (a suspended "
                "process, or a copy that took too long); nothing was published"
            )

    def give_up(self, writer: SlotWriter | None) -> Unresolved | None:
        """Called when the call ends in between: completes what it can now, and gives what stays open to be finished
        later.
        """
        if not self.unresolved:
            return None
        if self._machine.state in (ReservationState.PREPARING, ReservationState.COMMITTING):
            self._machine.record(Event.DEADLINE_PASSED)
        if self._operation.channel.broken:
            return None  # the answer can never come; the server's TTL decides
        if self.finish_late(writer, Deadline.after(CLEANUP_SECONDS)):
            return None
        return Unresolved(self._operation, self, None if writer is None else writer.snapshot())

    def finish_late(self, writer: SlotWriter | None, deadline: Deadline) -> bool:
        """Waits for a late PREPARE or COMMIT and completes the reservation; whether nothing is open any more."""
        if self._commit is None and self._prepare is not None and writer is not None:
            prepared = self._operation.settle(self._prepare, deadline)
            if prepared is None:
                return self._settled_without(self._prepare)
            self._complete(prepared, writer, deadline)
        elif self._commit is not None:
            committed = self._operation.settle(self._commit, deadline)
            if committed is None:
                return self._settled_without(self._commit)
            self._take_verdict((), committed.success)
        return not self.unresolved

    def _complete(self, prepared: PreparedStore, writer: SlotWriter, deadline: Deadline) -> None:
        try:
            if self._machine.state is not ReservationState.RESERVED:
                self._take_slots(prepared)
            if self._machine.state is ReservationState.RESERVED:
                writer.check(prepared)
                self._check_alive()
                writer.write(prepared)
                self._check_alive()
                self._send_commit(b"")
                assert self._commit is not None
                committed = self._operation.settle(self._commit, deadline)
                if committed is not None:
                    self._take_verdict(prepared.chunk_indices, committed.success)
        except (LeaseExpiredError, RemoteProtocolError) as error:
            _log.warning("%s: a late reservation could not be completed: %s", self._operation.name, error)

    def _settled_without(self, entry: InFlight[PreparedStore] | InFlight[Committed]) -> bool:
        """No usable answer: open for ever unless an illegal answer has come, or the connection is gone."""
        return entry.settled or self._operation.channel.broken

    @override
    def __repr__(self) -> str:
        return f"<Reservation {self._operation.request_id} {self.state.name} {self._num_chunks} chunks>"
