"""The message port: a ROUTER socket in a thread of its own, and the two workers behind it.

Every error is silence: a request that cannot be read or that a handler refuses is logged at DEBUG and never answered.
Two things end the message thread for good while HTTP stays healthy, as on the real server: a message of one frame, and
up to 0.5.5 an operation that the release does not define.

Only the loop's thread touches the socket. Workers put their replies into a queue and ring an eventfd.
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import zmq

from lmcache_sdk.devserver.behaviours import defines_opcode
from lmcache_sdk.devserver.core import Core
from lmcache_sdk.devserver.operations import Lane, Operations, lane_of
from lmcache_sdk.devserver.sessions import RefusedError
from lmcache_sdk.errors import KVCacheSDKError, RemoteProtocolError
from lmcache_sdk.protocol import Buffer, ReceivedRequest, Request, decode_request, encode_reply, find_rule

_log = logging.getLogger("lmcache_sdk.devserver")

JOIN_TIMEOUT: Final = 10.0
_SMALL: Final = 2**16
"""Frames below this are copied by zmq; larger ones are handed over."""


class Verdict(enum.Enum):
    """What a test can have done with one request."""

    ANSWER = "handle it and answer"
    MUTE = "handle it and lose the answer"
    IGNORE = "lose the request"


Intercept = Callable[[Request[Any]], Verdict]


class MessageThreadEnded(Exception):  # noqa: N818  # it is an event of the imitation, no error of ours
    """The message thread ends here, for good."""


@attrs.frozen
class Incoming:
    """A request and the connection it came from."""

    peer: bytes
    received: ReceivedRequest


class Gate:
    """Open or shut; shut, whoever passes waits."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        """Whether one may pass."""
        return self._open.is_set()

    def shut(self) -> None:
        """Shuts it."""
        self._open.clear()

    def open(self) -> None:
        """Opens it."""
        self._open.set()

    def wait(self) -> None:
        """Waits until it is open."""
        self._open.wait()


class MessagePort:
    """The ROUTER socket and its three threads."""

    def __init__(self, core: Core, gate: Gate) -> None:
        self._core = core
        self._gate = gate
        self._operations = Operations(core)
        self._stopping = threading.Event()
        self._parked = threading.Event()
        self._outbox: deque[list[Buffer]] = deque()
        self._inboxes: dict[Lane, queue.SimpleQueue[Incoming | None]] = {
            lane: queue.SimpleQueue() for lane in (Lane.NORMAL, Lane.AFFINITY)
        }
        self.intercept: Intercept | None = None
        self.counters: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.dead: bool = False
        self._context = zmq.Context()
        self._socket = self._bind()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [threading.Thread(target=self._run_loop, name="devserver-loop", daemon=True)]
        for lane in self._inboxes:
            name = f"devserver-{lane.value}"
            self._threads.append(threading.Thread(target=self._run_worker, args=(lane,), name=name, daemon=True))

    def _bind(self) -> zmq.Socket[bytes]:
        """Binds the socket; OSError when that cannot be done."""
        settings = self._core.settings
        try:
            socket = self._context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(f"tcp://{settings.host}:{settings.port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"message port: {error}") from error
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)  # it is an option of bytes
        self.url: str = endpoint.rstrip(b"\0").decode()
        return socket

    def start(self) -> None:
        """Starts answering."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops answering; what was not answered never is."""
        self._stopping.set()
        self._gate.open()
        for inbox in self._inboxes.values():
            inbox.put(None)
        self.wake()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(JOIN_TIMEOUT)
        self._socket.close(linger=0)
        self._context.term()
        os.close(self._bell)

    def _count(self, name: str) -> None:
        with self._counting:
            self.counters[name] += 1

    def park(self) -> None:
        """Returns once the loop has seen that the gate is shut; it takes and sends nothing until that opens."""
        self._parked.clear()
        self._gate.shut()
        self.wake()
        self._parked.wait(JOIN_TIMEOUT)

    def wake(self) -> None:
        """Makes the loop look at its outbox and at the gate."""
        os.eventfd_write(self._bell, 1)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while not self._stopping.is_set():
            listening = self._gate.is_open and not self.dead
            if not self._gate.is_open:
                self._parked.set()
            poller.modify(self._socket, zmq.POLLIN if listening else 0)
            ready = dict(poller.poll())
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if not self._gate.is_open:
                continue
            while self._outbox and not self.dead:
                self._send(self._outbox.popleft())
            if self._socket in ready:
                self._receive_all()

    def _receive_all(self) -> None:
        try:
            while self._gate.is_open:
                self._take(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return
        except MessageThreadEnded as event:
            _log.debug("the message thread ends: %s", event)
            self.dead = True

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        peer, *rest = (frame.buffer for frame in frames)
        incoming = self._decode(bytes(peer), rest)
        if incoming is None:
            return
        lane = lane_of(incoming.received.request)
        if lane is Lane.SYNC:
            self._send_if_any(self._handle(incoming))
        else:
            self._inboxes[lane].put(incoming)

    def _decode(self, peer: bytes, frames: Sequence[memoryview]) -> Incoming | None:
        if len(frames) < 2:
            raise MessageThreadEnded("a message of one frame")
        try:
            return Incoming(peer, decode_request(self._core.dialect, frames))
        except RemoteProtocolError as error:
            self._count("refused")
            _log.debug("request not understood: %s", error)
        if self._core.dialect.unknown_opcode_kills and not self._defines(frames[1]):
            raise MessageThreadEnded("an operation that this release does not define")
        return None

    def _defines(self, operation: memoryview) -> bool:
        try:
            find_rule(self._core.dialect, operation)
        except RemoteProtocolError:
            return defines_opcode(self._core.dialect, _small_integer(bytes(operation)))
        return True

    def _send_if_any(self, frames: list[Buffer] | None) -> None:
        if frames is not None:
            self._send(frames)

    def _send(self, frames: list[Buffer]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            _log.debug("reply not sent: %s", error)

    # ---- the workers -------------------------------------------------------------------------------------------------

    def _run_worker(self, lane: Lane) -> None:
        inbox = self._inboxes[lane]
        while (incoming := inbox.get()) is not None:
            self._gate.wait()
            if self._stopping.is_set():
                return
            frames = self._handle(incoming)
            del incoming  # it may hold gigabytes of a client's tensors
            if frames is not None:
                self._outbox.append(frames)
                self.wake()

    def _handle(self, incoming: Incoming) -> list[Buffer] | None:
        request = incoming.received.request
        name = self._core.dialect.rule_for(request).name
        verdict = Verdict.ANSWER if self.intercept is None else self.intercept(request)
        self._count(name)
        if verdict is Verdict.IGNORE:
            return None
        try:
            reply = self._operations.answer(request)
            frames = encode_reply(self._core.dialect, incoming.received, reply)
        except (RefusedError, KVCacheSDKError) as error:
            self._count("refused")
            _log.debug("%s refused: %s", name, error)
            return None
        except Exception:  # noqa: BLE001  # silence is what a client of the real server gets, whatever went wrong
            self._count("crashed")
            _log.exception("%s failed", name)
            return None
        return None if verdict is Verdict.MUTE else [incoming.peer, *frames]


def _small_integer(operation: bytes) -> int | None:
    """The value of a MessagePack unsigned integer of up to two bytes of content; None for anything else."""
    if len(operation) == 1 and operation[0] < 0x80:
        return operation[0]
    if len(operation) == 2 and operation[0] == 0xCC:
        return operation[1]
    if len(operation) == 3 and operation[0] == 0xCD:
        return int.from_bytes(operation[1:], "big")
    return None
