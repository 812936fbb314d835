"""The connection of a context, and what to do when it has gone bad.

`Link.call` runs one call on the current connection. When the server went away, was restarted, or has forgotten this
instance, it connects again as `connect` did (release, configuration, status, a new instance id, a new mapping, the
proof) and tries the call once more inside its deadline: lookups and retrieves always, stores only when nothing of the
first try can still happen. A server that came back as another one (chunk size, layout, release) is a
`LayoutChangedError`. Timeouts get their likely cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from lmcache_sdk.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    Fate,
    KVCacheSDKError,
    LayoutChangedError,
    NotRegisteredError,
    SessionClosedError,
)
from lmcache_sdk.facade.connecting import ConnectArguments, Connection, explained, open_connection, with_layout
from lmcache_sdk.protocol import registered_models
from lmcache_sdk.session import Deadline, OwnProcess, Renewable, Session

R = TypeVar("R")
_log = logging.getLogger("lmcache_sdk.facade")


class Link:
    """See the module. Thread-safe."""

    def __init__(self, arguments: ConnectArguments, connection: Connection) -> None:
        self._arguments = arguments
        self._connection = Renewable(connection)
        self._opening: Session | None = None
        self._process = OwnProcess()
        self.closed: bool = False
        """Whether the caller closed the context; nothing is connected again after that."""
        self._held: dict[object, Callable[[], None]] = {}
        """What outlives its call (an open view), and what gives it back. Kept here and not by who uses it: the garbage
        collector takes things that fall together apart in any order, a socket before the view that needs it.
        """

    def hold(self, what: object, release: Callable[[], None]) -> None:
        """Keeps `what` until it is let go; SessionClosedError when the context was closed meanwhile."""
        self._held[what] = release
        if self.closed:  # `close` may have looked before
            self.let_go(what)
            self.check_open()

    def let_go(self, what: object) -> None:
        """Gives `what` back; whoever is first does it. Not in a forked child, whose parent still uses the sockets."""
        if self.in_own_process and (release := self._held.pop(what, None)) is not None:
            release()

    @property
    def in_own_process(self) -> bool:
        """Whether this is not a forked child of the process that made the connection."""
        return self._process.here

    def _let_all_go(self) -> None:
        for what in list(self._held):
            try:
                self.let_go(what)
            except KVCacheSDKError as error:
                _log.debug("close: %r was not given back: %s", what, str(error))

    def close(self) -> None:
        """Closes the connection, and one that is being made."""
        self.closed = True
        self._let_all_go()
        opening = self._opening
        if opening is not None:
            opening.close()
        self.current.endpoint.session.close()
        self._close_buffers()

    def abandon(self) -> None:
        """For a context that was dropped: frees what this process holds. It waits for nobody but, for a moment, for the
        locks of a view that was dropped with it.
        """
        self._let_all_go()
        self.current.endpoint.session.abandon()
        self._close_buffers()

    def _close_buffers(self) -> None:
        if self.in_own_process:  # a thread that is not in a forked child may hold their lock
            self._arguments.buffers.close()

    def check_open(self) -> None:
        """Raises SessionClosedError when the context is closed or belongs to another process."""
        if self.closed:
            raise SessionClosedError("this context is closed; call connect() for a new one")
        self.current.endpoint.session.check_process()

    @property
    def current(self) -> Connection:
        """The connection that is good now, as far as anybody knows."""
        return self._connection.current

    def replace(self, old: Connection, new: Connection, deadline: Deadline) -> None:
        """Puts `new` in the place of `old`, unless somebody replaced it already."""
        self._connection.renew(old, lambda _: new, deadline, "retrieve")

    def call(self, step: str, deadline: Deadline, body: Callable[[Connection], R], *, idempotent: bool) -> R:
        """Runs `body`; see the module."""
        _log.debug("%s started", step)
        try:
            answer = self._call(step, deadline, body, idempotent=idempotent)
        except BaseException as error:
            _log.debug("%s failed: %s", step, type(error).__name__)
            if isinstance(error, DeadlineExceededError):
                connection = self.current
                raise explained(error, connection.probe, connection.endpoint.identity.instance_id) from error
            raise
        _log.debug("%s complete", step)
        return answer

    def _call(self, step: str, deadline: Deadline, body: Callable[[Connection], R], *, idempotent: bool) -> R:
        connection = self.current
        try:
            return body(connection)
        except ConnectionLostError as error:
            fresh = self._connect_again(connection, step, deadline, error)
            if not idempotent and error.fate is not Fate.NOT_SENT and _still_knows(fresh, connection):
                # the first try may only be late: a second PREPARE of the same tokens must not be sent
                raise
            return body(fresh)

    def _note_opening(self, session: Session) -> None:
        self._opening = session
        self.check_open()

    def _connect_again(self, bad: Connection, step: str, deadline: Deadline, cause: ConnectionLostError) -> Connection:
        def make(old: Connection) -> Connection:
            self.check_open()
            try:
                fresh = open_connection(self._arguments, deadline, self._note_opening)
            finally:
                self._opening = None
            try:
                self.check_open()  # close() may have come in between, and did not know the new session yet
                _check_same(old, fresh)
                if fresh.model.layout is None and old.model.layout is not None:  # learned from an object before
                    fresh = with_layout(fresh, old.model.layout, deadline)
            except BaseException:
                fresh.endpoint.session.close()
                raise
            old.endpoint.session.retire()
            return fresh

        try:
            fresh = self._connection.renew(bad, make, deadline, step)
            if self.closed:
                fresh.endpoint.session.close()
            return fresh
        except KVCacheSDKError as error:
            if isinstance(error, (LayoutChangedError, NotRegisteredError, SessionClosedError)):
                raise
            raise ConnectionLostError(f"{cause}; connecting again failed: {error}", fate=cause.fate) from error


def check_registered(connection: Connection, step: str, deadline: Deadline) -> None:
    """Raises NotRegisteredError when no instance holds the model: a lookup answers 0 then, cached or not.

    The status is asked for after the lookup that answered 0 (PROTOCOL.md section 5).
    """
    probe = connection.probe
    model_name = connection.endpoint.identity.model_name
    known = registered_models(probe.status(deadline))
    if model_name not in known:
        raise NotRegisteredError(
            f"{step}: no engine holds {model_name!r} any more (registered: {', '.join(map(repr, known)) or 'none'}), "
            "so the server finds nothing of it, cached or not",
            registered_models=known,
        )


def _still_knows(fresh: Connection, old: Connection) -> bool:
    """Whether the server that we are connected to now still holds the old instance: the same process, then."""
    known = fresh.facts.status.registered_non_cuda_instance_ids or ()
    return old.endpoint.identity.instance_id in known


def _check_same(old: Connection, fresh: Connection) -> None:
    for what, before, after in (
        ("release", old.facts.dialect.release, fresh.facts.dialect.release),
        ("chunk size", str(old.facts.chunk_size), str(fresh.facts.chunk_size)),
        ("layout", _published(old), _published(fresh)),
    ):
        if before != after:
            raise LayoutChangedError(
                f"the server came back with another {what}: {before} before, {after} now; call connect() again",
                before=before,
                after=after,
            )


def _published(connection: Connection) -> str:
    layout = connection.model.published
    return "not published" if layout is None else layout.describe()
