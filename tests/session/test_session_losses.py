"""A session whose server went away, was silent for long, or that was dropped: what is still said, and what is not."""

from __future__ import annotations

import itertools

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    Fate,
    SessionClosedError,
)
from lmcache_sdk.session import (
    Deadline,
    Identity,
)
from lmcache_sdk.values import TokenIds
from tests.fix_fake_server import NOTHING
from tests.fix_faults import late, says, silence, then
from tests.session.desk import CHUNK, TOKENS, Writer
from tests.session.office import OTHER, Office

# ---- losses and idleness ---------------------------------------------------------------------------------------------


def test_after_a_loss_nothing_is_sent_any_more(office: Office) -> None:
    """A new connection may lead to a server that was restarted, where nothing of ours exists."""
    office.server.on(p.Lookup, then(silence, lambda: setattr(office.lines[-1], "lost", True)))
    with pytest.raises(ConnectionLostError):
        office.look()
    said = len(office.server.requests)
    with pytest.raises(ConnectionLostError) as caught:
        office.look()
    assert caught.value.fate is Fate.NOT_SENT
    assert len(office.server.requests) == said and len(office.lines) == 1


def test_a_long_idle_instance_is_registered_again_first(office: Office) -> None:
    """And is never pinged: that would shorten the reaper's patience below the write TTL."""
    office.session.grace = 3600.0
    office.session.pool = None
    office.server.always(p.Register, says(p.Registered()))
    office.look()
    office.clock.advance(899)
    office.look()
    assert len(office.server.asked(p.Register)) == 1
    office.clock.advance(901)
    said = len(office.server.requests)
    office.look()
    assert office.server.names()[said : said + 2] == ["Register", "Lookup"]
    again = office.server.asked(p.Register)[1].registration
    assert again == office.server.asked(p.Register)[0].registration
    assert office.server.asked(p.Ping) == []


def test_a_server_with_another_pool_is_another_server(office: Office) -> None:
    office.session.grace = 3600.0
    office.server.always(p.Register, says(p.Registered("lmcache_l1_pool_y", 8192)))
    office.clock.advance(1000)
    with pytest.raises(ConnectionLostError, match="another pool") as caught:
        office.look()
    assert caught.value.fate is Fate.NOT_SENT and office.server.asked(p.Lookup) == []


def test_without_a_known_grace_nobody_is_registered_again(office: Office) -> None:
    office.clock.advance(10**6)
    office.look()
    assert len(office.server.asked(p.Register)) == 1


def test_a_session_that_was_replaced_is_a_loss_and_no_close(office: Office) -> None:
    office.session.retire()
    with pytest.raises(ConnectionLostError) as caught:
        office.look()
    assert caught.value.fate is Fate.NOT_SENT and office.server.instances == {}


# ---- dropped without close -------------------------------------------------------------------------------------------


def test_a_dropped_session_says_goodbye_and_does_not_wait(office: Office) -> None:
    office.look()
    office.server.always(p.Unregister, silence)
    began = office.clock.now
    office.session.abandon()
    assert office.clock.now == began and office.session.closed
    assert [request.instance_id for request in office.server.asked(p.Unregister)] == [office.instance]
    office.session.abandon()
    office.session.close()
    assert len(office.server.asked(p.Unregister)) == 1


def test_a_dropped_session_with_a_reservation_out_leaves_without_a_word(office: Office) -> None:
    office.server.on(p.PrepareStore, silence)
    with pytest.raises(DeadlineExceededError):
        office.store(Writer(office))
    office.session.abandon()
    assert office.server.asked(p.Unregister) == [] and office.server.held().unwritten == 0


def test_another_process_is_told_so(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("lmcache_sdk.session.session.os.getpid", lambda: 4711)
        with pytest.raises(SessionClosedError, match=r"child 4711.*connect\(\) in the child"):
            office.look()
        office.session.close()
        office.session.abandon()
    assert not office.session.closed and office.look() == 0


def test_many_calls_leave_nothing(office: Office) -> None:
    office.cache(1)
    for number, tokens in itertools.product(range(5), (TOKENS, OTHER)):
        office.look(tokens)
        office.store(Writer(office), [number, *tokens[1:]])
    office.session.close()
    assert office.server.held() == NOTHING and office.server.instances == {}
    assert len(office.lines) == 1 and office.server.malformed == []


def test_every_wait_of_a_session_is_bounded(office: Office) -> None:
    """A server that answers nothing at all any more: each call ends, and so does the close."""
    for kind in office.server.dialect.rules:
        office.server.always(kind, silence)
    began = office.clock.now
    for call in (lambda: office.look(seconds=1.0), lambda: office.store(Writer(office), OTHER, seconds=1.0)):
        with pytest.raises(DeadlineExceededError):
            call()
    assert office.clock.now - began < 4.0
    began = office.clock.now
    office.session.close()
    assert office.clock.now - began < 3.0


def test_deadlines_of_calls_are_the_callers(office: Office) -> None:
    office.server.on(p.Lookup, late(0.4))
    with office.session.operation(
        "lookup", Identity("m", 1, office.instance, CHUNK), TokenIds(TOKENS), "", Deadline.after(0.5), exclusive=False
    ) as operation:
        operation.call(p.Lookup(key=operation.key(0, 3, worker_id=None)))
        assert operation.deadline.remaining() == pytest.approx(0.1)
