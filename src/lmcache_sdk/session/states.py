"""Lease, reservation and session states. Every transition is in TRANSITIONS; nothing else sets a state.

This module does not know which side asked, nor what time it is. `docs/states.md` is drawn from the tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from lmcache_sdk.errors import LocalProtocolError
from lmcache_sdk.values import override

S = TypeVar("S", bound=enum.Enum)


class LeaseState(enum.Enum):
    """A read lock that the server holds for us, on each chunk of a hit prefix."""

    IDLE = "idle"
    WAITING = "waiting"
    HELD = "held"
    UNCERTAIN = "uncertain"
    RELEASED = "released"
    LEFT = "left to the server's TTL"


class ReservationState(enum.Enum):
    """Write slots that the server promised between prepare and commit."""

    IDLE = "idle"
    PREPARING = "preparing"
    RESERVED = "reserved"
    COMMITTING = "committing"
    UNCERTAIN = "uncertain"
    EMPTY = "empty"
    REJECTED = "rejected"
    PUBLISHED = "published"


class SessionState(enum.Enum):
    """The life of a session."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Event(enum.Enum):
    """What happened, as a past fact."""

    LOOKUP_SENT = "lookup sent"
    PREFETCH_READY = "prefetch ready"
    NOTHING_CACHED = "nothing cached"
    COMMITTED = "committed"
    FREED = "freed"
    GIVEN_UP = "given up"
    DEADLINE_PASSED = "deadline passed"
    TTL_PASSED = "ttl passed"
    PREPARE_SENT = "prepare sent"
    SLOTS_GIVEN = "slots given"
    NO_SLOTS_GIVEN = "no slots given"
    COMMIT_SENT = "commit sent"
    COMMIT_ACCEPTED = "commit accepted"
    COMMIT_REFUSED = "commit refused"
    OPENED = "opened"
    CLOSE_ASKED = "close asked"
    EVERYTHING_RETURNED = "everything returned"


Table = Mapping[S, Mapping[Event, S]]
_L, _R, _S = LeaseState, ReservationState, SessionState

LEASE_TRANSITIONS: Final[Table[LeaseState]] = {
    _L.IDLE: {Event.LOOKUP_SENT: _L.WAITING},
    _L.WAITING: {
        Event.PREFETCH_READY: _L.HELD,
        Event.NOTHING_CACHED: _L.RELEASED,
        Event.DEADLINE_PASSED: _L.UNCERTAIN,
    },
    _L.HELD: {
        Event.COMMITTED: _L.RELEASED,
        Event.FREED: _L.RELEASED,
        Event.TTL_PASSED: _L.RELEASED,
    },
    _L.UNCERTAIN: {
        Event.PREFETCH_READY: _L.HELD,
        Event.NOTHING_CACHED: _L.RELEASED,
        Event.FREED: _L.RELEASED,
        Event.GIVEN_UP: _L.LEFT,
        Event.TTL_PASSED: _L.RELEASED,
    },
    _L.RELEASED: {},
    _L.LEFT: {},
}

RESERVATION_TRANSITIONS: Final[Table[ReservationState]] = {
    _R.IDLE: {Event.PREPARE_SENT: _R.PREPARING, Event.COMMIT_SENT: _R.COMMITTING},
    _R.PREPARING: {
        Event.SLOTS_GIVEN: _R.RESERVED,
        Event.NO_SLOTS_GIVEN: _R.EMPTY,
        Event.DEADLINE_PASSED: _R.UNCERTAIN,
    },
    _R.RESERVED: {Event.COMMIT_SENT: _R.COMMITTING, Event.TTL_PASSED: _R.REJECTED},
    _R.COMMITTING: {
        Event.COMMIT_ACCEPTED: _R.PUBLISHED,
        Event.COMMIT_REFUSED: _R.REJECTED,
        Event.DEADLINE_PASSED: _R.UNCERTAIN,
    },
    _R.UNCERTAIN: {
        Event.SLOTS_GIVEN: _R.RESERVED,
        Event.NO_SLOTS_GIVEN: _R.EMPTY,
        Event.COMMIT_ACCEPTED: _R.PUBLISHED,
        Event.COMMIT_REFUSED: _R.REJECTED,
        Event.TTL_PASSED: _R.REJECTED,
    },
    _R.EMPTY: {},
    _R.REJECTED: {},
    _R.PUBLISHED: {},
}

SESSION_TRANSITIONS: Final[Table[SessionState]] = {
    _S.OPENING: {Event.OPENED: _S.OPEN, Event.CLOSE_ASKED: _S.CLOSING},
    _S.OPEN: {Event.CLOSE_ASKED: _S.CLOSING},
    _S.CLOSING: {Event.CLOSE_ASKED: _S.CLOSING, Event.EVERYTHING_RETURNED: _S.CLOSED},
    _S.CLOSED: {Event.CLOSE_ASKED: _S.CLOSED},
}


class Machine(Generic[S]):
    """One thing's state, changed by events only."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Table[S], start: S) -> None:
        self._table = table
        self.state: S = start

    def record(self, event: Event) -> S:
        """Moves to the state that the table names; raises LocalProtocolError when it names none."""
        following = self._table[self.state].get(event)
        if following is None:
            raise LocalProtocolError(
                f"{type(self.state).__name__} {self.state.name}: {event.value} is not possible here"
            )
        self.state = following
        return following

    @override
    def __repr__(self) -> str:
        return f"<Machine {self.state.name}>"


def lease_machine() -> Machine[LeaseState]:
    """A lease that has not been asked for."""
    return Machine(LEASE_TRANSITIONS, LeaseState.IDLE)


def reservation_machine() -> Machine[ReservationState]:
    """A reservation that has not been asked for."""
    return Machine(RESERVATION_TRANSITIONS, ReservationState.IDLE)


def session_machine() -> Machine[SessionState]:
    """A session that is being opened."""
    return Machine(SESSION_TRANSITIONS, SessionState.OPENING)
