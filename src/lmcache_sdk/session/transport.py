"""The seam that tests replace: what moves frames and knows no meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache_sdk.protocol import Buffer
from lmcache_sdk.session.deadline import Deadline


class Transport(Protocol):
    """Moves the frames of whole messages. Used by one thread at a time."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queues one message; raises ConnectionLostError when there is no connection any more."""

    def receive(self, deadline: Deadline, *, interruptible: bool = True) -> list[Buffer] | None:
        """The next message, or None when the deadline passed first.

        Raises ConnectionLostError when the peer went away, ConnectError when it was never there, SessionClosedError
        when the session is being closed and the wait is interruptible (clean-up is not).
        """

    def close(self, linger: float = 0.0) -> None:
        """Frees the socket; what was sent may still go out for `linger` seconds. Twice does no harm."""
