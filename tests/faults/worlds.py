"""A real server that can be frozen, killed and restarted, with an engine: where the faults happen.

Contract: a `FaultServer` keeps its ports and the name of its pool over a restart, and a killed one leaves its pool's
file, as a crash does. A frozen server is always thawed. Values come from `tests.integration.cases`, which knows the
tensors by the rules of the protocol text and not by the library's code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import LMCacheKVCacheContext
from tests.integration.cases import CHUNK, client_shape, fresh_tokens
from tests.integration.servers import Engine, EngineShape, Held, RealServer, Transport

KV: Final = "faults/kv"
"""256 KiB a chunk."""
WIDE: Final = "faults/wide"
"""4 MiB a chunk."""
WIDE_BATCH: Final = 16
"""Chunks of WIDE that one store reserves at once: two batches of 32 MiB (of a pool of 1 GiB or less)."""
MODELS: Final[dict[str, EngineShape]] = {
    KV: EngineShape(),
    WIDE: EngineShape(num_layers=8, num_heads=4, head_size=128, num_blocks=2),
}
SMALL_POOL: Final = ("--l1-size-gb", "0.0625")
"""64 MiB: 256 chunks of KV."""
CONNECT_TIMEOUT: Final = 20.0


class FaultServer(RealServer):
    """See the module."""

    def freeze(self) -> None:
        """SIGSTOP; every thread of it has stopped when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            wait_for_state(thread / "stat", "T")

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; its pool's file stays."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._child is not None
        self._child.stop()

    @property
    def segment_path(self) -> Path:
        """The file of its pool."""
        assert self.segment
        return Path("/dev/shm", self.segment)


@dataclass
class World:
    """A running server of one release with one transport, and the engine that registered the models."""

    server: FaultServer
    engine: Engine
    contexts: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closed at the end of the test."""
    dead: bool = False
    changed: bool = False
    """The server came back with another chunk size or layout."""

    @property
    def release(self) -> str:
        """The server's."""
        return self.server.release

    @property
    def transport(self) -> Transport:
        """The server's."""
        return self.server.transport

    def connect(self, model: str = KV, timeout: float = 5.0) -> LMCacheKVCacheContext:
        """A context that is closed at the end of the test."""
        context = lmc_sdk.connect(self.server.url, self.server.http_url, model, timeout)
        self.contexts.callback(context.close)
        assert context.transport == self.transport
        return context

    def values(self, num_tokens: int, seed: int, model: str = KV) -> torch.Tensor:
        """A tensor as a client gives it."""
        return values_of(self.release, model, num_tokens, seed)

    def read(self, tokens: list[int], salt: str = "", model: str = KV) -> torch.Tensor | None:
        """What a client that just came finds."""
        with lmc_sdk.connect(self.server.url, self.server.http_url, model, CONNECT_TIMEOUT) as context:
            return context.retrieve(tokens, salt)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The server does nothing for the time of a block."""
        self.server.freeze()
        try:
            yield
        finally:
            self.server.thaw()

    @contextlib.contextmanager
    def frozen_for(self, seconds: float) -> Iterator[None]:
        """The server does nothing for so long from now; the block ends no earlier."""
        thaw = threading.Timer(seconds, self.server.thaw)
        self.server.freeze()
        thaw.start()
        try:
            yield
        finally:
            thaw.join()

    def settled(self, expected: Held, timeout: float = 3.0) -> None:
        """The server holds what is expected, soon."""
        found = self.server.wait_until_held(expected, timeout)
        assert found == expected, f"left on the server: {difference(expected, found)}"

    def kill(self) -> None:
        """SIGKILL to the server."""
        self.dead = True
        self.server.kill()

    def restart(
        self, *, chunk_size: int = CHUNK, models: dict[str, EngineShape] | None = None, engine: bool = True
    ) -> None:
        """Kill the server and start it again at the same addresses with the same name of its pool; then an engine."""
        if not self.dead:
            self.server.kill()
        self.dead = False
        self.changed = chunk_size != CHUNK or models is not None
        self.server.chunk_size = chunk_size
        self.server.start()
        if engine:
            self.start_engine(models)

    def start_engine(self, models: dict[str, EngineShape] | None = None) -> None:
        """An engine registers again, as after a restart."""
        self.engine.stop()
        self.engine = Engine(self.server, MODELS if models is None else models)
        self.engine.start()


def difference(expected: Held, found: Held) -> str:
    """What one has more or less than the other."""
    parts = []
    for name in ("write_locked", "read_locked", "sessions", "prefetch_jobs"):
        before, after = getattr(expected, name), getattr(found, name)
        if before != after:
            parts.append(f"{name} {before} -> {after}")
    more = len(found.registrations - expected.registrations)
    fewer = len(expected.registrations - found.registrations)
    if more or fewer:
        parts.append(f"registrations +{more} -{fewer}")
    return ", ".join(parts)


@contextlib.contextmanager
def world(
    release: str,
    transport: Transport,
    *options: str,
    models: dict[str, EngineShape] | None = None,
    log_dir: Path | None = None,
) -> Iterator[World]:
    """A server with these options and its engine, gone at the end, whatever was done to them."""
    server = FaultServer(release, transport=transport, extra_args=options, log_dir=log_dir)
    made: World | None = None
    try:
        server.start()
        made = World(server, Engine(server, MODELS if models is None else models))
        made.engine.start()
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError, AssertionError):
            server.thaw()
        if made is not None:
            made.contexts.close()
            made.engine.stop()
        server.stop()


def values_of(release: str, model: str, num_tokens: int, seed: int) -> torch.Tensor:
    """A tensor as a client of that release gives it: random bits, special values among them."""
    shape = client_shape(release, MODELS[model], num_tokens)
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
    return bits.view(torch.bfloat16)


def free_of_clients(held: Held) -> Held:
    """The same without anything that a client holds: what a restarted server is expected to hold."""
    return replace(held, write_locked=0, read_locked=0, sessions=0, prefetch_jobs=0, registrations=frozenset())


def wait_for_state(stat: Path, state: str) -> None:
    """Return once a process or thread is in this state, as its `stat` file says."""
    end = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < end, f"{stat} is not {state}"
        time.sleep(0.002)


def run_threads(count: int, body: Callable[[int], None], timeout: float = 60.0) -> None:
    """Run `body(index)` in so many threads at once; the first error of any is raised, a hang is one."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            start.wait()
            body(index)
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"threads hang after {timeout:g} s"


def tokens_of(num_chunks: int, tail: int = 0) -> list[int]:
    """Token ids that nothing else has as a prefix."""
    return fresh_tokens(num_chunks * CHUNK + tail)
