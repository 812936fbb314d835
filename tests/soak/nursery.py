"""The process that all clients are forked from: importing torch once instead of once for each client.

    python -m tests.soak.nursery

Answers one JSON line on standard output to each on standard input:

    {"do": "spawn", "orders": "..."}        → {"pid": 123}
    {"do": "kill", "pid": 123}              → {"status": -9}     SIGKILL, and waited for
    {"do": "reap"}                          → {"ended": {"123": -11}}   those that ended by themselves
    {"do": "finish", "pids": [...], "timeout": 20}  → {"ended": {"123": 0}}   SIGTERM, a bounded wait, SIGKILL

It has no thread and no connection when it forks, so a child is what a program is that connects after a fork. Children
die with it, and it with the controlling process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from typing import Final

import torch

from tests.soak.client import Client
from tests.soak.content import warm_up
from tests.soak.plan import Orders

_PR_SET_PDEATHSIG: Final = 1
_DUMP_SECONDS: Final = 1.0


def _become_client(orders: Orders, parent: int) -> None:
    """Never returns."""
    status = 4
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(4)
        sink = os.open(orders.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, sink), (2, sink)):
            os.dup2(source, target)
        os.close(sink)
        os.close(nothing)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        status = Client(orders).run()
    finally:
        sys.stderr.flush()
        os._exit(status)


class Nursery:
    """The children and what is done to them."""

    def __init__(self) -> None:
        self._children: set[int] = set()

    def spawn(self, orders: Orders) -> int:
        """Forks one more client."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_client(orders, parent)
        self._children.add(pid)
        return pid

    def kill(self, pid: int) -> int:
        """SIGKILL to a child of ours that nobody has waited for, so that its id is still its own."""
        os.kill(pid, signal.SIGKILL)
        return self._wait(pid)

    def _wait(self, pid: int) -> int:
        _, status = os.waitpid(pid, 0)
        self._children.discard(pid)
        return os.waitstatus_to_exitcode(status)

    def reap(self, pids: set[int] | None = None) -> dict[int, int]:
        """Those that have ended, and how."""
        ended = {}
        for pid in list(self._children if pids is None else self._children & pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._children.discard(pid)
                ended[pid] = os.waitstatus_to_exitcode(status)
        return ended

    def finish(self, pids: set[int], timeout: float) -> dict[int, int]:
        """Asks them to end; those that do not write their stacks into their logs and are killed."""
        ended = self.reap(pids)
        for pid in pids & self._children:
            os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + timeout
        while pids & self._children and time.monotonic() < end:
            ended.update(self.reap(pids))
            time.sleep(0.05)
        for pid in pids & self._children:
            os.kill(pid, signal.SIGUSR1)
        if pids & self._children:
            time.sleep(_DUMP_SECONDS)
        for pid in pids & self._children:
            ended[pid] = self.kill(pid)
        return ended


def main() -> None:
    """Serves until standard input ends."""
    torch.set_num_threads(1)
    warm_up()
    gc.collect()
    gc.freeze()
    nursery = Nursery()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, object]
        if command["do"] == "spawn":
            answer = {"pid": nursery.spawn(Orders.from_json(command["orders"]))}
        elif command["do"] == "kill":
            answer = {"status": nursery.kill(command["pid"])}
        elif command["do"] == "reap":
            answer = {"ended": nursery.reap()}
        else:
            answer = {"ended": nursery.finish(set(command["pids"]), command["timeout"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
