"""The controller of one pair: clients at work, and what happens to them and to their server.

Contract: `Scene` starts what it needs, `play` runs the traffic with faults for the given seconds and then a while
without, `stop` leaves the server running with nobody on it. What happens, and when, comes from the seed alone; how
far the clients have got by then does not.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.integration.servers import Held, Transport
from tests.soak.hosts import Clients, SoakEngine, SoakServer
from tests.soak.plan import PROCESSES, RECONNECTING, SURVIVORS, Orders

FAULTS: Final = {"freeze": 5, "kill-client": 6, "restart": 1}
"""What may happen, and how often in a bag of twelve."""
_PAUSE: Final = (0.5, 2.5)
_FREEZE: Final = (1.0, 4.0)
_DOWN: Final = (0.0, 1.0)
_TIMEOUT: Final = (2.0, 5.0)
_FINISH_SECONDS: Final = 20.0


@dataclass
class Happened:
    """What the controller did and saw."""

    faults: Counter[str] = field(default_factory=Counter)
    began: float = 0.0
    calm: float = 0.0
    """When the last fault was over; like all times here, of the monotonic clock."""
    down: float = 0.0
    """Seconds without a server that has an engine."""
    ended: float = 0.0
    unexpected: list[str] = field(default_factory=list)
    at_stop: Held | None = None


def quiet_seconds(seconds: float) -> float:
    """How long the traffic goes on after the last fault."""
    return min(15.0, max(5.0, seconds / 8))


class Scene:
    """One pair of release and transport."""

    def __init__(
        self, release: str, transport: Transport, seed: str, faults: Sequence[str], clients: Clients, folder: Path
    ) -> None:
        self.name = f"{release}-{transport}"
        self.folder = folder
        self.happened = Happened()
        self.server = SoakServer(release, transport, folder)
        self._seed = seed
        self._rng = random.Random(f"{seed}/{self.name}")
        self._clients = clients
        self._running: dict[int, int] = {}
        """Process ids by place; the first places survive."""
        self._generations: Counter[int] = Counter()
        self._faults = faults
        self._bag = [fault for fault in ("restart", "kill-client", "freeze") if fault in faults]
        self._engine: SoakEngine | None = None

    # ---- the actors -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Server, engine, clients."""
        self.server.start()
        self._engine = SoakEngine(self.server)
        self._engine.register()
        for place in range(PROCESSES):
            self._spawn(place)

    def _spawn(self, place: int) -> None:
        self._generations[place] += 1
        name = f"client-{place}-{self._generations[place]}"
        rng = random.Random(f"{self._seed}/{self.name}/{name}")
        self._running[place] = self._clients.spawn(
            Orders(
                name=name,
                url=self.server.url,
                http_url=self.server.http_url,
                transport=self.server.transport,
                seed=rng.randrange(2**31),
                timeout=round(rng.uniform(*_TIMEOUT), 2),
                # the second place and the last ones reconnect
                reconnects=place == SURVIVORS - 1 or place > PROCESSES - RECONNECTING,
                measures=place < SURVIVORS,
                report=str(self.folder / f"{name}.jsonl"),
                log=str(self.folder / f"{name}.log"),
            )
        )

    # ---- what happens -----------------------------------------------------------------------------------------------

    def play(self, seconds: float) -> None:
        """Faults, then calm. The time that a server takes to start does not count."""
        happened = self.happened
        happened.began = time.monotonic()
        while time.monotonic() - happened.began - happened.down < seconds - quiet_seconds(seconds):
            self._rest(self._rng.uniform(*_PAUSE))
            if self._faults:
                fault = self._next_fault()
                getattr(self, "_" + fault.replace("-", "_"))()
                happened.faults[fault] += 1
        happened.calm = time.monotonic()
        self._rest(quiet_seconds(seconds))
        happened.ended = time.monotonic()

    def _next_fault(self) -> str:
        """From a shuffled bag, so that no kind is forgotten for long; a run begins with one of each."""
        if not self._bag:
            self._bag = [fault for fault in self._faults for _ in range(FAULTS[fault])]
            self._rng.shuffle(self._bag)
        return self._bag.pop()

    def _rest(self, seconds: float) -> None:
        """Lets the clients work, and looks after them."""
        end = time.monotonic() + seconds
        while True:
            for pid, status in self._clients.ended_by_themselves().items():
                place = next((place for place, running in self._running.items() if running == pid), None)
                if place is not None:
                    self.happened.unexpected.append(f"the client of place {place} ended by itself with {status}")
                    self._spawn(place)
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.5, left))

    def _freeze(self) -> None:
        seconds = self._rng.uniform(*_FREEZE)
        self.server.freeze()
        try:
            if (
                "kill-client" in self._faults and self._rng.random() < 0.5
            ):  # it dies while its requests wait in the frozen server
                time.sleep(seconds / 2)
                self._kill_client()
                self.happened.faults["kill-client of a frozen server"] += 1
                time.sleep(seconds / 2)
            else:
                time.sleep(seconds)
        finally:
            self.server.thaw()

    def _kill_client(self) -> None:
        place = self._rng.randrange(SURVIVORS, PROCESSES)
        status = self._clients.kill(self._running[place])
        if status != -9:
            self.happened.unexpected.append(f"the client of place {place} had ended by itself with {status}")
        self._spawn(place)

    def _restart(self) -> None:
        if self._rng.random() < 0.3:
            self.server.freeze()
            time.sleep(self._rng.uniform(*_DOWN))
        self.server.kill()
        began = time.monotonic()
        time.sleep(self._rng.uniform(*_DOWN))
        self.server.start()
        assert self._engine is not None
        self._engine.register()
        self.happened.down += time.monotonic() - began

    # ---- the end ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The clients close and end, the engine too; the server stays."""
        statuses = self._clients.finish(self._running.values(), _FINISH_SECONDS)
        for place, pid in self._running.items():
            if statuses.get(pid) != 0:
                self.happened.unexpected.append(f"the client of place {place} ended with {statuses.get(pid)}")
        self._running.clear()
        self.happened.at_stop = self.server.held()
        self.stop_engine()

    def stop_engine(self) -> None:
        """Ends the engine; twice does no harm."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def abandon(self) -> None:
        """Ends everything, whatever state it is in."""
        try:
            if self._running:
                self._clients.finish(self._running.values(), 0.0)
                self._running.clear()
        finally:
            self.stop_engine()
            self.server.stop()
