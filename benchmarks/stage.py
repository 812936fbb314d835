"""What a row runs on: a real server, an engine that has registered the geometries, and one worker for each side.

Contract: leaving a `Stage` ends every process it started. The sides are ours, the official SDK and the straight-line
client. A fourth worker, `bare`, is ours on the model of nearly no bytes: what a call costs besides copying. `connected`
connects the sides to one model and leaves nothing of it behind, in the workers or in the server's cache, so rows do not
see each other.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

from tests.integration.make_env import PROJECT_ROOT, STABLE, venv_python
from tests.integration.processes import Child
from tests.integration.servers import Engine, EngineShape, RealServer, Transport, child_env

SideName: TypeAlias = Literal["ours", "official", "straight"]
Answer: TypeAlias = dict[str, Any]

RELEASE: Final = STABLE
POOL_GB: Final = 6
"""Room for seven pairs of stores of the largest tensor that is stored without clearing, below the eviction mark."""
_ORDER_TIMEOUT: Final = 300.0
_SAMPLE_SECONDS: Final = 0.0005


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A model, as its engine registers it and as a client sees it."""

    name: str
    engine: EngineShape

    @property
    def model(self) -> str:
        """The name it is registered under."""
        return f"bench/{self.name}"

    @property
    def official_stores(self) -> bool:
        """Whether the official SDK can store it: it wants a token axis where tensors of one plane have another, and
        slots without a plane axis where its `kv` has one.
        """
        return self.engine.layout != "MLA"

    def shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """`[plane, layer, token, hidden]`."""
        engine = self.engine
        if engine.layout == "MLA":
            return 1, engine.num_layers, num_tokens, engine.head_size
        return 2, engine.num_layers, num_tokens, engine.num_heads * engine.head_size

    def nbytes(self, num_tokens: int) -> int:
        """Of that tensor."""
        planes, layers, _, width = self.shape(num_tokens)
        return 2 * planes * layers * num_tokens * width


QWEN: Final = Geometry(
    name="Qwen3-8B", engine=EngineShape(num_layers=36, num_heads=8, head_size=128, num_blocks=2, layout="HND")
)
SMALL: Final = Geometry(name="small", engine=EngineShape(num_layers=4, num_heads=2, head_size=32, num_blocks=2))
MLA: Final = Geometry(name="MLA", engine=EngineShape(layout="MLA", num_layers=61, head_size=576, num_blocks=2))
# The same requests and nearly no bytes: what a call costs besides copying.
TINY: Final = Geometry(name="tiny", engine=EngineShape(num_layers=1, num_heads=1, head_size=8, num_blocks=2))
GEOMETRIES: Final[Mapping[str, Geometry]] = {geometry.name: geometry for geometry in (QWEN, SMALL, MLA)}


def worker_env(side: SideName) -> dict[str, str]:
    """A user's environment: torch may use every core, and lmcache's log costs nothing."""
    env = child_env(RELEASE)
    del env["OMP_NUM_THREADS"]
    env["LMCACHE_LOG_LEVEL"] = "ERROR"
    paths = [str(PROJECT_ROOT), env["PYTHONPATH"]] if side == "official" else [str(PROJECT_ROOT)]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def python_of(side: SideName) -> Path:
    """The interpreter that has the library."""
    return venv_python() if side == "official" else Path(sys.executable)


class OrderError(RuntimeError):
    """A worker could not do what it was told, or what came back was wrong."""


