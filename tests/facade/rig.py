"""A whole server that can lie: FakeServer behind real sockets, with its pages, its pool and a model's engine.

The model is small: two layers of one head of four elements, chunks of four tokens, float32. `kv(...)` makes tensors of
it. With `shm` the pool is a real file under /dev/shm, so that what is tested is the whole way to the user's tensor.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import KVLayout, LMCacheKVCacheContext
from lmcache_sdk import protocol as p
from lmcache_sdk.layout import dtype_from_name, payload_of_tensors, read_stored_payload
from tests.fix_fake_server import Chunk, FakeServer
from tests.session.pages import config_page, server_pages, status_page
from tests.session.ports import HttpPort, MessagePort, Page

MODEL: Final = "org/model"
CHUNK: Final = 4
LAYOUT: Final = KVLayout(
    num_layers=2, dtype=torch.float32, num_kv_heads=1, head_dim=4, tokens_per_block=CHUNK, slots_per_block=CHUNK
)
TOKENS: Final = list(range(1000, 1000 + 3 * CHUNK))
POOL_NBYTES: Final = 64 * 4096


def status_entry(**changes: Any) -> dict[str, Any]:
    """The engine's entry in /status; keywords change its kernel group."""
    group = {
        "kernel_group_idx": 0,
        "num_layers": 2,
        "tokens_per_block": CHUNK,
        "slots_per_block": CHUNK,
        "dtype": "torch.float32",
        "engine_kv_concrete_shape": "2 x [8, 2, 1, 4, 4]",
        "engine_kv_format": "NL_X_NB_TWO_NH_BS_HS",
        "is_mla": False,
        **changes,
    }
    layout = {"num_layers": 2, "num_blocks": 8, "cache_size_per_token": 64, "kernel_groups": [group]}
    return {"model_name": MODEL, "world_size": 1, "kv_cache_layout": layout}


def kv(num_tokens: int = len(TOKENS), seed: int = 0) -> torch.Tensor:
    """KV of some tokens; every element is another number, also between seeds."""
    numbers = torch.arange(2 * 2 * num_tokens * 4, dtype=torch.float32) + 1 + seed * 10_000
    return numbers.view(2, 2, num_tokens, 4)


def chunk_of(kv: torch.Tensor, index: int) -> Chunk:
    """One chunk as another client has stored it."""
    piece = kv[:, :, index * CHUNK : (index + 1) * CHUNK].contiguous()
    return Chunk(tuple(piece.shape), str(piece.dtype).removeprefix("torch."), raw(piece))


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def inline_payload(chunks: list[Chunk], form: p.PayloadForm) -> bytes:
    """Some chunks as a server sends them inside a message."""
    tensors = [
        torch.frombuffer(bytearray(chunk.data), dtype=dtype_from_name(chunk.dtype)).view(chunk.shape)
        for chunk in chunks
    ]
    return bytes(payload_of_tensors(tensors, form))


class Rig:
    """See the module; a context manager. `server` is scripted, `http.pages` can be changed."""

    def __init__(self, release: str = "0.5.6", *, shm: bool = False) -> None:
        self.shm = shm
        self._stack = ExitStack()
        self._form = p.dialect_named(release).payload_form
        self.pool_file = Path("/dev/shm") / f"lmcache_l1_pool_test_{secrets.token_hex(6)}"
        self._pool = self._make_pool() if shm else None
        self.server = self._make_server(release)
        self.engines: dict[str, Any] = {"7": status_entry()}
        pages: dict[str, Page | Callable[[], Page]] = {**server_pages(release), "/status": self.status}
        config = "/conf" if release == "0.5.0" else "/config"
        pages[config] = config_page(shm_name="test" if shm else "")
        self.http = HttpPort(pages)
        self.port = MessagePort(self.server)
        self.contexts: list[LMCacheKVCacheContext] = []

    def _make_server(self, release: str, chunk_size: int = CHUNK) -> FakeServer:
        name = self.pool_file.name if self.shm else ""
        return FakeServer(
            release, chunk_size=chunk_size, pool=self._pool, shm_name=name, pack=self._pack, unpack=self._unpack
        )

    def restart(self, server: FakeServer | None = None, chunk_size: int = CHUNK) -> None:
        """The same addresses, another process, where nothing of anybody is left; or the same server after a cut."""
        url = self.port.url
        self.port.close()
        self.server = server or self._make_server(self.server.dialect.release, chunk_size)
        self.port = MessagePort(self.server, url)
        self._stack.enter_context(self.port)

    def _make_pool(self) -> memoryview:
        self.pool_file.touch(0o600)
        self._stack.callback(self.pool_file.unlink, missing_ok=True)
        with self.pool_file.open("r+b") as file:
            os.ftruncate(file.fileno(), POOL_NBYTES)
            mapping = mmap.mmap(file.fileno(), POOL_NBYTES)
        view = memoryview(mapping)
        self._stack.callback(mapping.close)
        self._stack.callback(view.release)
        return view

    def _pack(self, chunks: list[Chunk]) -> bytes:
        return inline_payload(chunks, self._form)

    def _unpack(self, data: memoryview, count: int) -> list[bytes]:
        tensors = read_stored_payload(data, self._form, max_nbytes=len(data))
        assert len(tensors) == count
        return [raw(tensor) for tensor in tensors]

    def status(self) -> Page:
        """/status, with the instances that are registered now."""
        return status_page(cache_context_meta=self.engines, registered_non_cuda_instance_ids=[*self.server.instances])

    def connect(
        self, timeout: float = 20.0, *, call_timeout: float | None = None, **options: Any
    ) -> LMCacheKVCacheContext:
        """A context on this server, closed at the end of the block if the test has not.

        `call_timeout` is for tests whose calls are meant to end at it: it spares the connect, which is not.
        """
        arguments = {"url": self.port.url, "http_url": self.http.url, "model_name": MODEL, **options}
        self.contexts.append(lmc_sdk.connect(timeout=timeout, **arguments))
        if call_timeout is not None:
            self.contexts[-1]._timeout = call_timeout
        return self.contexts[-1]

    def cache(self, count: int, seed: int = 0, *, salt: str = "", first: int = 0) -> torch.Tensor:
        """Puts chunks of TOKENS into the cache; gives their KV."""
        found = kv(seed=seed)
        chunks = [chunk_of(found, index) for index in range(first, first + count)]
        self.server.cache(TOKENS, chunks, model=MODEL, salt=salt, first=first)
        return found[:, :, : (first + count) * CHUNK]

    def cached(self, index: int, *, salt: str = "", tokens: list[int] | None = None) -> bytes | None:
        """The bytes of one cached chunk; None when it is not there."""
        prefix = (TOKENS if tokens is None else tokens)[: (index + 1) * CHUNK]
        found = self.server.objects.get((MODEL, salt, b"".join(token.to_bytes(4, "big") for token in prefix)))
        if found is None or self.server.pool is None or found.slot is None:
            return None if found is None else found.data
        return bytes(self.server.pool[found.slot.offset : found.slot.offset + found.slot.length])

    def said(self) -> int:
        """How many requests have come."""
        return len(self.server.requests)

    def __enter__(self) -> Rig:
        self._stack.enter_context(self.http)
        self._stack.enter_context(self.port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for context in self.contexts:
            context.close()
        self._stack.close()
        if kind is None:
            assert self.server.malformed == []
