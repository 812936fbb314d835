"""A scripted server on real sockets: it answers as a healthy one does until it is told to lie.

Contract: `Liar` joins the FakeServer of the unit tests with its HTTP pages, a pool file when it is a shared-memory
server, and real inline payloads. Its model has chunks of four tokens, `[2, 2, 4, 8]` bfloat16. At the end of its block
nothing of a well-behaved client may be left: `judge` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import LMCacheKVCacheContext
from lmcache_sdk.layout import dtype_from_name, payload_of_tensors, read_stored_payload
from tests.fix_fake_server import Chunk, FakeServer, Held
from tests.integration.patterns import raw_bytes
from tests.integration.servers import Transport
from tests.session.pages import config_page, status_page
from tests.session.ports import HttpPort, MessagePort, Page, page

from .report import Fault

MODEL: Final = "faults/scripted"
CHUNK: Final = 4
SHAPE: Final = (2, 2, CHUNK, 8)
POOL_NBYTES: Final = 2**20
T: Final = 1.0
"""The timeout of its clients."""

LAYOUT: Final[dict[str, Any]] = {
    "num_layers": 2,
    "num_blocks": 8,
    "cache_size_per_token": 64,
    "kernel_groups": [
        {
            "num_layers": 2,
            "tokens_per_block": 2,
            "slots_per_block": 2,
            "dtype": "torch.bfloat16",
            "engine_kv_concrete_shape": "2 x [8, 2, 1, 2, 8]",
            "engine_kv_format": "NL_X_NB_TWO_NH_BS_HS",
            "is_mla": False,
        }
    ],
}
ENTRY: Final[dict[str, Any]] = {"model_name": MODEL, "world_size": 1, "kv_cache_layout": LAYOUT}


class Liar:
    """See the module; made by `liar`."""

    def __init__(self, server: FakeServer, port: MessagePort, http: HttpPort) -> None:
        self.server = server
        self.pages = http.pages
        self.pages["/status"] = self.status
        self.transport: Transport = "inline" if server.pool is None else "shm"
        self.url = port.url
        self.http_url = http.url
        self.contexts = contextlib.ExitStack()

    def status(self, **changes: Any) -> Page:
        """/status as it is at this moment, with changes."""
        known = self.server.instances
        clients = {str(each): {"model_name": known[each].model_name, "world_size": 1} for each in known}
        fields = {
            "cache_context_meta": {"1": ENTRY},
            "registered_non_cuda_instance_ids": list(known),
            "non_cuda_context_meta": clients,
        }
        return status_page(**{**fields, **changes})

    def connect(self, timeout: float = T) -> LMCacheKVCacheContext:
        """A context on its model."""
        ctx = lmc_sdk.connect(self.url, self.http_url, MODEL, timeout)
        self.contexts.callback(ctx.close)
        return ctx

    def values(self, num_tokens: int, seed: int) -> torch.Tensor:
        """A tensor as a client gives it."""
        shape = (*SHAPE[:2], num_tokens, SHAPE[3])
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
        return bits.view(torch.bfloat16)

    def cache(self, tokens: list[int], seed: int) -> torch.Tensor:
        """Puts a sequence into the cache, as another client would have; what it holds."""
        kv = self.values(len(tokens), seed)
        pieces = torch.split(kv, CHUNK, dim=2)
        self.server.cache(tokens, [Chunk(SHAPE, "bfloat16", raw_bytes(piece)) for piece in pieces], model=MODEL)
        return kv

    def payload(self, *tensors: torch.Tensor) -> bytes:
        """Tensors as this release sends them inline."""
        return bytes(payload_of_tensors(tensors, self.server.dialect.payload_form))

    def judge(self, fault: Fault, *, reservations: int = 0) -> None:
        """Nothing is held, but for reservations that nothing can complete; nobody else's lock was taken."""
        self.contexts.close()
        expected = Held(reservations=reservations)
        with self.server.changed:  # last words are not waited for by a client that leaves
            self.server.changed.wait_for(
                lambda: self.server.held() == expected and bool(self.server.instances) is bool(reservations), 2.0
            )
        held = self.server.held()
        fault.never(held.unwritten > 0, "UNREGISTER published slots that were not written")
        fault.never(held.stolen > 0, "another reader's lock was given back")
        assert held == expected, held
        assert bool(self.server.instances) is bool(reservations), "registrations left"
        assert self.server.malformed == []


@contextlib.contextmanager
def liar(release: str, transport: Transport) -> Iterator[Liar]:
    """A server of a release, for the time of a block."""
    with contextlib.ExitStack() as stack:
        pool, name = stack.enter_context(_pool()) if transport == "shm" else (None, "")
        server = FakeServer(release, chunk_size=CHUNK, pool=pool, shm_name=name)
        form = server.dialect.payload_form

        def pack(chunks: list[Chunk]) -> bytes:
            return bytes(payload_of_tensors([_tensor(chunk) for chunk in chunks], form))

        def unpack(data: memoryview, count: int) -> list[bytes]:
            tensors = read_stored_payload(data, form, max_nbytes=POOL_NBYTES)
            return [raw_bytes(tensor) for tensor in tensors]

        server._pack, server._unpack = pack, unpack
        config_path = "/conf" if release == "0.5.0" else "/config"
        http = stack.enter_context(HttpPort({"/lmc_version": page(release), config_path: config_page(shm_name=name)}))
        made = Liar(server, stack.enter_context(MessagePort(server)), http)
        stack.callback(made.contexts.close)
        yield made


def _tensor(chunk: Chunk) -> torch.Tensor:
    tensor = torch.empty(chunk.shape, dtype=dtype_from_name(chunk.dtype))
    ctypes.memmove(tensor.data_ptr(), chunk.data, len(chunk.data))
    return tensor


@contextlib.contextmanager
def _pool() -> Iterator[tuple[memoryview, str]]:
    """A pool file as a server makes it."""
    name = f"lmcache_l1_pool_liar-{os.getpid()}-{uuid4().hex[:8]}"
    path = Path("/dev/shm", name)
    with path.open("w+b") as file:
        file.truncate(POOL_NBYTES)
        mapping = mmap.mmap(file.fileno(), POOL_NBYTES)
    try:
        view = memoryview(mapping)
        yield view, name
        view.release()
        mapping.close()
    finally:
        path.unlink(missing_ok=True)
