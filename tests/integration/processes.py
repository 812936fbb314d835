"""One child process that cannot outlive the tests.

Contract: a `Child` writes both its output streams to a log file, is asked to end by SIGTERM and killed after a
bounded wait, and dies with the test process whatever ends that one: the kernel kills it when its parent is gone, so a
SIGKILL of pytest leaves nothing either. It runs in a session of its own, so a ctrl-C reaches pytest only and the
fixtures end it in order. Only processes that were started here are ever signalled, by their id.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

# Asks the kernel to kill this process when its parent dies, then becomes the program. (A preexec_fn would run Python
# between fork and exec, which can dead-lock when the tests have threads.)
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
_TERMINATE_WAIT = 8.0
_KILL_WAIT = 10.0
_POLL = 0.05


class StartError(RuntimeError):
    """A child did not come up; the message ends with the tail of its log."""


def log_tail(log: Path, lines: int = 40) -> str:
    """The last lines of a log file, for an error message."""
    if not log.is_file():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def free_port() -> int:
    """A free TCP port of 127.0.0.1 outside the range the kernel hands to outgoing connections.

    A server binds ten seconds after its port was chosen; a port of the ephemeral range could be somebody's local port
    by then.
    """
    chooser = SystemRandom()
    for _ in range(200):
        port = chooser.randrange(15000, 32000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise StartError("no free port found between 15000 and 32000")


class Child:
    """A running child process and its log."""

    def __init__(
        self, name: str, command: Sequence[str | Path], env: Mapping[str, str], log: Path, *, answers: bool = False
    ) -> None:
        self.name = name
        self.log = log
        self._unread = b""
        words = [sys.executable, "-c", _LAUNCHER, str(os.getpid()), *map(str, command)]
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                words,
                env=dict(env),
                stdin=subprocess.PIPE if answers else subprocess.DEVNULL,
                stdout=subprocess.PIPE if answers else sink,
                stderr=sink,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id; the launcher execs, so it is the program's own."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def wait_for(self, ready: Callable[[], bool], timeout: float) -> None:
        """Return once `ready()`; StartError when the child ends first or the time is up."""
        end = time.monotonic() + timeout
        while not ready():
            if not self.running:
                raise StartError(f"{self.name} ended with {self._process.returncode}:\n{log_tail(self.log)}")
            if time.monotonic() > end:
                raise StartError(f"{self.name} was not ready after {timeout:.0f} s:\n{log_tail(self.log)}")
            time.sleep(_POLL)

    def send_line(self, line: str) -> None:
        """Write a line to its standard input (a child made with `answers`)."""
        assert self._process.stdin is not None, "made without answers"
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def read_line(self, timeout: float) -> str:
        """Read a line of its standard output; StartError with the log's tail when none comes."""
        assert self._process.stdout is not None, "made without answers"
        pipe = self._process.stdout.fileno()
        end = time.monotonic() + timeout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            data = os.read(pipe, 1 << 16) if ready else b""
            if not data:
                what = "ended" if ready else f"said nothing for {timeout:.0f} s"
                raise StartError(f"{self.name} {what}:\n{log_tail(self.log)}")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()

    def wait(self, timeout: float) -> int:
        """Wait for a child that ends by itself; its exit status."""
        return self._process.wait(timeout)

    def stop(self) -> None:
        """End it: SIGTERM, a bounded wait, then SIGKILL. Safe to call twice."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(_TERMINATE_WAIT)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait(_KILL_WAIT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # it ended with unread input
                    pipe.close()
