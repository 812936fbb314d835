"""What a client counts and measures, and how it tells.

Contract: a `Tally` may be used by all threads of a client. `Journal` appends JSON lines to a file that survives the
client's SIGKILL: totals every half second, events (wrong bytes, exceptions that nobody documented) at once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class Sample:
    """What the process holds now."""

    fds: int
    threads: int
    rss_anon: int
    """Bytes of anonymous memory."""
    blocks: int
    """Blocks of memory that Python's allocator has handed out."""

    @classmethod
    def now(cls) -> Sample:
        """Of this process."""
        words = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return cls(
            fds=len(os.listdir("/proc/self/fd")) - 1,  # the one that reads the folder
            threads=int(words["Threads"]),
            rss_anon=int(words["RssAnon"].split()[0]) * 1024,
            blocks=sys.getallocatedblocks(),
        )


def give_back_unused() -> None:
    """Collects cycles, and hands the pages that malloc keeps for later back to the kernel."""
    gc.collect()
    if _TRIM is not None:
        _TRIM(0)


_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


class Tally:
    """Named numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._longest = 0.0

    def add(self, name: str, number: int = 1) -> int:
        """Adds to one of them; its new value."""
        with self._lock:
            self._counts[name] += number
            return self._counts[name]

    def note_overrun(self, seconds: float) -> None:
        """Keeps the largest."""
        with self._lock:
            self._longest = max(self._longest, seconds)

    def totals(self) -> tuple[dict[str, int], float]:
        """All numbers, and the longest that a call took over its timeout."""
        with self._lock:
            return dict(self._counts), self._longest


class Journal:
    """The file of one client."""

    def __init__(self, path: str, tally: Tally) -> None:
        self._tally = tally
        self._lock = threading.Lock()
        # one write for each line, without a buffer of this process: what was told before a SIGKILL is in the file
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def totals(self, **more: object) -> None:
        """Tells the numbers of the tally and a sample of the process."""
        counts, overrun = self._tally.totals()
        self._tell({"counts": counts, "overrun": overrun, "sample": asdict(Sample.now()), **more})

    def event(self, kind: str, text: str) -> None:
        """Tells something that must not get lost."""
        self._tell({"event": kind, "text": text})

    def _tell(self, record: dict[str, object]) -> None:
        line = json.dumps({"at": time.monotonic(), **record}) + "\n"
        with self._lock:
            os.write(self._file, line.encode())
