"""The leak check detects each kind of leak, and says nothing when all was given back."""

from __future__ import annotations

import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fix_leaks import Snapshot, leaked_since

_ROOT = Path(__file__).parent.parent


def _leak_thread() -> tuple[str, Callable[[], None]]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(30,), name="forgotten")
    thread.start()

    def give_back() -> None:
        stop.set()
        thread.join()

    return "thread forgotten", give_back


def _leak_socket() -> tuple[str, Callable[[], None]]:
    left, right = socket.socketpair()

    def give_back() -> None:
        left.close()
        right.close()

    return "socket:", give_back


def _leak_pipe() -> tuple[str, Callable[[], None]]:
    ends = os.pipe()

    def give_back() -> None:
        for end in ends:
            os.close(end)

    return "pipe:", give_back


def _leak_event_descriptor() -> tuple[str, Callable[[], None]]:
    poller = select.epoll()
    return "anon_inode:", poller.close


def _shared_mapping() -> mmap.mmap:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


def _leak_mapping() -> tuple[str, Callable[[], None]]:
    return "mapping", _shared_mapping().close


def _leak_child() -> tuple[str, Callable[[], None]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])

    def give_back() -> None:
        child.kill()
        child.wait()

    return f"child process {child.pid}", give_back


@pytest.mark.parametrize(
    "leak",
    [_leak_thread, _leak_socket, _leak_pipe, _leak_event_descriptor, _leak_mapping, _leak_child],
    ids=lambda leak: leak.__name__,
)
def test_each_kind_of_leak_is_seen_and_its_end_too(leak: Callable[[], tuple[str, Callable[[], None]]]) -> None:
    before = Snapshot.take()
    expected, give_back = leak()
    try:
        seen = leaked_since(before, grace=0.0)
    finally:
        give_back()
    assert any(expected in entry for entry in seen), seen
    assert leaked_since(before) == []


def test_garbage_is_not_a_leak() -> None:
    before = Snapshot.take()
    cycle: list[object] = [_shared_mapping()]
    cycle.append(cycle)  # only the collector frees it now
    assert Snapshot.take() != before
    del cycle
    assert leaked_since(before) == []


def test_what_goes_away_within_the_grace_is_not_a_leak() -> None:
    before = Snapshot.take()
    stop = threading.Event()
    threading.Thread(target=stop.wait, args=(30,)).start()
    assert leaked_since(before, grace=0.0)
    threading.Timer(0.2, stop.set).start()
    assert leaked_since(before) == []


@pytest.mark.slow
def test_a_test_that_leaks_is_an_error_in_its_teardown(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(
        "import os, pytest\n"
        "def test_tidy(): os.close(os.open('/dev/null', os.O_RDONLY))\n"
        "def test_leaks(): os.pipe()\n"
        "@pytest.mark.may_leak('on purpose')\n"
        "def test_allowed(): os.pipe()\n"
        "def test_failed():\n"
        "    os.pipe()\n"
        "    assert False\n"
    )
    run = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "tests.fix_leaks",
                "-p",
                "no:randomly",
                "-p",
                "no:cacheprovider",
            ),
            *("-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ERROR test_sample.py::test_leaks - Failed: left behind: descriptor" in run.stdout
    assert "3 passed" in run.stdout
    assert "1 failed" in run.stdout
    assert "1 error" in run.stdout
