"""`Client`: the process of scripts/client.py, as the tests see it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from tests.integration.make_env import PROJECT_ROOT
from tests.integration.processes import Child

from .worlds import KV, World, wait_for_state

ANSWER_TIMEOUT = 60.0


def script_env() -> dict[str, str]:
    """The environment of a script of this folder."""
    return {**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


class Client:
    """See the module."""

    def __init__(self, here: World, model: str = KV, timeout: float = 30.0) -> None:
        log = here.server.log.parent / f"client-{uuid4().hex[:8]}.log"
        command: list[str | Path] = [sys.executable, "-m", "tests.faults.scripts.client"]
        command += [here.server.url, here.server.http_url, model, str(timeout)]
        self._child = Child("a client", command, script_env(), log, answers=True)
        assert self.answer() == {"connected": here.transport}

    def send(self, **command: object) -> None:
        """Gives a command."""
        self._child.send_line(json.dumps(command))

    def answer(self, timeout: float = ANSWER_TIMEOUT) -> dict[str, object]:
        """The next line it says."""
        found = json.loads(self._child.read_line(timeout))
        assert isinstance(found, dict)
        return found

    def ask(self, **command: object) -> dict[str, object]:
        """Gives a command and waits for its answer."""
        self.send(**command)
        return self.answer()

    def stop_in(self, kind: str, chunk: int, tokens: list[int], seed: int) -> None:
        """Has it begin a store or retrieve; it is stopped before its copy of that chunk when this returns."""
        assert self.ask(do="stop", **{"in": kind}, chunk=chunk) == {}
        self.send(do=kind, tokens=tokens, seed=seed)
        assert self.answer() == {"stopped": chunk}
        wait_for_state(Path(f"/proc/{self._child.pid}/stat"), "T")

    def go_on(self) -> dict[str, object]:
        """Continues a stopped process; the answer to the call that it was stopped in."""
        self.signal(signal.SIGCONT)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        os.kill(self._child.pid, number)

    def wait(self, timeout: float = 20.0) -> int:
        """Waits for it to end by itself; its exit status."""
        return self._child.wait(timeout)

    def close(self) -> None:
        """Ends it, stopped or not."""
        if self._child.running:
            self.signal(signal.SIGCONT)
        self._child.stop()


@contextlib.contextmanager
def client(here: World, model: str = KV, timeout: float = 30.0) -> Iterator[Client]:
    """A client process for the time of a block."""
    made = Client(here, model, timeout)
    try:
        yield made
    finally:
        made.close()
