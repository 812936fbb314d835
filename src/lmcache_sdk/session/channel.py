"""Exchange + transport: one connection that does one call after another, `call(request, deadline) -> reply`.

A channel belongs to one operation at a time (`ChannelPool.borrow`), so calls of different threads never wait for each
other and all requests of an operation travel on one socket, where the server keeps their order. The pool never holds
more channels than there were concurrent operations: a server never forgets a socket (PROTOCOL.md section 9).

A request that got no answer in time stays in the exchange; its late answer settles its entry, which whoever must give
something back for it holds. A channel that lost its connection is closed, never reused, and the session is told: a
new socket might lead to a restarted server, where nothing of ours exists.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lmcache_sdk.errors import (
    ConnectError,
    ConnectionLostError,
    Fate,
    KVCacheSDKError,
    RemoteProtocolError,
    TransportError,
)
from lmcache_sdk.protocol import AnsweredLate, Dialect, Exchange, Frames, InFlight, Request, Unregister
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.session.process import OwnProcess
from lmcache_sdk.session.tracing import trace, tracing
from lmcache_sdk.session.transport import Transport
from lmcache_sdk.values import InstanceId, override

R = TypeVar("R")

_log = logging.getLogger("lmcache_sdk.session")


class Channel:
    """One connection to the server."""

    def __init__(self, dialect: Dialect, transport: Transport) -> None:
        self.exchange: Exchange = Exchange(dialect)
        self.broken: bool = False
        self.lost: bool = False
        """Whether it is broken because the server went away."""
        self.kept: bool = False
        """Not to be given to another operation: a reservation that is open waits for its answer here."""
        self._transport = transport
        self._tracing = tracing()

    def submit(self, request: Request[R]) -> InFlight[R]:
        """Sends a request and returns at once."""
        entry = self.exchange.send(request)
        if self._tracing:
            trace(">", entry.name, entry.frames)
        try:
            self._transport.send(entry.frames)
        except TransportError:
            self.exchange.withdraw(entry)
            self.broken = self.lost = True
            raise
        entry.frames = []  # a payload of hundreds of megabytes must not live as long as its answer takes
        return entry

    def wait(self, entry: InFlight[R], deadline: Deadline, step: str, *, interruptible: bool = True) -> R:
        """Waits for the reply; on a timeout the entry is abandoned and DeadlineExceededError says `step`."""
        where = f"{step}: {entry.name.upper()}"
        try:
            while not entry.settled:
                frames = self._transport.receive(deadline, interruptible=interruptible)
                if frames is None:
                    raise deadline.exceeded(where)
                self._take(frames)
        except (ConnectionLostError, ConnectError) as error:
            self.broken = self.lost = True
            raise ConnectionLostError(f"{where}: {error}", fate=Fate.UNKNOWN) from error
        finally:
            self.exchange.abandon(entry)
        return entry.reply()

    def call(self, request: Request[R], deadline: Deadline, step: str, *, interruptible: bool = True) -> R:
        """Sends a request and waits for its reply."""
        return self.wait(self.submit(request), deadline, step, interruptible=interruptible)

    def pause(self, seconds: float, deadline: Deadline, *, interruptible: bool = True) -> None:
        """Waits a moment between two polls, taking what arrives; a close of the session ends it."""
        if seconds < 0.001:  # finer than a poll can wait
            time.sleep(seconds)
            return
        moment = deadline.capped(seconds)
        while (frames := self._transport.receive(moment, interruptible=interruptible)) is not None:
            self._take(frames)

    def drain(self) -> None:
        """Takes every reply that has arrived, without waiting."""
        now = Deadline.after(0.0)
        try:
            while (frames := self._transport.receive(now, interruptible=False)) is not None:
                self._take(frames)
        except (ConnectionLostError, ConnectError):
            self.broken = self.lost = True

    def await_answers(self, deadline: Deadline) -> None:
        """Takes replies until none is missing, or the deadline passed."""
        try:
            while self.exchange.num_in_flight and not self.broken:
                frames = self._transport.receive(deadline, interruptible=False)
                if frames is None:
                    return
                self._take(frames)
        except (ConnectionLostError, ConnectError):
            self.broken = self.lost = True

    def _take(self, frames: Frames) -> None:
        if self._tracing:
            trace("<", "reply", frames)
        try:
            event = self.exchange.receive(frames)
        except RemoteProtocolError as error:
            # an id that nobody asked for: whoever sent it, it is not an answer to what we wait for
            _log.warning("ignored a reply that belongs to no request of ours: %s", str(error))
            return
        if isinstance(event, AnsweredLate):
            _log.debug("%s was answered late", event.entry.name)  # whoever owes something for it has the entry

    def close(self, linger: float = 0.0) -> None:
        """Frees the socket; what was sent may still go out for `linger` seconds."""
        self.broken = True
        self._transport.close(linger)

    @override
    def __repr__(self) -> str:
        return f"<Channel {'broken' if self.broken else 'open'} {self.exchange.num_in_flight} in flight>"


class ChannelPool:
    """Idle channels of one session; makes one when none is idle."""

    def __init__(self, connect: Callable[[Deadline, str], Channel], on_loss: Callable[[], None]) -> None:
        self._connect = connect
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._closed = False
        self._process = OwnProcess()

    @contextlib.contextmanager
    def borrow(self, deadline: Deadline, step: str) -> Iterator[Channel]:
        """A channel for the time of one operation."""
        channel = self._take_idle(step) or self._connect(deadline, step)
        try:
            yield channel
        finally:
            if self._process.here:  # a forked child must not touch the parent's sockets and locks
                self.give_back(channel)

    def _take_idle(self, step: str) -> Channel | None:
        with self._lock:
            channel = self._idle.pop() if self._idle else None
        if channel is None:
            return None
        channel.drain()  # a server that went away while the channel was idle is noticed here
        if channel.broken:
            self.give_back(channel)
            raise ConnectionLostError(f"{step}: the server went away since the last call", fate=Fate.NOT_SENT)
        return channel

    def give_back(self, channel: Channel) -> None:
        """Takes a channel back, unless it is kept for an open reservation; closes it when it is of no more use."""
        if channel.lost:
            self._on_loss()
        if channel.kept:
            return
        with self._lock:
            keep = not self._closed and not channel.broken
            if keep:
                self._idle.append(channel)
        if not keep:
            channel.close()

    def settle(self, deadline: Deadline) -> None:
        """Waits, for a time, for the answers that idle channels are still to get."""
        for _ in range(self.num_idle):
            with self._lock:
                if not self._idle:
                    return
                channel = self._idle.pop(0)
            channel.await_answers(deadline)
            self.give_back(channel)

    def say_goodbye(self, instances: Sequence[InstanceId], linger: float) -> None:
        """Sends UNREGISTER for each instance on an idle channel, without waiting, and lets it go out for `linger`
        seconds.
        """
        with contextlib.suppress(KVCacheSDKError):
            channel = self._take_idle("close")
            if channel is None:
                return
            try:
                for instance_id in instances:
                    channel.submit(Unregister(instance_id=instance_id))
            finally:
                channel.close(linger)

    def close(self) -> None:
        """Closes the idle channels; those in use are closed when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    @property
    def num_idle(self) -> int:
        """Channels that no operation uses."""
        with self._lock:
            return len(self._idle)
