"""An engine with real paged KV blocks on CPU, driven line by line: what it stores and reads is the truth of the tests.

    python engine_blocks.py URL SPECS

Starts as play_engine.py does, then answers one JSON line on standard output to each JSON line on standard input:

    {"do": "store", "model": M, "tokens": [...], "salt": S, "seed": N}       → {"ok": true, "tokens": 512}
        fills blocks with `patterns.logical_values(seed=N)` and stores them through lmcache's engine path
    {"do": "retrieve", "model": M, "tokens": [...], "salt": S, "file": F}    → {"ok": true, "tokens": 512}
        zeroes blocks, looks up, retrieves what was found, writes it to F: raw bytes, logical order [plane, layer,
        token, head, dim]
    {"do": "quit"}

A store's reply comes before its objects are readable (lmcache-driven stores end in the background): poll a lookup. A
command that fails answers {"ok": false, "error": text}. Blocks are taken in a shuffled order, another one for each
command, so that a server that ignored the block ids would not pass.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from uuid import uuid4

import torch

if TYPE_CHECKING:
    from .patterns import logical_values, raw_bytes
    from .play_engine import CHUNK_SIZE, EngineClient, Spec, Worker, parse_specs, register_all
else:  # run as a script: this folder is on the path, its package is not
    from patterns import logical_values, raw_bytes
    from play_engine import CHUNK_SIZE, EngineClient, Spec, Worker, parse_specs, register_all

# By name: the checker of this project has no lmcache to look into.
torch_dev: Any = import_module("lmcache").torch_dev
IPCCacheServerKey: Any = import_module("lmcache.v1.multiprocess.custom_types").IPCCacheServerKey

TIMEOUT = 60.0


def planes_and_heads(spec: Spec) -> tuple[int, int]:
    """How many planes and heads the logical tensor has; a fused cache holds both planes."""
    return (1, 1) if spec.layout == "MLA" else (2, spec.num_heads)


def write_blocks(worker: Worker, blocks: list[int], values: torch.Tensor) -> None:
    """Put `[plane, layer, token, head, dim]` into the paged caches, block by block."""
    spec = worker.spec
    num_planes, num_layers, _, *head_dim = values.shape
    # [plane, layer, block, slot, head, dim]
    paged = values.reshape(num_planes, num_layers, len(blocks), spec.block_size, *head_dim)
    for layer, cache in enumerate(worker.caches.values()):
        planes = paged[:, layer]  # [plane, block, slot, head, dim]
        if spec.layout == "HND":
            cache[blocks] = planes.permute(1, 0, 3, 2, 4)
        elif spec.layout == "NHD":
            cache[blocks] = planes.permute(1, 0, 2, 3, 4)
        elif spec.layout == "FLASH":
            cache[:, blocks] = planes
        elif spec.layout == "MLA":
            cache[blocks] = planes[0, :, :, 0]
        else:  # FUSED: one head's key, then its value
            cache[blocks] = planes.permute(1, 3, 2, 0, 4).flatten(3)


def read_blocks(worker: Worker, blocks: list[int]) -> torch.Tensor:
    """Take `[plane, layer, token, head, dim]` out of the paged caches."""
    spec = worker.spec
    layers = []
    for cache in worker.caches.values():
        if spec.layout == "HND":
            planes = cache[blocks].permute(1, 0, 3, 2, 4)
        elif spec.layout == "NHD":
            planes = cache[blocks].permute(1, 0, 2, 3, 4)
        elif spec.layout == "FLASH":
            planes = cache[:, blocks]
        elif spec.layout == "MLA":
            planes = cache[blocks][None, :, :, None]
        else:
            split = cache[blocks].reshape(len(blocks), spec.num_heads, spec.block_size, 2, spec.head_size)
            planes = split.permute(3, 0, 2, 1, 4)
        layers.append(planes.flatten(1, 2))  # [plane, token, head, dim]
    return torch.stack(layers, dim=1)


class BlockEngine:
    """The commands."""

    def __init__(self, url: str, specs: list[Spec]) -> None:
        self._connection = EngineClient(url)
        self._workers = register_all(self._connection, specs)
        self._chunk_size = CHUNK_SIZE
        self._shuffle = random.Random(len(specs))

    def store(self, model: str, tokens: list[int], salt: str, seed: int) -> dict[str, object]:
        """Fill blocks and store them."""
        worker = self._workers[model]
        whole = len(tokens) // self._chunk_size * self._chunk_size
        blocks = self._take_blocks(worker.spec, whole)
        planes, heads = planes_and_heads(worker.spec)
        shape = (planes, worker.spec.num_layers, whole, heads, worker.spec.head_size)
        write_blocks(worker, blocks, logical_values(shape, getattr(torch, worker.spec.dtype), seed))
        request_id = f"engine-{uuid4()}"
        key = self._key(worker, tokens, whole, salt, request_id, worker_id=0)
        stored = self._transfer(worker, "submit_store", request_id, key, blocks)
        self._connection.call("end_session", request_id)
        return {"ok": stored, "tokens": whole}

    def retrieve(self, model: str, tokens: list[int], salt: str, file: str) -> dict[str, object]:
        """Look up, retrieve into zeroed blocks, dump."""
        worker = self._workers[model]
        whole = len(tokens) // self._chunk_size * self._chunk_size
        request_id = f"engine-{uuid4()}"
        try:
            hit = self._lookup(self._key(worker, tokens, whole, salt, request_id, worker_id=None))
            if hit == 0:
                return {"ok": False, "tokens": 0}
            blocks = self._take_blocks(worker.spec, hit)
            for cache in worker.caches.values():
                cache.zero_()
            key = self._key(worker, tokens, hit, salt, request_id, worker_id=0)
            read = self._transfer(worker, "submit_retrieve", request_id, key, blocks)
            Path(file).write_bytes(raw_bytes(read_blocks(worker, blocks)))
            return {"ok": read, "tokens": hit}
        finally:
            self._connection.call("end_session", request_id)

    def _take_blocks(self, spec: Spec, num_tokens: int) -> list[int]:
        wanted = num_tokens // spec.block_size
        if wanted > spec.num_blocks:
            raise ValueError(f"{num_tokens} tokens need {wanted} blocks, the engine has {spec.num_blocks}")
        return self._shuffle.sample(range(spec.num_blocks), wanted)

    def _key(
        self, worker: Worker, tokens: list[int], end: int, salt: str, request_id: str, *, worker_id: int | None
    ) -> Any:
        # (world size, worker id) as an engine of one rank; from 0.5.5 the helper declares one reader.
        return IPCCacheServerKey.from_token_ids(
            worker.spec.model, 1, worker_id, tokens, start=0, end=end, request_id=request_id, cache_salt=salt
        )

    def _lookup(self, key: Any) -> int:
        self._connection.call("lookup", key, 1)
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            chunks = self._connection.call("query_prefetch_status", key.request_id)
            if chunks is not None:
                return int(chunks) * self._chunk_size
            time.sleep(0.01)
        raise TimeoutError("the lookup did not end")

    def _transfer(self, worker: Worker, method: str, request_id: str, key: Any, blocks: list[int]) -> bool:
        transfer = worker.transfer
        if hasattr(transfer, "create_recorded_event"):  # from 0.5.5
            event = transfer.create_recorded_event()
        else:
            event = torch_dev.Event(interprocess=True)
            event.record(torch_dev.current_stream())
        submit = getattr(transfer, method)
        # Up to 0.5.5 a transfer names its instance, later the context knows it.
        named = "instance_id" in inspect.signature(submit).parameters
        instance = (worker.instance_id,) if named else ()
        per_chunk = self._chunk_size // worker.spec.block_size
        future = submit(request_id, key, *instance, worker.caches, [blocks], event, per_chunk)
        return bool(future.result(timeout=TIMEOUT))


def answer(engine: BlockEngine, command: dict[str, Any]) -> dict[str, object]:
    """Run one command; a failure is an answer."""
    operations: dict[str, Callable[..., dict[str, object]]] = {"store": engine.store, "retrieve": engine.retrieve}
    operation = operations[command.pop("do")]
    try:
        return operation(**command)
    except Exception as error:  # the tests print it
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def main(replies: TextIO) -> None:
    """Register, say so, obey."""
    engine = BlockEngine(sys.argv[1], parse_specs(sys.argv[2]))
    print(json.dumps({"ok": True, "registered": True}), file=replies, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        print(json.dumps(answer(engine, command)), file=replies, flush=True)
    # Leaving the usual way would wait for lmcache's threads; the parent removes what is left in shared memory.
    os._exit(0)


if __name__ == "__main__":
    # lmcache logs to standard output: keep that for the answers and send everything else to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(answers)
