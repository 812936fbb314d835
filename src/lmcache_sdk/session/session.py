"""Opens everything that talks to one server, in order, and closes it in reverse.

A `Session` owns the ZeroMQ context, the pool of channels, the registration, the mapping of the server's pool and the
wake pipe. `operation` is the only way to do a call: it checks that the session is open and belongs to this process,
holds the key's gate, lends a channel, and ends the server's session. `close` is idempotent and bounded: it wakes the
calls that wait (they fail with `SessionClosedError` and give back what they hold), finishes open reservations, and
unregisters only when none is left: the server publishes the slots of an instance that unregisters with a reservation
open (PROTOCOL.md section 6).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Hashable, Iterator
from typing import Final

from lmcache_sdk.errors import ConnectionLostError, Fate, KVCacheSDKError, SessionClosedError
from lmcache_sdk.protocol import Dialect, Registered, Unregister
from lmcache_sdk.session import registration
from lmcache_sdk.session.addresses import Addresses
from lmcache_sdk.session.channel import Channel, ChannelPool
from lmcache_sdk.session.deadline import Deadline, boot_time
from lmcache_sdk.session.debts import DebtBook
from lmcache_sdk.session.gate import KeyGate
from lmcache_sdk.session.interrupts import deferred
from lmcache_sdk.session.operation import CLEANUP_SECONDS, Identity, Operation, Probe
from lmcache_sdk.session.process import OwnProcess
from lmcache_sdk.session.shared_memory import SharedPool
from lmcache_sdk.session.states import Event, SessionState, session_machine
from lmcache_sdk.session.zmq_transport import new_context, open_dealer
from lmcache_sdk.values import InstanceId, TokenIds, override

_log = logging.getLogger("lmcache_sdk.session")

CLOSE_SECONDS: Final = 1.2
"""The budget of close for calls in flight and for what earlier calls owe; UNREGISTER has CLEANUP_SECONDS of its own."""
_ABANDON_LINGER: Final = 0.1
_ANSWER_SECONDS: Final = 0.2
"""What close gives to answers that nobody waited for; some never come."""
_DEBT_SECONDS: Final = 0.05
"""What a call gives to the debts of earlier ones: enough for a server that answers again."""


class Session:
    """See the module. Thread-safe."""

    def __init__(self, addresses: Addresses, dialect: Dialect) -> None:
        self.addresses: Addresses = addresses
        self.dialect: Dialect = dialect
        self.pool: SharedPool | None = None
        """The server's pool, mapped here; None when tensors travel inline."""
        self._process = OwnProcess()
        self._machine = session_machine()
        self._changed = threading.Condition()
        self._gate = KeyGate(self._changed, self.check_open)
        self._active = 0
        self._instances: dict[InstanceId, tuple[str, registration.RegisteredShape]] = {}
        self._debts = DebtBook(self._changed, self._take_back)
        self.probe: Probe | None = None
        """Asks the server over HTTP; None while there is nobody to ask."""
        self.grace: float | None = None
        """Seconds after which the server forgets a silent instance; None when it does not say."""
        self.in_order: bool = False
        """Whether the server handles lookups in the order in which they were sent."""
        self._wake_read, self._wake_write = os.pipe()
        self._context = new_context()
        self._channels = ChannelPool(self._connect, self._note_loss)
        self._lost = False
        self._tainted = False
        """Slots of ours may be reserved and can no longer be completed: UNREGISTER would publish them."""
        self._last_transfer = boot_time()
        self._retired = False
        self._released = False

    def _connect(self, deadline: Deadline, step: str) -> Channel:
        interruptible = self._machine.state in (SessionState.OPENING, SessionState.OPEN)
        url = self.addresses.url
        transport = open_dealer(self._context, url, self._wake_read, deadline, step, interruptible=interruptible)
        return Channel(self.dialect, transport)

    # ---- opening ----------------------------------------------------------------------------------------------------

    def register(
        self, model_name: str, shape: registration.RegisteredShape, deadline: Deadline
    ) -> tuple[InstanceId, Registered]:
        """Registers a new instance under `model_name`; `close` unregisters it."""
        instance_id = registration.new_instance_id()
        with self._entered(), self._channels.borrow(deadline, "connect") as channel:
            # remembered before it is sent: an answer that comes too late must be unregistered all the same
            self._instances[instance_id] = (model_name, shape)
            reply = registration.register(channel, instance_id, model_name, shape, deadline, "connect")
        return instance_id, reply

    def unregister(self, instance_id: InstanceId, deadline: Deadline) -> None:
        """Unregisters one instance now."""
        with self._entered():
            self._settle_channels(deadline)
        with self._entered(), self._channels.borrow(deadline, "connect") as channel:
            registration.unregister(channel, instance_id, deadline, "connect")
            del self._instances[instance_id]

    def map_pool(self, registered: Registered) -> None:
        """Maps the pool that a registration named, if it named one."""
        if registered.shm_name:
            self.pool = SharedPool(registered.shm_name, registered.pool_size)

    def opened(self) -> None:
        """Everything is there; calls may begin."""
        with self._changed:
            self._machine.record(Event.OPENED)

    # ---- calls ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def operation(
        self, name: str, identity: Identity, tokens: TokenIds, cache_salt: str, deadline: Deadline, *, exclusive: bool
    ) -> Iterator[Operation]:
        """One call. `exclusive` calls on the same tokens and salt come one after the other."""
        key = (tokens, cache_salt, identity.model_name)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._entered())
            if self._lost:
                raise ConnectionLostError(
                    f"{name}: the connection to {self.addresses.url} was lost", fate=Fate.NOT_SENT
                )
            if len(self._debts):
                self._debts.settle(Deadline.after(_DEBT_SECONDS))
            if exclusive:
                stack.enter_context(self._gate.hold(key, deadline, name))
                self._debts.settle_key(key, deadline, name)
            channel = stack.enter_context(self._channels.borrow(deadline, name))
            if exclusive:
                self._keep_alive(channel, identity.instance_id, deadline, name)
            made = Operation(name, channel, identity, tokens, cache_salt, deadline, self.probe, in_order=self.in_order)
            try:
                yield made
            finally:
                self._finish(made, key)

    def _finish(self, operation: Operation, key: Hashable) -> None:
        """Ends an operation within the clean-up budget, or keeps it as a debt with its channel.

        Does nothing in a forked child, where an open view of the parent's may be left, too.
        """
        if not self._process.here:
            return
        finished = False
        try:
            finished = operation.finish(Deadline.after(CLEANUP_SECONDS))
        finally:
            if not finished and operation.owing:
                operation.channel.kept = True
                self._debts.add(key, operation)
            self._tainted = self._tainted or (operation.forbids_unregister and operation.channel.broken)

    def _keep_alive(self, channel: Channel, instance_id: InstanceId, deadline: Deadline, step: str) -> None:
        """Registers the same instance again when it was idle for long: no heartbeat, and no PING, which would shorten
        the reaper's patience below the write TTL (PROTOCOL.md section 7, FAULTS.md 7.2).
        """
        idle = boot_time() - self._last_transfer
        self._last_transfer = boot_time()
        known = self._instances.get(instance_id)
        if known is None or self.grace is None or idle < self.grace / 4:
            return
        reply = registration.register(channel, instance_id, *known, deadline, step)
        mapped = ("", 0) if self.pool is None else (self.pool.name, self.pool.size)
        if (reply.shm_name, reply.pool_size) != mapped:
            self._lost = True
            raise ConnectionLostError(
                f"{step}: the server has another pool than the one mapped here", fate=Fate.NOT_SENT
            )

    def _note_loss(self) -> None:
        self._lost = True

    def _take_back(self, operation: Operation) -> None:
        """The channel of an operation that owes nothing any more, or whose answers can never come."""
        self._tainted = self._tainted or operation.forbids_unregister
        operation.channel.kept = False
        self._channels.give_back(operation.channel)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with deferred(), self._counted():
            yield

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            self.check_open()
            self._active += 1
        try:
            yield
        except SessionClosedError as error:
            if self._retired:
                raise _replaced(error.fate) from error
            raise
        finally:
            if self._process.here:
                self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._active -= 1
            self._changed.notify_all()
            last = self._active == 0 and self._machine.state is SessionState.CLOSED
        if last:
            self._release()

    def pause(self, seconds: float) -> None:
        """Waits a moment; a close of the session ends it with SessionClosedError."""
        deadline = Deadline.after(seconds)
        with self._changed:
            while not deadline.passed:
                self.check_open()
                self._changed.wait(deadline.remaining())

    def check_process(self) -> None:
        """Raises SessionClosedError in another process than the one that opened it."""
        if not self._process.here:
            raise SessionClosedError(
                f"this context belongs to process {self._process.pid}, and this is its forked child {os.getpid()}: a "
                "connection cannot be shared across a fork; call connect() in the child"
            )

    def check_open(self) -> None:
        """Raises SessionClosedError when it is closed or belongs to another process, ConnectionLostError when it was
        retired.
        """
        self.check_process()
        if self._machine.state in (SessionState.CLOSING, SessionState.CLOSED):
            if self._retired:
                raise _replaced(Fate.NOT_SENT)
            raise SessionClosedError("this context is closed; call connect() for a new one")

    @property
    def closed(self) -> bool:
        """Whether close was asked for."""
        return self._machine.state in (SessionState.CLOSING, SessionState.CLOSED)

    # ---- closing ----------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Closes it because another session takes its place: to the calls in it that is a loss, not a close."""
        self._retired = True
        self.close()

    def close(self) -> None:
        """Gives everything back; see the module. In a forked child it only forgets."""
        if not self._process.here:
            return
        with self._changed:
            first = not self.closed
            self._machine.record(Event.CLOSE_ASKED)
            if not first:
                return
            self._changed.notify_all()
        with deferred():
            self._close()

    def _close(self) -> None:
        os.write(self._wake_write, b"!")
        deadline = Deadline.after(CLOSE_SECONDS)
        with self._changed:
            idle = self._changed.wait_for(lambda: self._active == 0, deadline.remaining())
        try:
            settled = idle and self._debts.settle(deadline)
            self._settle_channels(deadline)
            if settled and not self._tainted:
                self._unregister_all(Deadline.after(CLEANUP_SECONDS))
        finally:
            with self._changed:
                self._machine.record(Event.EVERYTHING_RETURNED)
                last = self._active == 0
            if last:
                self._release()  # otherwise the last call does it on its way out

    def _settle_channels(self, deadline: Deadline) -> None:
        # the END_SESSION of a call must be handled before the UNREGISTER of its model
        self._channels.settle(deadline.capped(_ANSWER_SECONDS))

    def _unregister_all(self, deadline: Deadline) -> None:
        for instance_id in list(self._instances):
            try:
                with self._channels.borrow(deadline, "close") as channel:
                    registration.unregister(channel, instance_id, deadline, "close")
                del self._instances[instance_id]
            except KVCacheSDKError as error:
                _log.debug("close: UNREGISTER was not answered: %s", str(error))
                return

    def _release(self) -> None:
        """Frees what this process holds. Runs once."""
        with self._changed:
            released, self._released = self._released, True
        if released:
            return
        self._say_last_words(self._debts.give_up())
        if self.probe is not None:
            self.probe.close()
        self._channels.close()
        self._context.term()
        if self.pool is not None:
            self.pool.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _say_last_words(self, owing: list[Operation]) -> None:
        """What can be sent, unanswered, for operations that the server has not let us finish; and UNREGISTER behind it,
        unless one of them has slots that it would publish.
        """
        leaving = not self._tainted and not any(operation.forbids_unregister for operation in owing)
        for position, operation in enumerate(owing):
            operation.give_up()
            if leaving and position + 1 == len(owing):
                with contextlib.suppress(KVCacheSDKError):
                    for instance_id in self._instances:
                        operation.channel.submit(Unregister(instance_id=instance_id))
            operation.channel.close(_ABANDON_LINGER)

    def abandon(self) -> None:
        """For a context that was dropped without close: one UNREGISTER that nobody waits for, then everything is
        freed.
        """
        if not self._process.here or self.closed:
            return
        with self._changed:
            self._machine.record(Event.CLOSE_ASKED)
            self._machine.record(Event.EVERYTHING_RETURNED)
            busy = self._active > 0
        if busy:
            os.write(self._wake_write, b"!")
            return
        if not self._debts and not self._tainted:
            self._channels.say_goodbye(list(self._instances), _ABANDON_LINGER)
        self._release()

    @override
    def __repr__(self) -> str:
        return f"<Session {self.addresses.url} {self._machine.state.name} {self._active} active>"


def _replaced(fate: Fate) -> ConnectionLostError:
    return ConnectionLostError("the connection was lost, and another call has made a new one", fate=fate)
