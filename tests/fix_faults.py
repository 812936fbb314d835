"""Faults by name: what a scripted server may do to one request, and what a connection may do to one message.

`FakeServer.on(kind, silence, late(2.0), value("x"))` takes the actions of the first half. `FaultyTransport` wraps a
`Transport` and applies a `Fault` to the n-th message of a direction; whole messages are its unit, because ZeroMQ
delivers them whole. `MemoryTransport` joins a Channel to a FakeServer without a socket, and `FakeClock` is the time
that passes while it waits: a wait for a reply that comes in three seconds takes no time, and one that ends at its
deadline moves the clock there.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import msgspec
import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import ConnectionLostError, Fate, SessionClosedError
from lmcache_sdk.session import Deadline
from lmcache_sdk.session.transport import Transport
from tests.fix_fake_server import Action, Delivery, FakeServer, Turn, answer

# ---- what a server does to one request -------------------------------------------------------------------------------


def silence(turn: Turn) -> list[Delivery]:
    """It is done, and the answer is lost."""
    turn.handle()
    return []


def ignored(turn: Turn) -> list[Delivery]:
    """The request is lost."""
    return []


def twice(turn: Turn) -> list[Delivery]:
    """The same answer two times."""
    return 2 * answer(turn)


def late(seconds: float, action: Action = answer) -> Action:
    """It is done at once and answered later."""
    return lambda turn: [attrs.evolve(delivery, delay=seconds) for delivery in action(turn)]


def reframed(change: Callable[[list[bytes]], list[bytes]]) -> Action:
    """It is done, and the frames of the answer are changed."""
    return lambda turn: [Delivery(change(delivery.frames)) for delivery in answer(turn)]


def changed(change: Callable[[Any], p.Reply]) -> Action:
    """It is done, and something else is told of it."""
    return lambda turn: [Delivery(turn.frames(change(turn.handle())))]


def says(reply: p.Reply) -> Action:
    """It is done, and this is told of it."""
    return changed(lambda _: reply)


def instead(reply: p.Reply) -> Action:
    """Nothing is done, and this is told."""
    return lambda turn: [Delivery(turn.frames(reply))]


def value(anything: object) -> Action:
    """It is done, and the payload frame holds this, whatever belongs there."""
    return payload(msgspec.msgpack.encode(anything))


def payload(frame: bytes) -> Action:
    """It is done, and these bytes are the payload frame."""
    return reframed(lambda frames: [*frames[:2], frame])


def then(action: Action, happens: Callable[[], object]) -> Action:
    """An action after which something else happens, on the server's thread."""

    def both(turn: Turn) -> list[Delivery]:
        deliveries = action(turn)
        happens()
        return deliveries

    return both


def _other_opcode(frames: list[bytes]) -> list[bytes]:
    return [frames[0], msgspec.msgpack.encode(msgspec.msgpack.decode(frames[1], type=int) + 1), *frames[2:]]


wrong_uid: Final = reframed(lambda frames: [msgspec.msgpack.encode(2**40), *frames[1:]])
wrong_opcode: Final = reframed(_other_opcode)
loading: Final = instead(p.PrefetchStatus(ready_chunks=None))
"""A prefetch that is still running."""


# ---- time and frames without sockets ---------------------------------------------------------------------------------


class FakeClock:
    """Seconds that pass only when somebody waits."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock that every deadline made during the test runs by."""
    made = FakeClock()

    def after(cls: type[Deadline], seconds: float) -> Deadline:
        return cls(seconds, made)

    monkeypatch.setattr(Deadline, "after", classmethod(after))
    return made


