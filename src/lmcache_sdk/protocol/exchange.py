"""What is in flight on one connection: what was asked, which answer is legal, which came late. No I/O, no clock.

`send` gives an `InFlight` whose frames the caller moves; `receive` takes frames that came and settles the one they
belong to. A call that gives up *abandons* its entry: if the answer comes after all, `receive` reports it as
`AnsweredLate`, because a late yes to a lookup means that the server holds locks which someone must give back.

Refuses an id nobody asked for, or one that was answered already, with `RemoteProtocolError`. An illegal answer to a
known id settles that id with the error.
"""

from __future__ import annotations

import enum
from typing import Any, Generic, TypeVar

import attrs

from lmcache_sdk.errors import LocalProtocolError, RemoteProtocolError
from lmcache_sdk.protocol.codec import Frames, decode_correlation_id, decode_reply, encode_request
from lmcache_sdk.protocol.messages import Buffer, Request
from lmcache_sdk.protocol.rules import Dialect
from lmcache_sdk.values import CorrelationId, override

R = TypeVar("R")


class InFlightState(enum.Enum):
    """Where an entry of the table is."""

    WAITING = "waiting"
    ABANDONED = "abandoned"
    SETTLED = "settled"


class InFlight(Generic[R]):
    """One request on its way, and its reply once that has come."""

    __slots__ = ("_error", "_reply", "correlation_id", "frames", "name", "request", "state")

    def __init__(self, correlation_id: CorrelationId, request: Request[R], name: str, frames: list[Buffer]) -> None:
        self.correlation_id: CorrelationId = correlation_id
        self.request: Request[R] = request
        self.name: str = name
        self.frames: list[Buffer] = frames
        self.state: InFlightState = InFlightState.WAITING
        self._reply: R | None = None
        self._error: RemoteProtocolError | None = None

    def settle(self, dialect: Dialect, frames: Frames) -> None:
        """Takes the answer, right or wrong."""
        try:
            self._reply = decode_reply(dialect, self.request, frames)
        except RemoteProtocolError as error:
            self._error = error
        self.state = InFlightState.SETTLED

    @property
    def settled(self) -> bool:
        """Whether an answer has come."""
        return self.state is InFlightState.SETTLED

    def reply(self) -> R:
        """The reply; raises the RemoteProtocolError that it was. Illegal before it is settled."""
        if self._error is not None:
            raise self._error
        if self._reply is None:
            raise LocalProtocolError(f"{self.name}: asked for a reply that has not come")
        return self._reply

    @override
    def __repr__(self) -> str:
        return f"<InFlight {self.name} {self.correlation_id} {self.state.name}>"


@attrs.frozen(eq=False, repr=False)
class Answered:
    """The answer to an entry that waits."""

    entry: InFlight[Any]


@attrs.frozen(eq=False, repr=False)
class AnsweredLate:
    """The answer to an entry that was abandoned."""

    entry: InFlight[Any]


class Exchange:
    """The in-flight table of one connection. Ids count up and are never used twice."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._next_id = 0
        self._entries: dict[CorrelationId, InFlight[Any]] = {}

    def send(self, request: Request[R]) -> InFlight[R]:
        """Enters a request; the caller sends its frames."""
        correlation_id = CorrelationId(self._next_id)
        name = self.dialect.rule_for(request).name
        entry = InFlight(correlation_id, request, name, encode_request(self.dialect, correlation_id, request))
        self._next_id += 1
        self._entries[correlation_id] = entry
        return entry

    def receive(self, frames: Frames) -> Answered | AnsweredLate:
        """Settles the entry that these frames answer."""
        correlation_id = decode_correlation_id(frames)
        entry = self._entries.pop(correlation_id, None)
        if entry is None:
            raise RemoteProtocolError(
                f"reply.uid: nobody asked, or it was answered: {correlation_id}", path="reply.uid"
            )
        late = entry.state is InFlightState.ABANDONED
        entry.settle(self.dialect, frames)
        return AnsweredLate(entry) if late else Answered(entry)

    def abandon(self, entry: InFlight[Any]) -> None:
        """Marks that nobody waits any more; a late answer will be reported as such."""
        if entry.state is InFlightState.WAITING:
            entry.state = InFlightState.ABANDONED

    def withdraw(self, entry: InFlight[Any]) -> None:
        """Takes an entry out whose frames never left."""
        self._entries.pop(entry.correlation_id, None)

    @property
    def num_in_flight(self) -> int:
        """Entries without an answer, abandoned ones included."""
        return len(self._entries)

    @override
    def __repr__(self) -> str:
        return f"<Exchange {self.dialect.release} {self.num_in_flight} in flight>"
