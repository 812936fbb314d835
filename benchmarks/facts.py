"""What a figure depends on besides the code: machine, versions, date, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from tests.integration.make_env import PROJECT_ROOT


def _first(path: str, key: str) -> str:
    file = Path(path)
    for line in file.read_text().splitlines() if file.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def sources() -> dict[str, object]:
    """Which code is measured; asked for again at the end of a section, since a tree can move under a long run."""
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "uncommitted": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "src")),
    }


def facts() -> dict[str, object]:
    """Of this machine and this tree; nothing that names either."""
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **sources(),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "transparent_hugepages": thp.read_text().strip() if thp.exists() else "unknown",
        "python": platform.python_version(),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
    }