class MemoryTransport:
    """A `Transport` to a FakeServer."""

    def __init__(self, server: FakeServer, clock: FakeClock) -> None:
        self.server = server
        self.closed = False
        self.woken = False
        """The session is being closed: interruptible waits end."""
        self.lost = False
        """The connection is gone."""
        self._clock = clock
        self._order = itertools.count()
        self._arriving: list[tuple[float, int, list[bytes]]] = []

    def send(self, frames: Sequence[p.Buffer]) -> None:
        """Has the server take the message."""
        assert not self.closed
        if self.lost:
            raise ConnectionLostError("memory: the connection is gone", fate=Fate.NOT_SENT)
        for delivery in self.server.take([bytes(frame) for frame in frames]):
            heapq.heappush(self._arriving, (self._clock.now + delivery.delay, next(self._order), delivery.frames))

    def receive(self, deadline: Deadline, *, interruptible: bool = True) -> list[p.Buffer] | None:
        """The next message that arrives before the deadline; waiting moves the clock."""
        assert not self.closed
        if self._arriving and self._arriving[0][0] <= self._clock.now:
            return [*heapq.heappop(self._arriving)[2]]
        if self.lost:
            raise ConnectionLostError("memory: the connection is gone", fate=Fate.UNKNOWN)
        if interruptible and self.woken:
            raise SessionClosedError("memory: the context was closed", fate=Fate.UNKNOWN)
        until = self._clock.now + deadline.remaining()
        if self._arriving and self._arriving[0][0] <= until:
            self._clock.now = self._arriving[0][0]
            return [*heapq.heappop(self._arriving)[2]]
        self._clock.now = until
        return None

    def close(self, linger: float = 0.0) -> None:
        """No message is moved any more."""
        self.closed = True


# ---- what a connection does to one message ---------------------------------------------------------------------------


class Fault(enum.Enum):
    """One thing that goes wrong with one whole message."""

    DROP = "it never arrives"
    DELAY = "it arrives when the next wait has ended without an answer"
    DUPLICATE = "it arrives twice"
    TRUNCATE = "its last frame is missing"
    REORDER = "it arrives after the message that follows it"
    DISCONNECT = "the connection ends in its place"


class FaultyTransport:
    """A `Transport` around another. `sent` and `received` say which message of a direction meets which fault.

    A message to the server can be dropped, duplicated or cut off by the connection; the others are faults of answers.
    """

    def __init__(
        self, inner: Transport, *, sent: Mapping[int, Fault] | None = None, received: Mapping[int, Fault] | None = None
    ) -> None:
        self._inner = inner
        self._sent = dict(sent or {})
        self._received = dict(received or {})
        self._num_sent = 0
        self._num_received = 0
        self._ready: deque[list[p.Buffer]] = deque()
        self._delayed: deque[list[p.Buffer]] = deque()
        self._behind: list[p.Buffer] | None = None
        self._lost = False

    def send(self, frames: Sequence[p.Buffer]) -> None:
        """Sends, unless the fault of this message prevents it."""
        fault = self._sent.get(self._num_sent)
        self._num_sent += 1
        if self._lost or fault is Fault.DISCONNECT:
            self._lost = True
            raise ConnectionLostError("faulty: disconnected", fate=Fate.NOT_SENT)
        if fault is not Fault.DROP:
            self._inner.send(frames)
        if fault is Fault.DUPLICATE:
            self._inner.send(frames)

    def receive(self, deadline: Deadline, *, interruptible: bool = True) -> list[p.Buffer] | None:
        """Receives, with the faults of the answers on the way."""
        while not self._ready:
            if self._lost:
                raise ConnectionLostError("faulty: disconnected", fate=Fate.UNKNOWN)
            frames = self._inner.receive(deadline, interruptible=interruptible)
            if frames is None:
                behind, self._behind = self._behind, None
                self._ready.extend(self._delayed)
                self._delayed.clear()
                return behind
            self._meet(frames)
        return self._ready.popleft()

    def _meet(self, frames: list[p.Buffer]) -> None:
        fault = self._received.get(self._num_received)
        self._num_received += 1
        behind, self._behind = self._behind, None
        match fault:
            case None:
                self._ready.append(frames)
            case Fault.DROP:
                pass
            case Fault.DELAY:
                self._delayed.append(frames)
            case Fault.DUPLICATE:
                self._ready.extend((frames, list(frames)))
            case Fault.TRUNCATE:
                self._ready.append(frames[:-1])
            case Fault.REORDER:
                self._behind = frames
            case Fault.DISCONNECT:
                self._lost = True
        if behind is not None:
            self._ready.append(behind)

    def close(self, linger: float = 0.0) -> None:
        """Closes the other transport."""
        self._inner.close(linger)
