"""Real servers and engines for the tests, each a context manager around one process.

Contract: `RealServer` runs one release of the LMCache server on free ports of 127.0.0.1 and yields it healthy; on
leaving, the process is gone and so is its shared-memory segment. `Engine` registers a KV cache layout through
lmcache's own engine-side code, as a serving engine would, and with `blocks` stores from and retrieves into real paged
blocks. Both fail with the tail of the log. `.status()` is the JSON of the server, unjudged.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, TypeAlias
from uuid import uuid4

from .make_env import RELEASES, release_dir, venv_python
from .processes import Child, StartError, free_port, log_tail

Transport: TypeAlias = Literal["shm", "inline"]
Layout: TypeAlias = Literal["HND", "NHD", "FLASH", "MLA", "FUSED"]

HERE: Final = Path(__file__).resolve().parent
# Ten times what a quiet machine needs.
START_TIMEOUT: Final = 120.0
ENGINE_TIMEOUT: Final = 90.0
HTTP_TIMEOUT: Final = 10.0
# Named after the test process, so that a killed run's segments can be told from a living one's.
_SEGMENT_PREFIX: Final = "lmcache_l1_pool_sdktest"


def child_env(release: str) -> dict[str, str]:
    """The environment in which the Python of the interop environment runs `release`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "PYTHON", "PYTEST_"))}
    env.update(
        LMCACHE_TRACK_USAGE="false",
        LMCACHE_LOG_LEVEL="INFO",
        PYTHONPATH=str(release_dir(release)),
        PYTHONUNBUFFERED="1",
        CUDA_VISIBLE_DEVICES="",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )
    return env


def remove_orphaned_segments() -> list[str]:
    """Remove the segments of test processes that are gone; their names."""
    removed = []
    for segment in Path("/dev/shm").glob(f"{_SEGMENT_PREFIX}-*"):
        owner = segment.name.removeprefix(f"{_SEGMENT_PREFIX}-").split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            segment.unlink(missing_ok=True)
            removed.append(segment.name)
    return removed


def http_json(url: str) -> object:
    """GET a JSON document."""
    with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT) as response:
        document: object = json.loads(response.read())
    return document


def http_post(url: str, body: Mapping[str, object]) -> None:
    """POST a JSON document; urllib raises on a refusal."""
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT) as response:
        response.read()


def field(document: object, *path: str) -> object:
    """One value of a JSON document; KeyError names the whole path."""
    for position, name in enumerate(path):
        if not isinstance(document, dict) or name not in document:
            raise KeyError(".".join(path[: position + 1]))
        document = document[name]
    return document


def _count(document: object, *path: str) -> int:
    value = field(document, *path)
    assert isinstance(value, int), (path, value)
    return value


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a server holds on behalf of clients, as /status tells it."""

    write_locked: int
    read_locked: int
    sessions: int
    prefetch_jobs: int
    registrations: frozenset[int]

    @classmethod
    def settled(cls, status: Callable[[], object]) -> Held:
        """What a server holds, without the sessions that go in a moment: nobody waits for the answer to END_SESSION."""
        end = time.monotonic() + 0.3
        while (now := cls.from_status(status())).sessions and time.monotonic() < end:
            time.sleep(0.01)
        return now

    @classmethod
    def from_status(cls, status: object) -> Held:
        """Read the five numbers out of a /status document."""
        ids = field(status, "registered_non_cuda_instance_ids")
        assert isinstance(ids, list)
        l1_manager = ("storage_manager", "l1_manager")
        return cls(
            write_locked=_count(status, *l1_manager, "write_locked_count"),
            read_locked=_count(status, *l1_manager, "read_locked_count"),
            sessions=_count(status, "active_sessions"),
            prefetch_jobs=_count(status, "active_prefetch_jobs"),
            registrations=frozenset(ids),
        )


class RealServer:
    """One release of the LMCache server."""

    def __init__(
        self,
        release: str,
        *,
        transport: Transport = "shm",
        chunk_size: int = 256,
        l1_size_gb: int = 1,
        extra_args: Sequence[str] = (),
        log_dir: Path | None = None,
    ) -> None:
        assert release in RELEASES, release
        self.release = release
        self.transport: Transport = transport
        self.chunk_size = chunk_size
        self.segment = f"{_SEGMENT_PREFIX}-{os.getpid()}-{uuid4().hex[:8]}" if transport == "shm" else ""
        self._port, self._http_port = free_port(), free_port()
        self._l1_size_gb = l1_size_gb
        self._extra_args = tuple(extra_args)
        folder = log_dir if log_dir is not None else Path(tempfile.mkdtemp(prefix="lmcache-sdk-server-"))
        self.log = folder / f"server-{release}-{transport}-{self._port}.log"
        self._child: Child | None = None

    @property
    def url(self) -> str:
        """Where it takes requests."""
        return f"tcp://127.0.0.1:{self._port}"

    @property
    def http_url(self) -> str:
        """Where it takes HTTP."""
        return f"http://127.0.0.1:{self._http_port}"

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._child is not None, "not started"
        return self._child.pid

    def status(self) -> dict[str, object]:
        """GET /status."""
        document = http_json(f"{self.http_url}/status")
        assert isinstance(document, dict)
        return document

    def held(self) -> Held:
        """The locks, sessions, jobs and registrations it holds now."""
        return Held.settled(self.status)

    def wait_until_held(self, expected: Held, timeout: float = 2.0) -> Held:
        """Wait, bounded, until it holds what is expected; what it holds at the end, for the caller to compare.

        A client's END_SESSION may be answered a moment before /status counts it.
        """
        end = time.monotonic() + timeout
        while (now := self.held()) != expected and time.monotonic() < end:
            time.sleep(0.05)
        return now

    def clear(self) -> None:
        """Drop every cached object (0.5.0 has another path for it)."""
        if self.release == "0.5.0":
            http_post(f"{self.http_url}/clear-cache", {})
        else:
            http_post(f"{self.http_url}/cache/clear", {"tier": "l1", "force": True})

    def start(self) -> None:
        """Start it and wait until it is healthy."""
        remove_orphaned_segments()
        command: list[str | Path] = [venv_python(), "-m", "lmcache.v1.multiprocess.http_server"]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(self._http_port)]
        command += ["--l1-size-gb", str(self._l1_size_gb), "--chunk-size", str(self.chunk_size)]
        command += ["--eviction-policy", "LRU", "--disable-observability", "--supported-transfer-mode", "auto"]
        command += ["--shm-name", self.segment, *self._extra_args]
        self._child = Child(f"server {self.release} ({self.transport})", command, child_env(self.release), self.log)
        try:
            self._child.wait_for(self._healthy, START_TIMEOUT)
            self._check_what_runs()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it; remove its segment when it did not do so itself."""
        if self._child is not None:
            self._child.stop()
        if self.segment:
            Path("/dev/shm", self.segment).unlink(missing_ok=True)

    def _healthy(self) -> bool:
        try:
            return field(http_json(f"{self.http_url}/healthcheck"), "status") == "healthy"
        except (urllib.error.URLError, ConnectionError, TimeoutError, ValueError):
            return False

    def _check_what_runs(self) -> None:
        running = http_json(f"{self.http_url}/lmc_version")
        if running != self.release:
            raise StartError(f"asked for server {self.release}, {running} runs")
        # A pool that could not be made turns the server into an inline one without a word.
        if self.segment and not Path("/dev/shm", self.segment).exists():
            raise StartError(f"server {self.release} made no segment {self.segment}")

    def __enter__(self) -> RealServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """What an engine registers: the paged KV cache of one model."""

    layout: Layout = "HND"
    num_layers: int = 4
    num_blocks: int = 64
    num_heads: int = 2
    block_size: int = 16
    head_size: int = 32
    dtype: str = "bfloat16"
    world_size: int = 1


