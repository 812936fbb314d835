"""The in-flight table: ids count up, each answer settles its own request, late ones are told apart, others refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import LocalProtocolError, RemoteProtocolError, UnsupportedError
from lmcache_sdk.values import RequestId

DIALECT = p.DIALECTS["0.5.6"]


def exchange() -> p.Exchange:
    return p.Exchange(DIALECT)


def reply_to(entry: p.InFlight[Any], frame: bytes | None) -> list[bytes]:
    uid, operation = p.encode_request(DIALECT, entry.correlation_id, entry.request)[:2]
    return [bytes(uid), bytes(operation)] if frame is None else [bytes(uid), bytes(operation), frame]


def test_ids_count_up_from_zero_and_stand_in_the_first_frame() -> None:
    table = exchange()
    entries = [table.send(p.Noop()) for _ in range(300)]
    assert [entry.correlation_id for entry in entries] == list(range(300))
    assert [msgspec.msgpack.decode(entry.frames[0]) for entry in entries] == list(range(300))


def test_an_entry_knows_its_name_and_shows_its_state() -> None:
    entry = exchange().send(p.QueryPrefetchStatus(request_id=RequestId("r")))
    assert entry.name == "query_prefetch_status"
    assert repr(entry) == "<InFlight query_prefetch_status 0 WAITING>"


def test_an_answer_settles_its_request() -> None:
    table = exchange()
    entry = table.send(p.QueryPrefetchStatus(request_id=RequestId("r")))
    event = table.receive(reply_to(entry, b"\x03"))
    assert isinstance(event, p.Answered) and event.entry is entry
    assert entry.settled and entry.reply() == p.PrefetchStatus(3)
    assert table.num_in_flight == 0


def test_answers_may_come_in_any_order() -> None:
    table = exchange()
    first, second = table.send(p.Ping()), table.send(p.GetChunkSize())
    table.receive(reply_to(second, b"\x10"))
    assert second.reply() == p.ChunkSize(16)
    assert not first.settled
    table.receive(reply_to(first, b"\xc3"))
    assert first.reply() == p.Pong(alive=True)


def test_an_answer_to_an_abandoned_request_is_late_and_still_read() -> None:
    table = exchange()
    entry = table.send(p.QueryPrefetchStatus(request_id=RequestId("r")))
    table.abandon(entry)
    assert table.num_in_flight == 1
    event = table.receive(reply_to(entry, b"\x02"))
    assert isinstance(event, p.AnsweredLate) and event.entry is entry
    assert entry.reply() == p.PrefetchStatus(2)


def test_abandoning_a_settled_request_changes_nothing() -> None:
    table = exchange()
    entry = table.send(p.Noop())
    table.receive(reply_to(entry, b"\xa2OK"))
    table.abandon(entry)
    assert entry.settled and entry.reply() == p.NoopAnswer("OK")


def test_the_second_answer_is_refused_and_changes_nothing() -> None:
    table = exchange()
    entry = table.send(p.GetChunkSize())
    table.receive(reply_to(entry, b"\x10"))
    with pytest.raises(RemoteProtocolError, match="nobody asked, or it was answered"):
        table.receive(reply_to(entry, b"\x20"))
    assert entry.reply() == p.ChunkSize(16)


def test_an_id_that_nobody_used_is_refused() -> None:
    table = exchange()
    entry = table.send(p.Noop())
    with pytest.raises(RemoteProtocolError) as caught:
        table.receive([b"\x63", *reply_to(entry, b"\xa2OK")[1:]])
    assert caught.value.path == "reply.uid"
    assert not entry.settled and table.num_in_flight == 1


@pytest.mark.parametrize("uid", [b"", b"\xc0", b"\xff", b"\xa11", b"\xc3", b"\xcb" + bytes(8), b"\x00\x00"])
def test_an_id_that_is_none_is_refused(uid: bytes) -> None:
    table = exchange()
    entry = table.send(p.Noop())
    with pytest.raises(RemoteProtocolError):
        table.receive([uid, *reply_to(entry, b"\xa2OK")[1:]])
    assert not entry.settled


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda f: [f[0], b"\x16", f[2]], id="another opcode"),
        pytest.param(lambda f: [f[0], b"", f[2]], id="empty opcode"),
        pytest.param(lambda f: f[:2], id="no payload"),
        pytest.param(lambda f: [*f[:2], b""], id="empty payload"),
        pytest.param(lambda f: [*f[:2], b"\xc1"], id="not MessagePack"),
        pytest.param(lambda f: [*f[:2], b"\xa13"], id="another type"),
        pytest.param(lambda f: [*f[:2], b"\xff"], id="negative"),
        pytest.param(lambda f: [*f, b"\x00"], id="a frame too many"),
        pytest.param(lambda f: f[:1], id="the id alone"),
    ],
)
def test_an_illegal_answer_to_a_known_id_settles_it_with_the_error(broken: object) -> None:
    assert callable(broken)
    table = exchange()
    entry = table.send(p.GetChunkSize())
    event = table.receive(broken(reply_to(entry, b"\x10")))
    assert event.entry is entry and entry.settled
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            entry.reply()
    assert table.num_in_flight == 0


def test_a_void_reply_may_not_carry_a_payload() -> None:
    table = exchange()
    entry = table.send(p.EndSession(request_id=RequestId("r")))
    table.receive(reply_to(entry, b"\xc0"))
    with pytest.raises(RemoteProtocolError):
        entry.reply()


def test_asking_for_a_reply_that_has_not_come_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="noop"):
        exchange().send(p.Noop()).reply()


def test_what_the_release_has_no_words_for_is_not_entered() -> None:
    table = p.Exchange(p.DIALECTS["0.5.0"])
    with pytest.raises(UnsupportedError) as caught:
        table.send(p.GetExperimental())
    assert (caught.value.request, caught.value.dialect) == ("GetExperimental", "0.5.0")
    assert table.num_in_flight == 0
    assert table.send(p.Noop()).correlation_id == 0


def test_what_cannot_be_encoded_is_not_entered() -> None:
    table = exchange()
    with pytest.raises(LocalProtocolError):
        table.send(p.EndSession(request_id=RequestId("\ud800")))
    assert table.num_in_flight == 0


def test_a_withdrawn_request_is_forgotten() -> None:
    table = exchange()
    entry = table.send(p.Noop())
    table.withdraw(entry)
    table.withdraw(entry)
    assert table.num_in_flight == 0
    with pytest.raises(RemoteProtocolError):
        table.receive(reply_to(entry, b"\xa2OK"))


def test_repr() -> None:
    table = exchange()
    table.send(p.Noop())
    assert repr(table) == "<Exchange 0.5.6 1 in flight>"


class AnyOrder(RuleBasedStateMachine):
    """Whatever order requests, answers, abandonments and withdrawals come in."""

    def __init__(self) -> None:
        super().__init__()
        self.table = exchange()
        self.waiting: set[int] = set()
        self.next_id = 0

    entries: Bundle[p.InFlight[p.ChunkSize]] = Bundle("entries")

    @rule(target=entries)
    def send(self) -> p.InFlight[p.ChunkSize]:
        entry = self.table.send(p.GetChunkSize())
        assert entry.correlation_id == self.next_id
        self.next_id += 1
        self.waiting.add(entry.correlation_id)
        return entry

    @rule(entry=entries)
    def abandon(self, entry: p.InFlight[p.ChunkSize]) -> None:
        self.table.abandon(entry)

    @rule(entry=consumes(entries))
    def withdraw(self, entry: p.InFlight[p.ChunkSize]) -> None:
        self.table.withdraw(entry)
        self.waiting.discard(entry.correlation_id)

    @rule(entry=entries, size=st.integers(1, 100))
    def receive(self, entry: p.InFlight[p.ChunkSize], size: int) -> None:
        frames = reply_to(entry, msgspec.msgpack.encode(size))
        if entry.correlation_id not in self.waiting:
            with pytest.raises(RemoteProtocolError):
                self.table.receive(frames)
            return
        late = entry.state is p.InFlightState.ABANDONED
        event = self.table.receive(frames)
        assert isinstance(event, p.AnsweredLate) == late
        assert entry.reply() == p.ChunkSize(size)
        self.waiting.discard(entry.correlation_id)

    @invariant()
    def count_is_right(self) -> None:
        assert self.table.num_in_flight == len(self.waiting)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=25, stateful_step_count=20)