class Peer:
    """One worker process."""

    def __init__(self, side: SideName, folder: Path) -> None:
        self.side: SideName = side
        log = folder / f"{side}-{next(_numbers)}.log"
        command: list[str | Path] = [python_of(side), "-m", "benchmarks.worker", side]
        self._child = Child(f"worker {side}", command, worker_env(side), log, answers=True)

    def start(self) -> None:
        """Waits until its imports are done."""
        try:
            self._child.read_line(_ORDER_TIMEOUT)
        except BaseException:
            self.stop()
            raise

    def ask(self, do: str, **order: object) -> Answer:
        """Gives an order and waits for the answer; an OrderError when it is not as it should be."""
        self._child.send_line(json.dumps({"do": do, **order}))
        answer: Answer = json.loads(self._child.read_line(_ORDER_TIMEOUT))
        if problem := answer.get("error") or answer.get("wrong"):
            raise OrderError(f"{self.side}, {do}: {problem}")
        return answer

    def seconds(self, do: str, **order: object) -> float:
        """How long an order took."""
        return float(self.ask(do, **order)["seconds"])

    def watch(self, do: str, **order: object) -> int:
        """How many bytes its anonymous resident memory grew at the peak while it did what it was told.

        The peak is sampled from here, another process: a sampling thread inside would wait for the GIL when it
        matters. The kernel's high-water mark of all resident memory, less what the shared part grew, is a second lower
        bound of it and misses nothing between two samples where nothing is shared; the larger of the two counts.
        """
        self.ask("settle")
        pid = self._child.pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark starts again
        before = _memory(pid)
        samples = [before["RssAnon"]]
        done = threading.Event()

        def sample() -> None:
            while not done.is_set():
                samples.append(_memory(pid)["RssAnon"])
                time.sleep(_SAMPLE_SECONDS)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            self.ask(do, **order)
        finally:
            done.set()
            thread.join()
        after = _memory(pid)
        shared = sum(after[name] - before[name] for name in ("RssFile", "RssShmem"))
        marked = after["VmHWM"] - before["VmRSS"] - shared
        return max(max(samples) - before["RssAnon"], marked)

    def stop(self) -> None:
        """Ends it."""
        self._child.stop()


def _memory(pid: int) -> dict[str, int]:
    sizes = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes


class Stage:
    """See the module."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        self.transport: Transport = transport
        self._folder = folder
        self._server = RealServer(RELEASE, transport=transport, l1_size_gb=POOL_GB, log_dir=folder)
        self._stack = ExitStack()

    def __enter__(self) -> Stage:
        with ExitStack() as stack:
            stack.enter_context(self._server)
            models = {geometry.model: geometry.engine for geometry in (*GEOMETRIES.values(), TINY)}
            stack.enter_context(Engine(self._server, models))
            self.ours = stack.enter_context(self.fresh("ours"))
            self.official = stack.enter_context(self.fresh("official"))
            self.straight = stack.enter_context(self.fresh("straight"))
            self.bare = stack.enter_context(self.fresh("ours"))
            self.connect(self.bare, TINY)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def peers(self) -> tuple[Peer, Peer, Peer]:
        """The sides, ours first."""
        return self.ours, self.official, self.straight

    def storers(self, geometry: Geometry) -> tuple[Peer, ...]:
        """The sides whose stores are compared: without the official one nobody asks for the straight one."""
        return self.peers if geometry.official_stores else (self.ours,)

    @contextmanager
    def fresh(self, side: SideName) -> Iterator[Peer]:
        """A worker of its own, for what can be seen only once in a process."""
        peer = Peer(side, self._folder)
        peer.start()
        try:
            yield peer
        finally:
            peer.stop()

    def connect(self, peer: Peer, geometry: Geometry, recycle: int | None = None) -> float:
        """Connects a worker; how long it took."""
        server = self._server
        where = {"url": server.url, "http_url": server.http_url, "model": geometry.model}
        return peer.seconds("connect", **where, recycle=recycle)

    @contextmanager
    def connected(self, geometry: Geometry, *, kept: bool = False) -> Iterator[tuple[Peer, Peer, Peer]]:
        """The sides, connected to one model; `kept` when every result stays and the straight-line client must not put
        the next one into the same memory.
        """
        try:
            for peer in self.peers:
                self.connect(peer, geometry, 0 if kept and peer is self.straight else None)
            yield self.peers
        finally:
            for peer in self.peers:
                peer.ask("close")
            self.clear()

    def clear(self) -> None:
        """Empties the server's cache; what was in it keeps its pages, so the pool stays warm."""
        self._server.clear()


_numbers = count(1)
_seeds = count(1)


def new_seed(width: int = 1) -> int:
    """The seed of tokens that nobody has used on this server; the first of `width` of them."""
    first = next(_seeds)
    for _ in range(width - 1):
        next(_seeds)
    return first
