"""One connection, and the pool of them: answers find their requests, late and foreign ones harm nobody."""

from __future__ import annotations

import gc
import inspect
import logging
import threading

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import (
    ConnectError,
    ConnectionLostError,
    DeadlineExceededError,
    Fate,
    RemoteProtocolError,
    SessionClosedError,
    UnsupportedError,
)
from lmcache_sdk.session import Deadline
from lmcache_sdk.session.channel import Channel, ChannelPool
from lmcache_sdk.values import InstanceId, RequestId
from tests.fix_fake_server import FakeServer
from tests.fix_faults import (
    FakeClock,
    MemoryTransport,
    ignored,
    late,
    payload,
    reframed,
    silence,
    then,
    twice,
    wrong_opcode,
    wrong_uid,
)


class Line:
    """A server and one channel to it."""

    def __init__(self, release: str = "0.5.6") -> None:
        self.clock = FakeClock()
        self.server = FakeServer(release)
        self.transport = MemoryTransport(self.server, self.clock)
        self.channel = Channel(self.server.dialect, self.transport)

    def within(self, seconds: float) -> Deadline:
        return Deadline(seconds, self.clock)


@pytest.fixture
def line() -> Line:
    return Line()


# ---- one connection --------------------------------------------------------------------------------------------------


def test_a_call_gives_the_reply(line: Line) -> None:
    assert line.channel.call(p.Noop(), line.within(1), "x") == p.NoopAnswer("OK")
    assert line.channel.exchange.num_in_flight == 0


def test_answers_may_come_in_any_order(line: Line) -> None:
    line.server.on(p.Noop, late(2.0))
    first, second = line.channel.submit(p.Noop()), line.channel.submit(p.GetChunkSize())
    assert line.channel.wait(first, line.within(5), "x") == p.NoopAnswer("OK")
    assert line.channel.wait(second, line.within(0), "x") == p.ChunkSize(4)


def test_silence_ends_at_the_deadline_and_names_the_step(line: Line) -> None:
    line.server.on(p.QueryPrefetchStatus, silence)
    with pytest.raises(DeadlineExceededError) as caught:
        line.channel.call(p.QueryPrefetchStatus(request_id=RequestId("r")), line.within(2.0), "retrieve")
    assert caught.value.step == "retrieve: QUERY_PREFETCH_STATUS"
    assert caught.value.fate is Fate.UNKNOWN
    assert line.clock.now == 1002.0
    assert line.channel.exchange.num_in_flight == 1 and not line.channel.broken


def test_a_late_answer_settles_its_own_request_and_no_other(line: Line) -> None:
    line.server.on(p.GetChunkSize, late(3.0))
    slow = line.channel.submit(p.GetChunkSize())
    with pytest.raises(DeadlineExceededError):
        line.channel.wait(slow, line.within(1.0), "x")
    line.server.on(p.Noop, late(5.0))
    assert line.channel.call(p.Noop(), line.within(9), "x") == p.NoopAnswer("OK")
    assert slow.settled and slow.reply() == p.ChunkSize(4)
    assert line.channel.exchange.num_in_flight == 0


def test_a_late_answer_can_still_be_waited_for(line: Line) -> None:
    line.server.on(p.Noop, late(3.0))
    entry = line.channel.submit(p.Noop())
    with pytest.raises(DeadlineExceededError):
        line.channel.wait(entry, line.within(1.0), "x")
    assert line.channel.wait(entry, line.within(5.0), "x") == p.NoopAnswer("OK")


def test_an_answer_that_is_here_is_taken_although_the_deadline_has_passed(line: Line) -> None:
    entry = line.channel.submit(p.Noop())
    assert line.channel.wait(entry, line.within(0.0), "x") == p.NoopAnswer("OK")


