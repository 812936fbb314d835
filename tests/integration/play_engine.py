"""Play a serving engine on CPU: register paged KV caches with a real server, 0.5.0 to 0.5.7rc2, and stay.

    python play_engine.py URL SPECS [--once]

Run by the Python of the interop environment with that release on PYTHONPATH; it uses lmcache's own engine-side code,
so `/status` shows what a real engine would make it show. SPECS is a JSON list of objects with the fields of `Spec`.
"registered" is printed when all are. The registrations stay after the process ends, until the server's grace ends.

Servers up to 0.5.4 without a GPU read every layout as HND: give them HND (or MLA, FUSED), nothing else.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import zmq

# By name: the checker of this project has no lmcache to look into.
LayoutHints: Any = import_module("lmcache.v1.gpu_connector.utils").LayoutHints
worker_transfer: Any = import_module("lmcache.v1.multiprocess.transfer_context.worker_transfer")

# The servers of the tests are all started with this chunk size. (Asking 0.5.7 for it would freeze it.)
CHUNK_SIZE = 256
TIMEOUT = 30.0


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One model of an engine and the geometry of its paged cache."""

    model: str
    layout: str  # HND, NHD, FLASH (K/V axis first), MLA, FUSED (rank 4, K and V packed per head, HND)
    num_layers: int
    num_blocks: int
    num_heads: int
    block_size: int
    head_size: int
    dtype: str
    world_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one layer's cache."""
        blocks, heads, slots, size = self.num_blocks, self.num_heads, self.block_size, self.head_size
        return {
            "HND": (blocks, 2, heads, slots, size),
            "NHD": (blocks, 2, slots, heads, size),
            "FLASH": (2, blocks, slots, heads, size),
            "MLA": (blocks, slots, size),
            "FUSED": (blocks, heads, slots, 2 * size),
        }[self.layout]

    @property
    def hint(self) -> str:
        """What the engine says about the order of heads and tokens."""
        return "HND" if self.layout in ("HND", "FUSED") else "NHD"


class EngineClient:
    """The engine's connection: lmcache's client of whichever release is on the path."""

    def __init__(self, url: str) -> None:
        context = zmq.Context()
        self.send_request: Any = None
        try:
            factory = import_module("lmcache.v1.multiprocess.transport.factory")
        except ModuleNotFoundError:  # up to 0.5.4
            self.client: Any = import_module("lmcache.v1.multiprocess.mq").MessageQueueClient(url, context)
            adapter = import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
            self.send_request = adapter.send_lmcache_request
        else:
            self.client = factory.RequestClientFactory.create(url, context=context)

    def call(self, operation: str, *payload: object) -> Any:
        """Send one request and wait for its reply."""
        if self.send_request is None:
            future = getattr(self.client, operation)(*payload)
        else:
            request_type = import_module("lmcache.v1.multiprocess.protocol").RequestType[operation.upper()]
            future = self.send_request(self.client, request_type, list(payload))
        return future.result(timeout=TIMEOUT)


class Worker:
    """One worker of one model: its paged caches and the transfer context they are registered with."""

    def __init__(self, connection: EngineClient, spec: Spec, instance_id: int) -> None:
        self.spec = spec
        self.instance_id = instance_id
        dtype = getattr(torch, spec.dtype)
        # Registering moves the storage of these tensors into shared memory: the server reads and writes them in place.
        self.caches = {
            f"model.layers.{layer}.self_attn": torch.zeros(spec.shape, dtype=dtype) for layer in range(spec.num_layers)
        }
        arguments: dict[str, Any] = {"mode": "lmcache_driven"}
        maker = worker_transfer.create_transfer_context
        if "instance_id" in inspect.signature(maker).parameters:
            arguments.update(instance_id=instance_id, req_client=connection.client)
        self.transfer = maker(self.caches, **arguments)
        self._register(connection)

    def _register(self, connection: EngineClient) -> None:
        spec = self.spec
        hints = LayoutHints(kv_layout=spec.hint)
        named = (spec.model, spec.world_size, CHUNK_SIZE // spec.block_size)
        parameters = inspect.signature(self.transfer.register).parameters
        if "instance_id" not in parameters:  # from 0.5.6
            self.transfer.register(self.caches, *named, TIMEOUT, layout_hints=hints)
            return
        # up to 0.5.4 the context does not know how to send
        extra = {"send_request": connection.send_request} if "send_request" in parameters else {}
        self.transfer.register(
            self.instance_id, self.caches, *named, connection.client, TIMEOUT, layout_hints=hints, **extra
        )


def register_all(connection: EngineClient, specs: list[Spec]) -> dict[str, Worker]:
    """Register every rank of every model; rank 0 of each, by model."""
    # An id that is registered already keeps its old layout, so ids are never used twice.
    next_id = 1000 * int(time.time() * 1000 % 10**9)
    first_ranks: dict[str, Worker] = {}
    for spec in specs:
        for rank in range(spec.world_size):
            worker = Worker(connection, spec, next_id)
            _KEPT.append(worker)
            next_id += 1
            if rank == 0:
                first_ranks[spec.model] = worker
    forget_segment_names()
    return first_ranks


def forget_segment_names() -> None:
    """Unlink the shared memory of the caches: the server has mapped it, a name would only be left behind."""
    for segment in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
        segment.unlink()


# A worker that is collected takes its shared memory away from the server.
_KEPT: list[Worker] = []


def parse_specs(text: str) -> list[Spec]:
    """The models of a command line."""
    return [Spec(**entry) for entry in json.loads(text)]


def main() -> None:
    """Register, say so, stay."""
    url, specs = sys.argv[1], parse_specs(sys.argv[2])
    register_all(EngineClient(url), specs)
    print("registered", flush=True)
    if "--once" in sys.argv:
        os._exit(0)  # leaving the usual way would wait for lmcache's threads
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
