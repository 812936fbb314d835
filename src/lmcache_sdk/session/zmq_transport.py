"""A DEALER socket that knows when its peer goes away; the only importer of zmq.

Contract: `open_dealer` returns after the ZMTP handshake, so that a wrong address is told apart from a slow server.
The socket never reconnects (RECONNECT_IVL -1): a DEALER that does keeps its unsent requests and replays them into
whatever server comes next (FAULTS.md A6). Loss is an event of the socket's monitor and ends a wait at once. A wait
also ends when the session's wake pipe is written to. No empty delimiter, no identity, no heartbeat frames
(PROTOCOL.md section 1).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from lmcache_sdk.errors import (
    ConnectError,
    ConnectionLostError,
    Fate,
    SessionClosedError,
)
from lmcache_sdk.protocol import Buffer
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.session.interrupts import window
from lmcache_sdk.values import override

_Socket = zmq.Socket[bytes]
ZmqContext = zmq.Context[_Socket]

HANDSHAKE_STEP: Final = "ZMTP handshake with"
_COPY_BELOW: Final = 65_536
"""Frames up to this many bytes are copied out of zmq's message; a view of a larger one is worth its bookkeeping."""

_LOST: Final = {
    zmq.Event.DISCONNECTED: "the server closed the connection",
    zmq.Event.CLOSED: "the connection was closed",
}
_REFUSED: Final[Mapping[int, str]] = {
    zmq.Event.CLOSED: "connection refused",
    zmq.Event.DISCONNECTED: "the peer closed the connection before the ZMTP handshake",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the peer asks for ZMTP authentication, which LMCache does not have",
}
_NOW: Final = int(zmq.NOBLOCK)
_NOW_AND_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE: Final = int(zmq.POLLIN)
"""Numbers: the enumerations take as long to combine as a small message to send."""


