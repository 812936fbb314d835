"""The transition tables: every (state, event) pair is in its table or raises, every state is reached, ends are ends."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

import pytest

from lmcache_sdk.errors import LocalProtocolError
from lmcache_sdk.session import states
from lmcache_sdk.session.states import Event, LeaseState, Machine, ReservationState, SessionState

TABLES: Final[dict[str, tuple[states.Table[Any], Callable[[], Machine[Any]], type[enum.Enum]]]] = {
    "lease": (states.LEASE_TRANSITIONS, states.lease_machine, LeaseState),
    "reservation": (states.RESERVATION_TRANSITIONS, states.reservation_machine, ReservationState),
    "session": (states.SESSION_TRANSITIONS, states.session_machine, SessionState),
}
ENDS: Final[dict[str, set[enum.Enum]]] = {
    "lease": {LeaseState.RELEASED, LeaseState.LEFT},
    "reservation": {ReservationState.EMPTY, ReservationState.REJECTED, ReservationState.PUBLISHED},
    "session": set(),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_a_key(name: str) -> None:
    table, _, kind = TABLES[name]
    assert set(table) == set(kind)
    assert all(target in kind for row in table.values() for target in row.values())


@pytest.mark.parametrize(
    ("name", "state", "event"),
    [(name, state, event) for name, (_, _, kind) in TABLES.items() for state in kind for event in Event],
)
def test_every_pair_is_in_the_table_or_raises(name: str, state: enum.Enum, event: Event) -> None:
    table = TABLES[name][0]
    machine = Machine(table, state)
    if event in table[state]:
        assert machine.record(event) is table[state][event]
        assert machine.state is table[state][event]
    else:
        with pytest.raises(LocalProtocolError, match=state.name):
            machine.record(event)
        assert machine.state is state


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reached_from_the_first(name: str) -> None:
    table, make, kind = TABLES[name]
    reached = {make().state}
    while new := {target for state in reached for target in table[state].values()} - reached:
        reached |= new
    assert reached == set(kind)


@pytest.mark.parametrize("name", TABLES)
def test_ends_are_ends_and_nothing_else_is(name: str) -> None:
    table = TABLES[name][0]
    assert {state for state, row in table.items() if not row} == ENDS[name]


@pytest.mark.parametrize("name", ["lease", "reservation"])
def test_an_end_is_reached_from_everywhere(name: str) -> None:
    """Nothing that the server holds can get into a state from which it is never given up."""
    table = TABLES[name][0]
    leading = set(ENDS[name])
    while new := {state for state, row in table.items() if set(row.values()) & leading} - leading:
        leading |= new
    assert leading == set(table)


def test_every_event_is_used() -> None:
    used = {event for table, _, _ in TABLES.values() for row in table.values() for event in row}
    assert used == set(Event)


def test_a_timeout_never_ends_a_lease_or_a_reservation() -> None:
    """After a timeout the fate of the request is unknown: three outcomes stay three."""
    for state in LeaseState:
        following = states.LEASE_TRANSITIONS[state].get(Event.DEADLINE_PASSED, LeaseState.UNCERTAIN)
        assert following is LeaseState.UNCERTAIN
    for reservation in ReservationState:
        after = states.RESERVATION_TRANSITIONS[reservation].get(Event.DEADLINE_PASSED, ReservationState.UNCERTAIN)
        assert after is ReservationState.UNCERTAIN


def test_only_an_accepted_commit_publishes() -> None:
    publishing = {
        event
        for row in states.RESERVATION_TRANSITIONS.values()
        for event, target in row.items()
        if target is ReservationState.PUBLISHED
    }
    assert publishing == {Event.COMMIT_ACCEPTED}


def test_empty_slots_are_never_committed() -> None:
    assert Event.COMMIT_SENT not in states.RESERVATION_TRANSITIONS[ReservationState.EMPTY]


def test_a_closed_session_does_not_open_again() -> None:
    for state in (SessionState.CLOSING, SessionState.CLOSED):
        targets = set(states.SESSION_TRANSITIONS[state].values())
        assert targets <= {SessionState.CLOSING, SessionState.CLOSED}


def test_repr() -> None:
    assert repr(states.lease_machine()) == "<Machine IDLE>"
