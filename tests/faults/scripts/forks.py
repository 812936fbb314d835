"""A process that forks, and what its child can do.

    python -m tests.faults.scripts.forks URL HTTP_URL MODEL MODE

MODE: "use" (the child uses and closes the parent's context), "view" (it reads and leaves the parent's open view),
"connect" (the child makes its own), "pool" (a multiprocessing pool of forked workers, each with its own). The parent
works with its context from a second thread while it forks. Prints one JSON object; a child that does not end within
CHILD_SECONDS is reported as hanging, and killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import KVCacheSDKError, KVView, LMCacheKVCacheContext
from tests.faults.worlds import values_of
from tests.integration.cases import CHUNK
from tests.integration.patterns import raw_bytes

CHILD_SECONDS = 15.0
LENGTH = 8 * CHUNK


def tokens_of(first: int) -> list[int]:
    return [first, *range(1, LENGTH)]


def work(ctx: LMCacheKVCacheContext, first: int) -> bool:
    """Stores and reads back; whether it is exact."""
    kv = values_of(ctx.server_version, ctx.model_name, LENGTH, first)
    found = ctx.retrieve(tokens_of(first)) if ctx.store(kv, tokens_of(first)) else None
    # bytes, not torch.equal: torch's OpenMP hangs in a forked child of a process that used it, whoever calls it
    return found is not None and found.shape == kv.shape and raw_bytes(found) == raw_bytes(kv)


def use(ctx: LMCacheKVCacheContext, first: int) -> str:
    """What the parent's context says in the child."""
    said = []
    for call in (
        lambda: ctx.retrieve(tokens_of(first)),
        lambda: ctx.lookup(tokens_of(first)),
        lambda: work(ctx, first),
    ):
        try:
            call()
            said.append("no error")
        except KVCacheSDKError as error:
            said.append(type(error).__name__)
    ctx.close()
    ctx.close()
    return " ".join(said)


def leave(view: KVView) -> str:
    """What the parent's open view says in the child."""
    said = []
    for call in (lambda: view[0], view.check_alive, lambda: view.__exit__(None, None, None)):
        try:
            call()
            said.append("no error")
        except KVCacheSDKError as error:
            said.append(type(error).__name__)
    return " ".join(said)


def own(first: int) -> str:
    url, http_url, model = sys.argv[1:4]
    with lmc_sdk.connect(url, http_url, model, 10.0) as ctx:
        return "exact" if work(ctx, first) else "wrong"


def in_child(work: Callable[[], str]) -> dict[str, object]:
    """Forks; what the child said, and how long it took."""
    read_end, write_end = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, work().encode())
        os._exit(0)
    os.close(write_end)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() - began > CHILD_SECONDS:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"hangs": True, "said": ""}
        time.sleep(0.01)
    with os.fdopen(read_end) as said:
        return {"hangs": False, "said": said.read(), "seconds": time.monotonic() - began}


def in_view(ctx: LMCacheKVCacheContext, first: int) -> dict[str, object]:
    """Forks inside a view, which must be whole afterwards."""
    report: dict[str, object] = {"stored": work(ctx, first)}
    with ctx.view(tokens_of(first)) as view:
        report.update(in_child(lambda: leave(view)))
        found = torch.cat(list(view), dim=2)
        report["viewed"] = raw_bytes(found) == raw_bytes(values_of(ctx.server_version, ctx.model_name, LENGTH, first))
    return report


def in_pool(first: int) -> dict[str, object]:
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pending = pool.map_async(own, range(first, first + 6), chunksize=1)
        try:
            said = set(pending.get(CHILD_SECONDS))
        except multiprocessing.TimeoutError:
            pool.terminate()
            return {"hangs": True, "said": ""}
    return {"hangs": False, "said": " ".join(sorted(said)), "seconds": time.monotonic() - began}


def main() -> None:
    url, http_url, model, mode = sys.argv[1:5]
    first = 2_000_000 + 1000 * ("use", "connect", "pool", "view").index(mode) + os.getpid() * 10_000 % 1_000_000_000
    ctx = lmc_sdk.connect(url, http_url, model, 10.0)
    report: dict[str, object] = {"before": work(ctx, first)}
    over = threading.Event()
    errors: list[str] = []

    def keep_busy() -> None:
        while not over.is_set():
            try:
                if ctx.retrieve(tokens_of(first)) is None:
                    errors.append("a miss")
            except KVCacheSDKError as error:
                errors.append(repr(error))

    busy = threading.Thread(target=keep_busy)
    busy.start()
    time.sleep(0.1)
    if mode == "pool":
        report.update(in_pool(first + 1))
    elif mode == "view":
        report.update(in_view(ctx, first + 1))
    else:
        report.update(in_child(lambda: use(ctx, first + 1) if mode == "use" else own(first + 1)))
    over.set()
    busy.join(20)
    report["parent"] = errors[:3]
    report["after"] = work(ctx, first + 900)
    ctx.close()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