@contextlib.contextmanager
def _connecting(url: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        raise ConnectError(f"{url}: {error}") from error


def message_buffer(nbytes: int) -> memoryview:
    """Writable memory that `Transport.send` sends without another copy. Who writes to it again while zmq is still
    sending it changes what is sent: wait for the answer first.
    """
    zeros = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never touched: takes no memory
    try:
        with contextlib.suppress(OSError):
            zeros.madvise(mmap.MADV_HUGEPAGE)
        return zmq.Frame(zeros, copy=True).buffer
    finally:
        zeros.close()


def _message_of(frame: Buffer) -> Buffer | zmq.Frame:
    """Zmq's own message where the frame is the whole of one: sent again, it is counted and not copied."""
    owner: object = frame.obj if isinstance(frame, memoryview) else None
    return owner if isinstance(owner, zmq.Frame) and len(owner) == len(frame) else frame


def new_context() -> ZmqContext:
    """A ZeroMQ context of a session's own; nothing here is shared by the process."""
    context: ZmqContext = zmq.Context(io_threads=1)
    context.linger = 0
    return context


class ZmqTransport:
    """One DEALER socket and its monitor; a `Transport`, used by one thread at a time."""

    def __init__(self, context: ZmqContext, url: str, wake_fd: int) -> None:
        self._url = url
        self._wake_fd = wake_fd
        self._closed = False
        self._lost: str | None = None
        with _connecting(url):
            self._socket = context.socket(zmq.DEALER)
            try:
                for option, value in (
                    (zmq.LINGER, 0),
                    (zmq.SNDHWM, 0),
                    (zmq.RCVHWM, 0),
                    (zmq.RECONNECT_IVL, -1),
                    (zmq.IPV6, int("[" in url)),
                ):
                    self._socket.setsockopt(option, value)
                self._monitor = self._socket.get_monitor_socket()
            except BaseException:
                self._socket.close(linger=0)
                raise
            try:
                self._socket.connect(url)
            except BaseException:
                self.close()
                raise

    def await_handshake(self, deadline: Deadline, step: str, *, interruptible: bool) -> None:
        """Returns once the peer has greeted; raises ConnectError when it refuses or is something else."""
        while True:
            if self._poll(deadline, (self._monitor,), interruptible=interruptible) == []:
                raise deadline.exceeded(f"{step}: {HANDSHAKE_STEP} {self._url}", Fate.NOT_SENT)
            event = self._next_event()
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return
            if event in _REFUSED:
                raise ConnectError(f"{step}: cannot connect to the ZMQ url {self._url}: {_REFUSED[event]}")

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queues one message. Memory of `message_buffer` goes out as it is. Other frames are copied: sending them
        without a copy makes pyzmq keep a thread and four descriptors for the whole process, for ever.
        """
        if self._lost is not None:
            raise self._loss(self._lost, Fate.NOT_SENT)
        parts = [_message_of(frame) for frame in frames]
        try:
            for part in parts[:-1]:
                self._socket.send(part, flags=_NOW_AND_MORE)
            self._socket.send(parts[-1], flags=_NOW)
        except zmq.ZMQError as error:
            raise self._loss(str(error)) from error

    def receive(self, deadline: Deadline, *, interruptible: bool = True) -> list[Buffer] | None:
        """The next message, or None when the deadline passed; see `Transport.receive`."""
        try:
            while True:
                # not ZMQ_EVENTS, which is cheaper and loses what arrived just before the peer went away
                frames = self._receive_now()
                if frames is not None:
                    return frames
                if self._lost is not None:
                    raise self._loss(self._lost)
                ready = self._poll(deadline, (self._socket, self._monitor), interruptible=interruptible)
                if not ready:
                    return None
                if self._monitor in ready:
                    self._note_event()
        except zmq.ZMQError as error:
            raise self._loss(str(error)) from error

    def _loss(self, why: str, fate: Fate = Fate.UNKNOWN) -> ConnectionLostError:
        return ConnectionLostError(f"{self._url}: {why}", fate=fate)

    def _receive_now(self) -> list[Buffer] | None:
        try:
            frames = self._socket.recv_multipart(flags=_NOW, copy=False)
        except zmq.Again:
            return None
        return [frame.bytes if len(frame) <= _COPY_BELOW else frame.buffer for frame in frames]

    def _poll(self, deadline: Deadline, sockets: Sequence[_Socket], *, interruptible: bool) -> list[object]:
        """What is readable, nothing when the deadline passed; raises when the session is being closed."""
        watched: list[tuple[Any, int]] = [(socket, _READABLE) for socket in sockets]
        if interruptible:
            watched.append((self._wake_fd, _READABLE))
        with window() if interruptible else contextlib.nullcontext():
            polled = zmq.zmq_poll(watched, deadline.remaining_ms())
        ready: list[object] = [source for source, _ in polled]
        if interruptible and self._wake_fd in ready:
            raise SessionClosedError(f"{self._url}: the context was closed while a call was waiting", fate=Fate.UNKNOWN)
        return ready

    def _next_event(self) -> int:
        return int(parse_monitor_message(self._monitor.recv_multipart())["event"])

    def _note_event(self) -> None:
        event = self._next_event()
        if event in _LOST:
            self._lost = _LOST[zmq.Event(event)]

    def close(self, linger: float = 0.0) -> None:
        """Frees the socket; zmq's own thread may send what is queued for `linger` seconds more."""
        if not self._closed:
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=int(linger * 1000))

    @override
    def __repr__(self) -> str:
        return f"<ZmqTransport {self._url} {'closed' if self._closed else self._lost or 'open'}>"


def open_dealer(
    context: ZmqContext,
    url: str,
    wake_fd: int,
    deadline: Deadline,
    step: str,
    *,
    interruptible: bool = True,
) -> ZmqTransport:
    """A connected transport whose peer has greeted."""
    transport = ZmqTransport(context, url, wake_fd)
    try:
        transport.await_handshake(deadline, step, interruptible=interruptible)
    except BaseException:
        transport.close()
        raise
    return transport