class Engine:
    """A process that has registered `models` with a server and stays.

    With `once` it has ended when `start` returns, and has left its registrations behind. With `blocks` it stores and
    retrieves on command (engine_blocks.py). Leaving never unregisters, as an engine that crashed does not.
    """

    def __init__(
        self, server: RealServer, models: Mapping[str, EngineShape], *, once: bool = False, blocks: bool = False
    ) -> None:
        assert not (once and blocks)
        self.models = dict(models)
        self._server = server
        self._once = once
        self._blocks = blocks
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._child is not None, "not started"
        return self._child.pid

    def start(self) -> None:
        """Start it and wait for its registrations."""
        server = self._server
        log = server.log.parent / f"engine-{server.release}-{uuid4().hex[:8]}.log"
        specs = json.dumps([{"model": model, **asdict(shape)} for model, shape in self.models.items()])
        script = HERE / ("engine_blocks.py" if self._blocks else "play_engine.py")
        command: list[str | Path] = [venv_python(), script, server.url, specs, *(["--once"] if self._once else [])]
        name = f"engine for {server.release}"
        self._child = Child(name, command, child_env(server.release), log, answers=self._blocks)
        try:
            self._wait_registered(self._child)
        except BaseException:
            self.stop()
            raise

    def _wait_registered(self, child: Child) -> None:
        if self._blocks:
            self._read_answer()
        elif self._once:
            status = child.wait(ENGINE_TIMEOUT)
            if status != 0:
                raise StartError(f"{child.name} ended with {status}:\n{log_tail(child.log)}")
        else:
            child.wait_for(lambda: "registered" in child.log.read_text(errors="replace").split("\n"), ENGINE_TIMEOUT)

    def store(self, model: str, tokens: Sequence[int], *, seed: int, salt: str = "") -> int:
        """Store `patterns.logical_values(seed)` through lmcache's engine path; the whole-chunk tokens it covers.

        The objects become readable a moment after this returns.
        """
        return self._command(do="store", model=model, tokens=list(tokens), salt=salt, seed=seed)

    def retrieve(self, model: str, tokens: Sequence[int], *, salt: str = "") -> tuple[int, bytes]:
        """Retrieve the cached prefix into zeroed blocks: how many tokens, and the blocks' bytes in logical order."""
        assert self._child is not None, "not started"
        file = self._child.log.with_suffix(".blocks")
        file.unlink(missing_ok=True)
        hit = self._command(do="retrieve", model=model, tokens=list(tokens), salt=salt, file=str(file))
        return hit, file.read_bytes()

    def _command(self, **command: object) -> int:
        assert self._child is not None and self._blocks, "not started with blocks"
        self._child.send_line(json.dumps(command))
        return _count(self._read_answer(), "tokens")

    def _read_answer(self) -> object:
        assert self._child is not None
        answer: object = json.loads(self._child.read_line(ENGINE_TIMEOUT))
        if field(answer, "ok") is not True:
            raise RuntimeError(f"{self._child.name} answered {answer}; see {self._child.log}")
        return answer

    def stop(self) -> None:
        """End its process. The server keeps the registrations until its grace ends."""
        if self._child is not None:
            self._child.stop()
            # An engine that registered has unlinked its caches; one that was stopped before that has not.
            for segment in Path("/dev/shm").glob(f"lmcache_kv_{self._child.pid}_*"):
                segment.unlink(missing_ok=True)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
