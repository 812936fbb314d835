"""What importing costs beyond `import torch`, each time in a new process."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Final

from benchmarks.figures import Line, at_least, at_most
from benchmarks.plan import Plan
from benchmarks.stage import SideName, python_of, worker_env

_LIMIT_MS: Final = 150.0
_MODULES: Final[dict[SideName, str]] = {"ours": "lmcache_sdk.kvcache", "official": "lmcache.sdk.kvcache"}
_PROGRAM: Final = """
import os, sys, time
import torch
began = time.perf_counter()
import {module}
print(1000 * (time.perf_counter() - began), file=sys.stderr)
os._exit(0)
"""
_TIMEOUT: Final = 120.0


def _milliseconds(side: SideName) -> float:
    done = subprocess.run(
        [python_of(side), "-c", _PROGRAM.format(module=_MODULES[side])],
        env=worker_env(side),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
        timeout=_TIMEOUT,
        text=True,
    )
    return float(done.stderr.split()[-1])


def imports(plan: Plan) -> Iterator[Line]:
    """One warm-up for each, so that every file is in the page cache."""
    taken: dict[SideName, list[float]] = {"ours": [], "official": []}
    for repetition in range(-1, plan.repeats):
        for side, times in taken.items():
            milliseconds = _milliseconds(side)
            if repetition >= 0:
                times.append(milliseconds)
    limit = [_LIMIT_MS] * plan.repeats
    yield Line(row="import beyond torch", case="-", against="limit", goal=at_most(1.0), ours=taken["ours"], other=limit)
    yield Line(
        row="import beyond torch",
        case="-",
        against="official",
        goal=at_least(1.0),
        ours=taken["ours"],
        other=taken["official"],
        judged=False,
    )
