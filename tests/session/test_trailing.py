"""What a call leaves to the next one: answers that it does not wait for, and what they ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import ConnectionLostError
from lmcache_sdk.session import ReadLease
from tests.fix_fake_server import NOTHING
from tests.fix_faults import FakeClock, ignored, late, silence
from tests.session.desk import READ_TTL, Writer
from tests.session.office import Office
from tests.session.test_operation import Oracle


@pytest.fixture
def office(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    made = Office(clock, monkeypatch)
    made.session.in_order = True
    made.cache(2)
    yield made
    made.session.close()


LOOKUP = ["Lookup", "QueryPrefetchStatus", "FreeLookupLocks", "EndSession"]


def test_a_lookup_sends_everything_and_waits_for_its_number_only(office: Office) -> None:
    said = len(office.server.names())
    office.server.on(p.FreeLookupLocks, late(0.03))
    began = office.clock.now
    assert office.look() == 2
    assert office.clock.now == began
    assert office.server.names()[said:] == LOOKUP
    assert office.server.held() == NOTHING


def test_the_first_question_goes_out_behind_the_lookup(office: Office) -> None:
    """A LOOKUP that is answered late has its number with it."""
    office.server.on(p.Lookup, late(0.5))
    began = office.clock.now
    assert office.look() == 2
    assert office.clock.now == pytest.approx(began + 0.5)
    assert len(office.server.asked(p.QueryPrefetchStatus)) == 1


def test_where_lookups_are_not_in_order_one_waits_for_the_other(office: Office) -> None:
    office.session.in_order = False
    office.server.on(p.FreeLookupLocks, late(0.1))
    began = office.clock.now
    assert office.look() == 2
    assert office.clock.now == pytest.approx(began + 0.1)
    assert office.server.names()[-4:] == LOOKUP


def test_the_next_call_takes_the_answers_on_the_same_channel(office: Office) -> None:
    office.look()
    office.look()
    assert len(office.lines) == 1
    with office.call() as operation:
        assert operation.channel.exchange.num_in_flight == 0 and not operation.channel._trailing


def test_answers_that_have_not_come_yet_are_not_waited_for(office: Office) -> None:
    office.server.on(p.FreeLookupLocks, late(0.3))
    began = office.clock.now
    office.look()
    office.look()
    assert office.clock.now == began and len(office.lines) == 1
    office.clock.advance(0.3)
    with office.call() as operation:
        assert not operation.channel._trailing
    assert office.server.held() == NOTHING


def test_a_free_that_is_not_answered_is_a_debt_of_the_session(office: Office) -> None:
    """The next call has a channel of its own, and a later one finds the model gone and reads the locks away."""
    oracle = Oracle()
    office.session.probe = oracle
    office.server.on(p.FreeLookupLocks, ignored)
    assert office.look() == 2
    assert office.look() == 2
    assert len(office.lines) == 1
    office.clock.advance(1.0)
    assert office.look() == 2
    assert len(office.lines) == 2
    oracle.left.add("m")
    said = len(office.server.names())
    office.look()
    assert office.server.names()[said:][:3] == ["PrepareRetrieve", "CommitRetrieve", "EndSession"]


def test_a_loss_before_the_answers_is_noticed_by_the_next_call(office: Office) -> None:
    office.server.on(p.FreeLookupLocks, silence)
    office.look()
    office.lines[0].lost = True
    with pytest.raises(ConnectionLostError):
        office.look()


def test_close_takes_the_answers_before_it_unregisters(office: Office) -> None:
    office.server.on(p.FreeLookupLocks, late(0.1))
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


def test_a_call_that_failed_is_finished_at_once(office: Office) -> None:
    office.server.on(p.FreeLookupLocks, late(0.1))
    began = office.clock.now

    def fail() -> None:
        with office.call() as operation:
            ReadLease(operation, READ_TTL, shm=True, clock=office.clock).acquire()
            raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        fail()
    assert office.clock.now == pytest.approx(began + 0.1)


def test_a_store_leaves_the_answer_to_its_end(office: Office) -> None:
    office.server.on(p.EndSession, late(0.1))
    began = office.clock.now
    assert office.store(Writer(office), list(range(50, 62))) == (0, 1, 2)
    assert office.clock.now == began
