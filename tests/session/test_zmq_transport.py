"""The DEALER on real sockets: a wrong address is told apart from a slow server, a lost peer from a silent one."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import ConnectError, ConnectionLostError, DeadlineExceededError, Fate, SessionClosedError
from lmcache_sdk.session import Deadline
from lmcache_sdk.session.channel import Channel
from lmcache_sdk.session.zmq_transport import ZmqTransport, new_context, open_dealer
from tests.fix_fake_server import FakeServer
from tests.fix_faults import ignored, late, says, silence
from tests.session.ports import HttpPort, MessagePort, RawPort, closed_port, stay_silent

LONG = 30.0
"""A deadline that must not be reached."""


class Dealers:
    """What a session has, without the session: a context, a wake pipe, and dealers that are closed at the end."""

    def __init__(self) -> None:
        self.context = new_context()
        self.wake_read, self.wake_write = os.pipe()
        self.transports: list[ZmqTransport] = []

    def open(self, url: str, seconds: float = LONG, *, interruptible: bool = True) -> ZmqTransport:
        deadline = Deadline.after(seconds)
        made = open_dealer(self.context, url, self.wake_read, deadline, "connect", interruptible=interruptible)
        self.transports.append(made)
        return made

    def wake(self) -> None:
        os.write(self.wake_write, b"!")

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        self.context.term()
        os.close(self.wake_read)
        os.close(self.wake_write)


@pytest.fixture
def dealers() -> Iterator[Dealers]:
    made = Dealers()
    yield made
    made.close()


@contextlib.contextmanager
def at_once(seconds: float = 3.0) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def soon(happens: object, seconds: float = 0.05) -> threading.Timer:
    assert callable(happens)
    timer = threading.Timer(seconds, happens)
    timer.start()
    return timer


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_it_returns_after_the_handshake(dealers: Dealers) -> None:
    with MessagePort(FakeServer()) as port:
        transport = dealers.open(port.url)
        assert repr(transport) == f"<ZmqTransport {port.url} open>"


def test_over_a_unix_socket(dealers: Dealers, tmp_path: Path) -> None:
    with MessagePort(FakeServer(), f"ipc://{tmp_path}/socket") as port:
        channel = Channel(port.server.dialect, dealers.open(port.url))
        assert channel.call(p.Noop(), Deadline.after(5), "x") == p.NoopAnswer("OK")


def test_a_port_that_refuses_is_an_error_at_once(dealers: Dealers) -> None:
    url = f"tcp://127.0.0.1:{closed_port()}"
    with at_once(), pytest.raises(ConnectError, match="refused") as caught:
        dealers.open(url)
    assert url in str(caught.value) and "connect" in str(caught.value)
    assert caught.value.fate is Fate.NOT_SENT


def test_a_unix_socket_that_is_not_there(dealers: Dealers, tmp_path: Path) -> None:
    with at_once(), pytest.raises(ConnectError):
        dealers.open(f"ipc://{tmp_path}/nothing")


def test_a_host_that_does_not_exist(dealers: Dealers) -> None:
    with pytest.raises((ConnectError, DeadlineExceededError), match=r"nowhere\.invalid"):
        dealers.open("tcp://nowhere.invalid:5555", 1.0)


def test_the_http_port_as_url_is_an_error_at_once(dealers: Dealers) -> None:
    with HttpPort() as port, at_once(8), pytest.raises(ConnectError) as caught:
        dealers.open(port.url.replace("http", "tcp"))
    assert "ZMTP" in str(caught.value)


def test_a_port_that_answers_something_else(dealers: Dealers) -> None:
    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(10)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with RawPort(talk) as port, at_once(), pytest.raises(ConnectError, match="ZMTP"):
        dealers.open(f"tcp://127.0.0.1:{port.port}")


def test_a_port_that_accepts_and_is_silent_ends_at_the_deadline(dealers: Dealers) -> None:
    with RawPort(stay_silent) as port, at_once():
        url = f"tcp://127.0.0.1:{port.port}"
        with pytest.raises(DeadlineExceededError) as caught:
            dealers.open(url, 0.2)
        assert caught.value.step == f"connect: ZMTP handshake with {url}"
        assert caught.value.fate is Fate.NOT_SENT


def test_a_close_ends_the_opening(dealers: Dealers) -> None:
    with RawPort(stay_silent) as port, at_once():
        timer = soon(dealers.wake)
        with pytest.raises(SessionClosedError):
            dealers.open(f"tcp://127.0.0.1:{port.port}")
        timer.join()


UNUSABLE = ["tcp://", "nonsense", "udp://127.0.0.1:5", "tcp://*:5555", "tcp://h!:5555", "ipc:///" + 200 * "x"]


@pytest.mark.parametrize("url", UNUSABLE)
def test_an_address_that_zmq_refuses(url: str) -> None:
    dealers = Dealers()
    with at_once(), pytest.raises(ConnectError) as caught:
        dealers.open(url)
    ending = threading.Thread(target=dealers.close, daemon=True)
    ending.start()
    ending.join(2)
    stuck = ending.is_alive()
    message = str(caught.value)
    del caught  # the error's frames may hold what keeps the context from ending
    gc.collect()
    ending.join(5)
    assert not stuck, "the context could not be ended while the error was alive"
    assert message.startswith(url)


def test_failures_leave_nothing_behind(dealers: Dealers) -> None:
    """That nothing is left is what `no_leaks` looks at; here are enough failures to show."""
    url = f"tcp://127.0.0.1:{closed_port()}"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(ConnectError):
            dealers.open(url)
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before + 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before + 5  # zmq's own threads have a few


# ---- talking ---------------------------------------------------------------------------------------------------------


def test_frames_of_every_size_travel_unchanged(dealers: Dealers) -> None:
    """Small frames are copied out of zmq, large ones are views; the codec sees no difference."""
    server = FakeServer()
    with MessagePort(server) as port:
        channel = Channel(server.dialect, dealers.open(port.url))
        for size in (0, 1, 65_535, 65_536, 65_537, 2**22):
            text = "x" * size
            server.on(p.Noop, says(p.NoopAnswer(text)))
            assert channel.call(p.Noop(), Deadline.after(10), "x") == p.NoopAnswer(text)


def test_silence_ends_at_the_deadline(dealers: Dealers) -> None:
    server = FakeServer()
    with MessagePort(server) as port, at_once():
        channel = Channel(server.dialect, dealers.open(port.url))
        server.on(p.Noop, ignored)
        with pytest.raises(DeadlineExceededError):
            channel.call(p.Noop(), Deadline.after(0.1), "x")
        assert channel.call(p.Noop(), Deadline.after(5), "x") == p.NoopAnswer("OK")


def test_late_answers_find_their_requests(dealers: Dealers) -> None:
    server = FakeServer()
    with MessagePort(server) as port:
        channel = Channel(server.dialect, dealers.open(port.url))
        server.on(p.GetChunkSize, late(0.15))
        slow = channel.submit(p.GetChunkSize())
        with pytest.raises(DeadlineExceededError):
            channel.wait(slow, Deadline.after(0.02), "x")
        assert channel.call(p.Noop(), Deadline.after(5), "x") == p.NoopAnswer("OK")
        assert channel.wait(slow, Deadline.after(5), "x") == p.ChunkSize(4)


def test_a_server_that_dies_while_we_wait_is_an_error_at_once(dealers: Dealers) -> None:
    server = FakeServer()
    with MessagePort(server) as port:
        channel = Channel(server.dialect, dealers.open(port.url))
        server.on(p.Noop, silence)
        timer = soon(port.close)
        with at_once(), pytest.raises(ConnectionLostError) as caught:
            channel.call(p.Noop(), Deadline.after(LONG), "retrieve")
        timer.join()
        assert caught.value.fate is Fate.UNKNOWN and port.url in str(caught.value)
        assert channel.broken


def test_what_arrived_before_the_end_is_read_after_it(dealers: Dealers) -> None:
    server = FakeServer()
    with MessagePort(server) as port:
        channel = Channel(server.dialect, dealers.open(port.url))
        entry = channel.submit(p.Noop())
        server.wait_until(lambda: bool(server.requests))
        time.sleep(0.05)  # the answer is on its way, and nothing here can see it arrive
        port.close()
        assert channel.wait(entry, Deadline.after(5), "x") == p.NoopAnswer("OK")
        with pytest.raises(ConnectionLostError):
            channel.call(p.Noop(), Deadline.after(5), "x")


def test_it_never_connects_again_by_itself(dealers: Dealers) -> None:
    """A DEALER that does would replay its unsent requests into whatever server comes next."""
    first, second = FakeServer(), FakeServer()
    with MessagePort(first) as port:
        channel = Channel(first.dialect, dealers.open(port.url))
        url = port.url
    with MessagePort(second, url):
        for _ in range(3):
            with pytest.raises(ConnectionLostError):
                channel.call(p.Noop(), Deadline.after(0.3), "x")
        assert second.requests == []


def test_a_close_ends_a_wait_but_not_a_clean_up(dealers: Dealers) -> None:
    server = FakeServer()
    with MessagePort(server) as port:
        channel = Channel(server.dialect, dealers.open(port.url))
        server.on(p.Noop, ignored, late(0.05))
        timer = soon(dealers.wake)
        with at_once(), pytest.raises(SessionClosedError) as caught:
            channel.call(p.Noop(), Deadline.after(LONG), "x")
        timer.join()
        assert caught.value.fate is Fate.UNKNOWN
        assert channel.call(p.Noop(), Deadline.after(5), "x", interruptible=False) == p.NoopAnswer("OK")


def test_closing_twice_does_no_harm_and_lingering_sends_what_is_queued(dealers: Dealers) -> None:
    server = FakeServer()
    with MessagePort(server) as port:
        channel = Channel(server.dialect, dealers.open(port.url))
        channel.submit(p.Noop())
        channel.close(linger=1.0)
        channel.close()
        server.wait_until(lambda: server.names() == ["Noop"])
