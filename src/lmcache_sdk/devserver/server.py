"""DevServer: the whole server in this process, as a context manager.

Leaving the block ends every thread, socket and mapping within a bounded time; the shared-memory file goes too. What a
test needs besides clients is here: the numbers a server holds, its clock, a way to make it silent, to end locks, to
evict, to play engines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

from lmcache_sdk.devserver import status
from lmcache_sdk.devserver.clocks import Clock
from lmcache_sdk.devserver.core import Core, Held
from lmcache_sdk.devserver.engines import PlayedEngine
from lmcache_sdk.devserver.http_port import HttpPort
from lmcache_sdk.devserver.settings import DEFAULT_L1_NBYTES, Settings, TransferMode
from lmcache_sdk.devserver.wire import JOIN_TIMEOUT, Gate, Intercept, MessagePort
from lmcache_sdk.errors import UsageError
from lmcache_sdk.values import override

_log = logging.getLogger("lmcache_sdk.devserver")

SWEEP_INTERVAL: Final = 60.0
"""Seconds between two looks at the sessions' ages."""
_TICK: Final = 0.05


class DevServer:
    """An imitation of the LMCache multiprocess server, on CPU, in this process; a context manager.

    Args:
        models: engines that are played from the start.
        speak: the release whose wire and behaviour it has.
        host: where both ports are.
        port: the message port; 0 takes a free one.
        http_port: the HTTP port; 0 takes a free one.
        shm_name: a name makes a shared-memory pool, "" an inline server, None what the release does by default.
        chunk_size: tokens per chunk.
        l1_size_bytes: size of the pool.
        supported_transfer_mode: what the real server's flag of that name takes.
        read_ttl: seconds after which read locks end.
        write_ttl: seconds after which write reservations end.
        session_ttl: seconds after which sessions end.
        reap: patience, in seconds, with an instance that has pinged; 0 reaps nobody.
        grace: patience with an instance that never pinged.
        eviction_interval: seconds between two looks at how full the pool is.
        eviction_watermark: how full it must be for somebody to go.
        eviction_ratio: which part of the objects goes then.
        api_key: guards HTTP (0.5.7).
        clock: gives the time in seconds; tests give a `ManualClock`.
    """

    def __init__(
        self,
        *,
        models: Iterable[PlayedEngine] = (),
        speak: str = "0.5.6",
        host: str = "127.0.0.1",
        port: int = 0,
        http_port: int = 0,
        shm_name: str | None = "",
        chunk_size: int = 256,
        l1_size_bytes: int = DEFAULT_L1_NBYTES,
        supported_transfer_mode: TransferMode = "auto",
        read_ttl: float = 300.0,
        write_ttl: float = 600.0,
        session_ttl: float = 600.0,
        reap: float = 120.0,
        grace: float = 3600.0,
        eviction_interval: float = 0.25,
        eviction_watermark: float = 0.8,
        eviction_ratio: float = 0.2,
        api_key: str | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.settings: Settings = Settings(
            speak=speak,
            host=host,
            port=port,
            http_port=http_port,
            shm_name=shm_name,
            chunk_size=chunk_size,
            l1_size_bytes=l1_size_bytes,
            supported_transfer_mode=supported_transfer_mode,
            read_ttl=read_ttl,
            write_ttl=write_ttl,
            session_ttl=session_ttl,
            reap=reap,
            grace=grace,
            eviction_interval=eviction_interval,
            eviction_watermark=eviction_watermark,
            eviction_ratio=eviction_ratio,
            api_key=api_key,
            clock=clock,
        )
        self._models = tuple(models)
        self._gate = Gate()
        self._resources = ExitStack()
        self._core: Core | None = None
        self._port: MessagePort | None = None
        self._http: HttpPort | None = None
        self._stopping = threading.Event()
        self._last_sweep = 0.0
        self._last_reap = 0.0

    # ---- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Makes the pool, binds both ports, starts the threads."""
        if self._core is not None:
            raise UsageError("a DevServer starts once; make another")
        with ExitStack() as stack:
            core = Core(self.settings)
            stack.callback(core.close)
            port = MessagePort(core, self._gate)
            stack.callback(port.close)
            split = urlsplit(port.url)
            http = HttpPort(core, self._gate, (split.hostname or self.settings.host, split.port or 0))
            stack.callback(http.close)
            self._core, self._port, self._http = core, port, http
            self._last_sweep = self._last_reap = self.settings.clock()
            for model in self._models:
                self.register_engine(model)
            port.start()
            http.start()
            upkeep = threading.Thread(target=self._run_upkeep, name="devserver-upkeep", daemon=True)
            upkeep.start()
            stack.callback(upkeep.join, JOIN_TIMEOUT)
            stack.callback(self._stopping.set)
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Ends everything; more than once does no harm."""
        self._resources.close()

    def __enter__(self) -> DevServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _started(self) -> tuple[Core, MessagePort, HttpPort]:
        if self._core is None or self._port is None or self._http is None:
            raise UsageError("the DevServer is not started")
        return self._core, self._port, self._http

    # ---- addresses and numbers ---------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it takes messages."""
        return self._started[1].url

    @property
    def http_url(self) -> str:
        """Where it takes HTTP."""
        return self._started[2].url

    @property
    def shm_name(self) -> str:
        """The name of its shared-memory file; "" on an inline server."""
        return self._started[0].pool.shm_name

    def status(self) -> dict[str, object]:
        """What GET /status gives."""
        return status.status(self._started[0])

    def held(self) -> Held:
        """What it holds on behalf of its clients."""
        core = self._started[0]
        with core.lock:
            return core.held()

    def leases(self) -> int:
        """How many read locks it holds, all objects together."""
        return self.held().read_locks

    def locks(self) -> int:
        """How many write reservations it holds."""
        return self.held().write_reservations

    @property
    def counters(self) -> Counter[str]:
        """Requests by name since the start; "refused" were met with silence as they should, "crashed" is a bug."""
        return self._started[1].counters

    @property
    def message_thread_ended(self) -> bool:
        """Whether a client has ended the message thread, which HTTP does not show."""
        return self._started[1].dead

    # ---- what tests do to it -----------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stops answering on both ports, as a stopped process does; requests are kept."""
        self._started[1].park()

    def resume(self) -> None:
        """Answers again, first what came meanwhile."""
        self._gate.open()
        self._started[1].wake()

    def intercept(self, decide: Intercept | None) -> None:
        """Lets `decide` say of each request whether it is handled and whether it is answered; None ends that."""
        self._started[1].intercept = decide

    def tick(self) -> None:
        """Does now what the background does in time: sweeps sessions, reaps instances, evicts."""
        core = self._started[0]
        with core.lock:
            if core.behaviour.sessions_expire:
                core.sessions.sweep()
            if core.instances.reap > 0:
                core.reap()
            core.evict()

    def expire_ttls(self) -> None:
        """Ends every read lock and write reservation, as if their time had passed."""
        core = self._started[0]
        with core.lock:
            core.objects.expire_locks()

    def evict_run(self) -> int:
        """One look of the eviction, which does something above the watermark; how many objects went."""
        core = self._started[0]
        with core.lock:
            return core.evict()

    def evict_all(self, *, keep: int = 0) -> int:
        """Evicts everything that is not locked, but for the `keep` most recently used; how many objects went."""
        core = self._started[0]
        with core.lock:
            return core.objects.evict(max(0, core.objects.num_evictable_by_age - keep))

    def register_engine(self, engine: PlayedEngine) -> int:
        """Plays one more engine; the id under which /status shows it."""
        core = self._started[0]
        with core.lock:
            return core.play(engine)

    def drop_engine(self, model_name: str) -> None:
        """Ends the playing of every engine of a model."""
        core = self._started[0]
        with core.lock:
            core.stop_playing(model_name)

    # ---- upkeep ------------------------------------------------------------------------------------------------------

    def _run_upkeep(self) -> None:
        core = self._started[0]
        waited = 0.0
        while not self._stopping.wait(_TICK):
            if not self._gate.is_open:
                continue
            waited += _TICK
            with core.lock:
                self._look_at_clock(core)
                if waited >= self.settings.eviction_interval:
                    waited = 0.0
                    core.evict()

    def _look_at_clock(self, core: Core) -> None:
        now = self.settings.clock()
        if core.behaviour.sessions_expire and now - self._last_sweep >= SWEEP_INTERVAL:
            self._last_sweep = now
            core.sessions.sweep()
        if core.instances.reap > 0 and now - self._last_reap >= core.instances.reap / 4:
            self._last_reap = now
            core.reap()

    @override
    def __repr__(self) -> str:
        return f"<DevServer {self.settings.speak} {self._core.objects if self._core else 'not started'}>"