@pytest.mark.parametrize(
    "foreign", [wrong_uid, reframed(lambda f: [b"", *f[1:]]), reframed(lambda f: [b"\xa11", *f[1:]])]
)
def test_an_answer_to_nobody_is_ignored(line: Line, foreign: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(foreign)
    line.server.on(p.Noop, foreign)
    with caplog.at_level(logging.WARNING, "lmcache_sdk.session"), pytest.raises(DeadlineExceededError):
        line.channel.call(p.Noop(), line.within(1.0), "x")
    assert "belongs to no request" in caplog.text
    assert line.channel.call(p.Noop(), line.within(1.0), "x") == p.NoopAnswer("OK")


def test_an_answer_that_comes_twice_is_taken_once(line: Line) -> None:
    line.server.on(p.GetChunkSize, twice)
    assert line.channel.call(p.GetChunkSize(), line.within(1), "x") == p.ChunkSize(4)
    assert line.channel.call(p.Noop(), line.within(1), "x") == p.NoopAnswer("OK")


@pytest.mark.parametrize(
    "action",
    [
        wrong_opcode,
        payload(b"\xc1"),
        payload(b""),
        payload(b"\xa13"),
        reframed(lambda f: f[:1]),
        reframed(lambda f: f[:2]),
        reframed(lambda f: [*f, b"\x00"]),
    ],
    ids=["opcode", "garbage", "empty", "type", "uid alone", "no payload", "too many frames"],
)
def test_an_illegal_answer_to_our_request_is_an_error_at_once(line: Line, action: object) -> None:
    assert callable(action)
    line.server.on(p.GetChunkSize, action)
    with pytest.raises(RemoteProtocolError):
        line.channel.call(p.GetChunkSize(), line.within(60), "x")
    assert line.clock.now == 1000.0
    assert line.channel.call(p.GetChunkSize(), line.within(1), "x") == p.ChunkSize(4)


def test_what_the_release_has_no_words_for_breaks_nothing() -> None:
    line = Line("0.5.0")
    with pytest.raises(UnsupportedError):
        line.channel.submit(p.GetExperimental())
    assert line.server.requests == [] and not line.channel.broken


def test_a_loss_while_waiting_is_an_error_at_once_and_breaks_the_channel(line: Line) -> None:
    line.server.on(p.Noop, then(silence, lambda: setattr(line.transport, "lost", True)))
    with pytest.raises(ConnectionLostError) as caught:
        line.channel.call(p.Noop(), line.within(60), "retrieve")
    assert "retrieve: NOOP" in str(caught.value) and caught.value.fate is Fate.UNKNOWN
    assert line.clock.now == 1000.0
    assert line.channel.broken and line.channel.lost


def test_what_cannot_be_sent_is_not_in_flight(line: Line) -> None:
    line.transport.lost = True
    with pytest.raises(ConnectionLostError) as caught:
        line.channel.submit(p.Noop())
    assert caught.value.fate is Fate.NOT_SENT
    assert line.channel.broken and line.channel.exchange.num_in_flight == 0


def test_a_close_of_the_session_ends_a_wait_but_not_a_clean_up(line: Line) -> None:
    line.server.on(p.Noop, late(1.0), late(1.0))
    line.transport.woken = True
    with pytest.raises(SessionClosedError):
        line.channel.call(p.Noop(), line.within(5), "x")
    assert not line.channel.broken
    assert line.channel.call(p.Noop(), line.within(5), "x", interruptible=False) == p.NoopAnswer("OK")


def test_a_pause_lasts_and_takes_what_arrives(line: Line) -> None:
    line.server.on(p.Noop, late(0.005))
    entry = line.channel.submit(p.Noop())
    line.channel.pause(0.02, line.within(5))
    assert entry.settled and line.clock.now == pytest.approx(1000.02)


def test_a_pause_ends_with_the_deadline(line: Line) -> None:
    line.channel.pause(5.0, line.within(0.01))
    assert line.clock.now == pytest.approx(1000.01)


def test_a_pause_ends_with_the_session(line: Line) -> None:
    line.transport.woken = True
    with pytest.raises(SessionClosedError):
        line.channel.pause(0.01, line.within(5))
    line.channel.pause(0.01, line.within(5), interruptible=False)


def test_a_late_payload_is_not_kept_alive_by_the_channel(line: Line) -> None:
    """It may be hundreds of megabytes, and the channel lives as long as the session."""
    line.server.on(p.Noop, late(2.0))
    entry = line.channel.submit(p.Noop())
    with pytest.raises(DeadlineExceededError):
        line.channel.wait(entry, line.within(1.0), "x")
    line.channel.pause(5.0, line.within(5))
    assert entry.settled
    reply = entry.reply()
    del entry
    gc.collect()
    assert [holder for holder in gc.get_referrers(reply) if not inspect.isframe(holder)] == []


def test_repr(line: Line) -> None:
    line.server.on(p.Noop, ignored)
    line.channel.submit(p.Noop())
    assert repr(line.channel) == "<Channel open 1 in flight>"
    line.channel.close()
    assert repr(line.channel) == "<Channel broken 1 in flight>"


# ---- the pool --------------------------------------------------------------------------------------------------------


class Lines:
    """A server, and a pool whose channels lead to it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.server = FakeServer()
        self.transports: list[MemoryTransport] = []
        self.losses = 0
        self.pool = ChannelPool(self.connect, self.note_loss)

    def connect(self, deadline: Deadline, step: str) -> Channel:
        deadline.check(step, Fate.NOT_SENT)
        self.transports.append(MemoryTransport(self.server, self.clock))
        return Channel(self.server.dialect, self.transports[-1])

    def note_loss(self) -> None:
        self.losses += 1

    def within(self, seconds: float = 1.0) -> Deadline:
        return Deadline(seconds, self.clock)


@pytest.fixture
def lines(clock: FakeClock) -> Lines:
    made = Lines()
    made.clock = clock
    return made


def test_channels_are_used_again(lines: Lines) -> None:
    for _ in range(3):
        with lines.pool.borrow(lines.within(), "x") as channel:
            channel.call(p.Noop(), lines.within(), "x")
    assert len(lines.transports) == 1 and lines.pool.num_idle == 1
    lines.pool.close()
    assert lines.transports[0].closed


def test_as_many_channels_as_concurrent_calls_and_no_more(lines: Lines) -> None:
    for _ in range(3):
        with lines.pool.borrow(lines.within(), "x") as one, lines.pool.borrow(lines.within(), "x") as other:
            assert one is not other
    assert len(lines.transports) == 2 and lines.pool.num_idle == 2
    lines.pool.close()


def test_a_channel_comes_back_after_an_error_too(lines: Lines) -> None:
    with pytest.raises(KeyError), lines.pool.borrow(lines.within(), "x"):
        raise KeyError
    assert lines.pool.num_idle == 1
    lines.pool.close()


def test_what_came_while_it_was_idle_is_taken_first(lines: Lines) -> None:
    lines.server.on(p.GetChunkSize, late(2.0))
    with lines.pool.borrow(lines.within(), "x") as channel:
        entry = channel.submit(p.GetChunkSize())
        with pytest.raises(DeadlineExceededError):
            channel.wait(entry, lines.within(1.0), "x")
    lines.clock.advance(5)
    with lines.pool.borrow(lines.within(), "x"):
        assert entry.settled
    lines.pool.close()


def test_a_channel_that_broke_is_closed_and_the_session_told(lines: Lines) -> None:
    lost = pytest.raises(ConnectionLostError)
    with lost, lines.pool.borrow(lines.within(), "x") as channel:
        lines.transports[0].lost = True
        channel.call(p.Noop(), lines.within(), "x")
    assert lines.pool.num_idle == 0 and lines.transports[0].closed and lines.losses == 1


def test_a_loss_while_idle_is_noticed_before_anything_is_sent(lines: Lines) -> None:
    with lines.pool.borrow(lines.within(), "x"):
        pass
    lines.transports[0].lost = True
    with pytest.raises(ConnectionLostError) as caught, lines.pool.borrow(lines.within(), "retrieve"):
        pytest.fail("lent a dead channel")
    assert caught.value.fate is Fate.NOT_SENT and "retrieve" in str(caught.value)
    assert lines.transports[0].closed and lines.losses == 1 and lines.pool.num_idle == 0


def test_a_kept_channel_is_not_lent_to_others(lines: Lines) -> None:
    with lines.pool.borrow(lines.within(), "x") as channel:
        channel.kept = True
    assert lines.pool.num_idle == 0 and not lines.transports[0].closed
    channel.kept = False
    lines.pool.give_back(channel)
    assert lines.pool.num_idle == 1
    lines.pool.close()


def test_a_channel_that_comes_back_after_the_close_is_closed(lines: Lines) -> None:
    with lines.pool.borrow(lines.within(), "x"):
        lines.pool.close()
        assert not lines.transports[0].closed
    assert lines.transports[0].closed


def test_a_failed_connect_leaves_the_pool_as_it_was(lines: Lines) -> None:
    def refuse(deadline: Deadline, step: str) -> Channel:
        raise ConnectError("refused")

    pool = ChannelPool(refuse, lines.note_loss)
    with pytest.raises(ConnectError), pool.borrow(lines.within(), "x"):
        pytest.fail("connected")
    assert pool.num_idle == 0 and lines.losses == 0


def test_goodbye_says_unregister_and_does_not_wait(lines: Lines) -> None:
    with lines.pool.borrow(lines.within(), "x"):
        pass
    lines.server.always(p.Unregister, silence)
    lines.pool.say_goodbye([InstanceId(1), InstanceId(2)], 0.1)
    assert [request.instance_id for request in lines.server.asked(p.Unregister)] == [1, 2]
    assert lines.transports[0].closed and lines.clock.now == 1000.0


def test_goodbye_without_a_connection_says_nothing(lines: Lines) -> None:
    lines.pool.say_goodbye([InstanceId(1)], 0.1)
    assert lines.server.requests == [] and lines.transports == []
    with lines.pool.borrow(lines.within(), "x"):
        pass
    lines.transports[0].lost = True
    lines.pool.say_goodbye([InstanceId(1)], 0.1)
    assert lines.server.requests == [] and lines.transports[0].closed


def test_threads_share_the_pool(lines: Lines) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                with lines.pool.borrow(lines.within(), "x") as channel:
                    assert channel.call(p.GetChunkSize(), lines.within(), "x") == p.ChunkSize(4)
        except BaseException as error:  # noqa: BLE001  # handed to the test
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failures == [] and len(lines.transports) <= 4
    lines.pool.close()
    assert all(transport.closed for transport in lines.transports)
