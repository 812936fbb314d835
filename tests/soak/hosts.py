"""The processes of a soak as its controller sees them: a server that can be frozen and killed, an engine that
registers again, and the clients.

Contract: each is one child or a child's child, signalled by its id and by nobody else, and gone when its `stop`
returns. A killed server is started again on the same ports and under the same segment name, whose old file is left as
a crash leaves it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tests.integration.make_env import PROJECT_ROOT, RELEASES, venv_python
from tests.integration.processes import Child
from tests.integration.servers import EngineShape, RealServer, Transport, child_env
from tests.soak import plan
from tests.soak.plan import Orders

_ENGINE_TIMEOUT: Final = 90.0
_COMMAND_TIMEOUT: Final = 20.0


def server_options(release: str) -> list[str]:
    """The small pool and the short patience."""
    options = {
        "--l1-size-gb": plan.POOL_NBYTES / 2**30,  # the last one counts
        "--l1-write-ttl-seconds": plan.WRITE_TTL,
        "--l1-read-ttl-seconds": plan.READ_TTL,
        "--worker-reap-timeout-seconds": plan.REAP,
        "--worker-registration-grace-seconds": plan.GRACE,
    }
    if RELEASES.index(release) >= RELEASES.index("0.5.6"):
        options["--session-ttl-seconds"] = plan.SESSION_TTL
    return [str(word) for option in options.items() for word in option]


class SoakServer(RealServer):
    """A server that things happen to."""

    def __init__(self, release: str, transport: Transport, log_dir: Path) -> None:
        super().__init__(
            release, transport=transport, chunk_size=plan.CHUNK, extra_args=server_options(release), log_dir=log_dir
        )

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; its segment stays."""
        assert self._child is not None, "not started"
        os.kill(self.pid, signal.SIGKILL)
        self._child.wait(_COMMAND_TIMEOUT)
        self._child.stop()


class SoakEngine:
    """An engine process that registers the model as often as it is told to."""

    def __init__(self, server: RealServer) -> None:
        shape = EngineShape(num_layers=plan.LAYERS, num_heads=plan.HEADS, head_size=plan.HEAD_SIZE, num_blocks=16)
        specs = json.dumps([{"model": plan.MODEL, **asdict(shape)}])
        script = Path(__file__).with_name("engine.py")
        log = server.log.parent / "engine.log"
        command: list[str | Path] = [venv_python(), script, server.url, specs]
        self._child = Child(f"engine for {server.release}", command, child_env(server.release), log, answers=True)
        self._child.read_line(_ENGINE_TIMEOUT)

    def register(self) -> None:
        """Registers with the server that is there now."""
        self._child.send_line("register")
        self._child.read_line(_ENGINE_TIMEOUT)

    def stop(self) -> None:
        """Ends it; the server forgets it after its patience."""
        self._child.stop()
        for segment in Path("/dev/shm").glob(f"lmcache_kv_{self._child.pid}_*"):
            segment.unlink(missing_ok=True)


class Clients:
    """The nursery and the clients it has forked."""

    def __init__(self, log: Path) -> None:
        command: list[str | Path] = [sys.executable, "-m", "tests.soak.nursery"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT_ROOT), "PYTHONFAULTHANDLER": "1"}
        self._child = Child("nursery of the clients", command, env, log, answers=True)
        self._answer(_ENGINE_TIMEOUT)

    def _answer(self, patience: float) -> Mapping[str, object]:
        answer: object = json.loads(self._child.read_line(patience))
        assert isinstance(answer, dict), answer
        return answer

    def _ask(self, patience: float = _COMMAND_TIMEOUT, **command: object) -> Mapping[str, object]:
        self._child.send_line(json.dumps(command))
        return self._answer(patience)

    def spawn(self, orders: Orders) -> int:
        """One more client; its process id."""
        pid = self._ask(do="spawn", orders=orders.to_json())["pid"]
        assert isinstance(pid, int)
        return pid

    def kill(self, pid: int) -> int:
        """SIGKILL; how it ended, which is -9 unless it had ended before."""
        status = self._ask(do="kill", pid=pid)["status"]
        assert isinstance(status, int)
        return status

    def ended_by_themselves(self) -> dict[int, int]:
        """The clients that nobody ended, and their exit statuses."""
        return _statuses(self._ask(do="reap"))

    def finish(self, pids: Iterable[int], timeout: float) -> dict[int, int]:
        """Asks clients to end and waits for them; their exit statuses, -9 for those that had to be killed."""
        return _statuses(self._ask(timeout + _COMMAND_TIMEOUT, do="finish", pids=list(pids), timeout=timeout))

    def stop(self) -> None:
        """Ends all of them."""
        self._child.stop()


def _statuses(answer: Mapping[str, object]) -> dict[int, int]:
    ended = answer["ended"]
    assert isinstance(ended, dict)
    return {int(pid): int(status) for pid, status in ended.items()}
