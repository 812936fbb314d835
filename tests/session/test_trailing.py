"""What a call leaves to the next one: the answer to its END_SESSION."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import ConnectionLostError
from lmcache_sdk.session import ReadLease
from tests.fix_fake_server import NOTHING
from tests.fix_faults import FakeClock, late, silence
from tests.session.desk import READ_TTL, Writer
from tests.session.office import Office


@pytest.fixture
def office(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    made = Office(clock, monkeypatch)
    made.session.in_order = True
    made.cache(2)
    yield made
    made.session.close()


LOOKUP = ["Lookup", "QueryPrefetchStatus", "FreeLookupLocks", "EndSession"]


def test_a_lookup_waits_for_its_locks_to_be_free_and_not_for_the_end(office: Office) -> None:
    said = len(office.server.names())
    office.server.on(p.FreeLookupLocks, late(0.03))
    office.server.on(p.EndSession, late(0.1))
    began = office.clock.now
    assert office.look() == 2
    assert office.clock.now == pytest.approx(began + 0.03)
    assert office.server.names()[said:] == LOOKUP
    assert office.server.held() == NOTHING


def test_the_first_question_goes_out_behind_the_lookup(office: Office) -> None:
    """A LOOKUP that is answered late has its number with it."""
    office.server.on(p.Lookup, late(0.5))
    began = office.clock.now
    assert office.look() == 2
    assert office.clock.now == pytest.approx(began + 0.5)
    assert len(office.server.asked(p.QueryPrefetchStatus)) == 1


def test_the_next_call_takes_the_answer_on_the_same_channel(office: Office) -> None:
    office.server.on(p.EndSession, late(0.3))
    office.look()
    office.clock.advance(0.3)
    with office.call() as operation:
        assert operation.channel.exchange.num_in_flight == 0
    assert len(office.lines) == 1


def test_an_answer_that_has_not_come_yet_is_not_waited_for(office: Office) -> None:
    office.server.on(p.EndSession, late(0.3))
    began = office.clock.now
    office.look()
    office.look()
    assert office.clock.now == began and len(office.lines) == 1


def test_a_loss_before_the_answer_is_noticed_by_the_next_call(office: Office) -> None:
    office.server.on(p.EndSession, silence)
    office.look()
    office.lines[0].lost = True
    with pytest.raises(ConnectionLostError):
        office.look()


def test_close_takes_the_answer_before_it_unregisters(office: Office) -> None:
    office.server.on(p.EndSession, late(0.1))
    office.look()
    office.session.close()
    assert office.server.names()[-5:] == [*LOOKUP, "Unregister"] and office.server.held() == NOTHING


def test_close_does_not_wait_long_for_answers_that_never_come(office: Office) -> None:
    office.server.always(p.EndSession, silence)
    office.look()
    began = office.clock.now
    office.session.close()
    assert office.clock.now - began <= 0.25
    assert office.server.names()[-1] == "Unregister"


def test_what_was_read_is_committed_before_the_end_is_sent(office: Office) -> None:
    with office.call() as operation:
        lease = ReadLease(operation, READ_TTL, shm=True, clock=office.clock)
        entry = lease.prepare(lease.acquire())
        lease.received(entry)
        office.server.on(p.CommitRetrieve, late(0.2))
        lease.commit(entry)
        assert "EndSession" not in office.server.names()
    assert office.server.names()[-2:] == ["CommitRetrieve", "EndSession"]
    assert office.server.held() == NOTHING


def test_a_store_leaves_the_answer_to_its_end(office: Office) -> None:
    office.server.on(p.EndSession, late(0.1))
    began = office.clock.now
    assert office.store(Writer(office), list(range(50, 62))) == (0, 1, 2)
    assert office.clock.now == began
