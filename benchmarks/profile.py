"""Where one call's time goes: `python -m benchmarks.profile lookup --tokens 8192 --geometry small`.

Makes the call again and again on a real server, in this process, and prints what one of them took: wall time, the CPU
time of the calling thread and of the server's whole process, the minor page faults, and then cProfile's view of the
calling thread (of its CPU time, so that waiting for the server is not in it). The profile slows Python down: its shares
count, not its sums.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import torch

import lmcache_sdk.kvcache as lmc_sdk
from benchmarks import content
from benchmarks.stage import GEOMETRIES, POOL_GB, RELEASE, Geometry, new_seed
from lmcache_sdk import LMCacheKVCacheContext
from tests.integration.servers import Engine, RealServer

_CALLS: Final = 20
_SHOWN: Final = 25
_MS: Final = 1000.0


def server_seconds(pid: int) -> float:
    """CPU time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page_faults() -> int:
    """Minor ones of this process until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def call_of(
    name: str, ctx: LMCacheKVCacheContext, geometry: Geometry, count: int, server: RealServer
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The call, and what comes before each of them, outside of the clock."""
    kv = torch.randn(geometry.shape(count)).to(torch.bfloat16)
    stored = content.tokens(new_seed(), count)
    assert ctx.store(kv, stored)
    fresh: list[list[int]] = []

    def prepare() -> None:
        if name == "store":
            server.clear()
        fresh.append(content.tokens(new_seed(), count))

    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: ctx.lookup(stored),
        "retrieve": lambda: ctx.retrieve(stored),
        "miss": lambda: ctx.retrieve(fresh.pop()),
        "store": lambda: ctx.store(kv, fresh.pop()),
    }
    return calls[name], prepare


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("call", choices=("lookup", "retrieve", "miss", "store"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--geometry", choices=tuple(GEOMETRIES), default="small")
    parser.add_argument("--transport", choices=("shm", "inline"), default="shm")
    chosen = parser.parse_args()
    geometry = GEOMETRIES[chosen.geometry]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(
            RealServer(RELEASE, transport=chosen.transport, l1_size_gb=POOL_GB, log_dir=folder)
        )
        stack.enter_context(Engine(server, {geometry.model: geometry.engine}))
        ctx = stack.enter_context(lmc_sdk.connect(server.url, server.http_url, geometry.model))
        call, prepare = call_of(chosen.call, ctx, geometry, chosen.tokens, server)
        for _ in range(3):
            prepare()
            call()
        walls, mine, theirs, faults = [], 0.0, 0.0, 0
        for _ in range(_CALLS):
            prepare()
            before = server_seconds(server.pid), time.thread_time(), page_faults()
            began = time.perf_counter()
            call()
            walls.append(time.perf_counter() - began)
            mine += time.thread_time() - before[1]
            faults += page_faults() - before[2]
            theirs += server_seconds(server.pid) - before[0]
        what = f"{chosen.call} {geometry.name} {chosen.tokens} {chosen.transport}"
        cpu = f"CPU: calling thread {mine / _CALLS * _MS:.2f} ms, server {theirs / _CALLS * _MS:.1f} ms"
        print(f"{what}: {median(walls) * _MS:.2f} ms; {cpu}; {faults / _CALLS:.0f} page faults")
        profile = cProfile.Profile(time.thread_time)
        for _ in range(_CALLS):
            prepare()
            profile.enable()
            call()
            profile.disable()
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(_SHOWN)


if __name__ == "__main__":
    main()
