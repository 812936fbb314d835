"""A client process, driven line by line: what cannot be done to the process of the tests is done to this one.

    python -m tests.faults.scripts.client URL HTTP_URL MODEL TIMEOUT

Answers one JSON line on standard output to each JSON line on standard input; the first answer says that it is
connected. Commands: {"do": "store" | "retrieve" | "lookup", "tokens": [...], "seed": N, "salt": S}, {"do": "close"},
{"do": "quit"} which leaves without closing, and {"do": "stop", "in": "store" | "retrieve", "chunk": K}: the next such
call says {"stopped": K} and then stops its own process (SIGSTOP) before it copies its K-th chunk. A call that failed
answers {"error": name, "message": text}; every answer has its "seconds".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import LMCacheKVCacheContext
from lmcache_sdk.facade import transfer
from lmcache_sdk.layout import blobs, packing
from tests.faults.worlds import values_of
from tests.integration.patterns import same_bytes


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


class Stopper:
    """Stands in the way of the copies, and stops the process once, before the copy of one chunk."""

    def __init__(self) -> None:
        self.kind = ""
        self.chunk = 0
        self._copied = 0
        # the names that the modules use: into slots, into messages, out of both
        vars(transfer).update(pack=self.pack, unpack=self.unpack)
        vars(blobs).update(pack_chunk=self.pack_chunk)

    def arm(self, kind: str, chunk: int) -> None:
        self.kind, self.chunk, self._copied = kind, chunk, 0

    def _reached(self, kind: str) -> None:
        if self.kind == kind and self._copied == self.chunk:
            self.kind = ""
            say({"stopped": self.chunk})
            os.kill(os.getpid(), signal.SIGSTOP)
        self._copied += 1

    def pack_chunk(self, kv: torch.Tensor, chunk_index: int, chunk_size: int, out: torch.Tensor) -> None:
        self._reached("store")
        packing.pack_chunk(kv, chunk_index, chunk_size, out)

    def pack(self, kv: torch.Tensor, first_chunk: int, out: torch.Tensor) -> None:
        for index in range(out.size(0)):
            self._reached("store")
            packing.pack(kv, first_chunk + index, out[index : index + 1])

    def unpack(self, runs: Sequence[torch.Tensor], out: torch.Tensor, first_chunk: int) -> None:
        chunks = [run[index : index + 1] for run in runs for index in range(run.size(0))]
        for index, chunk in enumerate(chunks, first_chunk):
            self._reached("retrieve")
            packing.unpack([chunk], out, index)


def values(ctx: LMCacheKVCacheContext, num_tokens: int, seed: int) -> torch.Tensor:
    return values_of(ctx.server_version, ctx.model_name, num_tokens, seed)


def do(ctx: LMCacheKVCacheContext, command: dict[str, Any]) -> dict[str, object]:
    kind, tokens, salt = command["do"], command.get("tokens", []), command.get("salt", "")
    if kind == "store":
        result = ctx.store(values(ctx, len(tokens), command["seed"]), tokens, salt)
        return {"true": bool(result), "written": result.written_chunks, "missing": result.missing_chunks}
    if kind == "retrieve":
        found = ctx.retrieve(tokens, salt)
        if found is None:
            return {"tokens": 0, "exact": True}
        return {"tokens": found.shape[2], "exact": same_bytes(found, values(ctx, found.shape[2], command["seed"]))}
    if kind == "lookup":
        return {"tokens": ctx.lookup(tokens, salt).hit_tokens}
    ctx.close()
    return {}


def main() -> None:
    url, http_url, model, timeout = sys.argv[1:5]
    ctx = lmc_sdk.connect(url, http_url, model, float(timeout))
    stopper = Stopper()
    say({"connected": ctx.transport})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            return
        if command["do"] == "stop":
            stopper.arm(command["in"], command["chunk"])
            say({})
            continue
        began = time.monotonic()
        try:
            answer = do(ctx, command)
        except BaseException as error:  # noqa: BLE001  # an interruption is an answer too
            answer = {"error": type(error).__name__, "message": str(error)[:500]}
        say({**answer, "seconds": time.monotonic() - began})


if __name__ == "__main__":
    main()
