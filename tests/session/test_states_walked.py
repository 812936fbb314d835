"""Faults that walk every transition of the lease, reservation and session tables.

Each scenario drives the real `ReadLease`, `Reservation` or `Session` into a fault on a FakeServer; what the machines
record on the way is collected. A transition that no scenario can take would be a rule that nobody has ever seen work.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import KVCacheSDKError
from lmcache_sdk.session import Addresses, Session, states
from lmcache_sdk.session.states import Event, LeaseState, Machine, ReservationState, SessionState
from tests.fix_fake_server import Action
from tests.fix_faults import FakeClock, late, says, silence, then, value
from tests.session.desk import READ_TTL, WRITE_TTL, Desk, Writer, inline_payload, read, store_desk, store_inline
from tests.session.desk import store_slots as write
from tests.session.office import Office

Step = tuple[enum.Enum, Event]


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> set[Step]:
    """Every (state, event) that a machine has taken."""
    steps: set[Step] = set()
    record = Machine.record

    def noting(self: Machine[Any], event: Event) -> Any:
        before = self.state
        after = record(self, event)
        steps.add((before, event))
        return after

    monkeypatch.setattr(Machine, "record", noting)
    return steps


# ---- leases ----------------------------------------------------------------------------------------------------------


def lookup(desk: Desk, *finishes: float) -> None:
    """A lookup that may fail, then attempts to give back, each after so many seconds."""
    with suppress(KVCacheSDKError):
        desk.lease().acquire()
    for seconds in finishes or (0.0,):
        desk.clock.advance(seconds)
        desk.finish()


def unanswered(action: Action, *, cached: int = 2, release: str = "0.5.6") -> Desk:
    desk = Desk(release, cached=cached, seconds=1.0)
    desk.server.on(p.QueryPrefetchStatus, action)
    return desk


def never_freed() -> None:
    desk = Desk(cached=2)
    desk.server.always(p.FreeLookupLocks, silence)
    lookup(desk, 0.0, 2 * READ_TTL)


LEASES: Final[dict[str, Callable[[], object]]] = {
    "read": lambda: (desk := Desk(cached=2), read(desk, desk.lease()), desk.finish()),
    "looked up and freed": lambda: lookup(Desk(cached=2)),
    "a miss": lambda: lookup(Desk()),
    "the number comes late": lambda: lookup(unanswered(late(1.2)), 0.0, 5.0),
    "the number comes late and is 0": lambda: lookup(unanswered(late(1.2), cached=0), 0.0, 5.0),
    "a number that is none, where FREE is clipped": lambda: lookup(unanswered(value("2"))),
    "a number that is none, where FREE is not": lambda: lookup(unanswered(value("2"), release="0.5.0")),
    "the number never comes": lambda: lookup(unanswered(silence), 0.0, 2 * READ_TTL),
    "FREE is never answered": never_freed,
}


# ---- reservations ----------------------------------------------------------------------------------------------------


def store(desk: Desk, *finishes: float, writer: Writer | None = None) -> None:
    with suppress(KVCacheSDKError, RuntimeError):
        write(desk.reservation(), writer or Writer(desk))
    for seconds in finishes or (0.0,):
        desk.clock.advance(seconds)
        desk.finish()


def answered(kind: type[p.Request[Any]], action: Action, **options: Any) -> Desk:
    desk = store_desk(seconds=1.0, **options)
    desk.server.on(kind, action)
    return desk


def never_written() -> None:
    desk = store_desk()
    store(desk, 0.0, WRITE_TTL, writer=Writer(desk, failures=[RuntimeError("broken") for _ in range(99)]))


def inline(desk: Desk, *finishes: float) -> None:
    with suppress(KVCacheSDKError):
        store_inline(desk.reservation(), inline_payload())
    for seconds in finishes:
        desk.clock.advance(seconds)
        desk.finish()


def full_and_late() -> Desk:
    desk = answered(p.PrepareStore, late(1.2))
    desk.server.full = True
    return desk


def full() -> Desk:
    desk = store_desk()
    desk.server.full = True
    return desk


def refused_late(turn: Any) -> Any:
    return late(1.2, says(p.Committed(success=False)))(turn)


RESERVATIONS: Final[dict[str, Callable[[], object]]] = {
    "stored": lambda: store(store_desk()),
    "nothing to write": lambda: store(full()),
    "slots come late": lambda: store(answered(p.PrepareStore, late(1.2)), 0.0, 5.0),
    "no slots come late": lambda: store(full_and_late(), 0.0, 5.0),
    "COMMIT refuses": lambda: store(answered(p.CommitStore, says(p.Committed(success=False)))),
    "COMMIT accepts late": lambda: store(answered(p.CommitStore, late(1.2)), 0.0, 5.0),
    "COMMIT refuses late": lambda: store(answered(p.CommitStore, refused_late), 0.0, 5.0),
    "PREPARE is never answered": lambda: store(answered(p.PrepareStore, silence), 0.0, WRITE_TTL),
    "slots that cannot be written": never_written,
    "inline": lambda: inline(store_desk(shm=False)),
}


@pytest.mark.parametrize(
    ("scenarios", "table"),
    [(LEASES, states.LEASE_TRANSITIONS), (RESERVATIONS, states.RESERVATION_TRANSITIONS)],
    ids=["leases", "reservations"],
)
def test_every_transition_is_walked_by_a_fault(
    scenarios: dict[str, Callable[[], object]], table: states.Table[Any], walked: set[Step]
) -> None:
    for scenario in scenarios.values():
        scenario()
    expected = {(state, event) for state, row in table.items() for event in row}
    assert expected - walked == set()
    visited = {state for state, _ in expected & walked} | {table[state][event] for state, event in expected & walked}
    assert visited == set(LeaseState if table is states.LEASE_TRANSITIONS else ReservationState)


# ---- sessions --------------------------------------------------------------------------------------------------------


def never_opened(office: Office) -> None:
    Session(Addresses("tcp://memory:1", "http://memory:2"), office.server.dialect).close()


def closed_again(office: Office) -> None:
    """While it is being closed, and afterwards."""
    office.server.on(p.Unregister, then(silence, office.session.close))
    office.session.close()
    office.session.close()


def test_every_transition_of_a_session_is_walked(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, walked: set[Step]
) -> None:
    office = Office(clock, monkeypatch)
    never_opened(office)
    closed_again(office)
    table = states.SESSION_TRANSITIONS
    assert {(state, event) for state, row in table.items() for event in row} - walked == set()
    assert {state for state, _ in walked if isinstance(state, SessionState)} == set(SessionState)
