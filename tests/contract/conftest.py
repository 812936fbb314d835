"""The embedded server in the place of a real one: the fixtures that tests/integration/test_interop.py asks for.

What those tests demand of eight real servers they demand of the imitation too, so that it cannot drift.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import LMCacheKVCacheContext
from lmcache_sdk.devserver import DevServer, PlayedEngine, unique_shm_name
from tests.integration.cases import models_of
from tests.integration.conftest import PAIRS
from tests.integration.servers import EngineShape, Held, Transport, http_post

CONNECT_TIMEOUT = 30.0
POOL_NBYTES = 512 * 2**20


@dataclass(frozen=True)
class EmbeddedServer:
    """A DevServer with the face of tests.integration.servers.RealServer."""

    release: str
    server: DevServer

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def http_url(self) -> str:
        return self.server.http_url

    def status(self) -> dict[str, object]:
        return self.server.status()

    def held(self) -> Held:
        return Held.settled(self.status)

    def wait_until_held(self, expected: Held, timeout: float = 2.0) -> Held:
        end = time.monotonic() + timeout
        while (now := self.held()) != expected and time.monotonic() < end:
            time.sleep(0.01)
        return now

    def clear(self) -> None:
        path = "/clear-cache" if self.release == "0.5.0" else "/cache/clear"
        http_post(self.http_url + path, {"tier": "l1", "force": True})


@dataclass(frozen=True)
class EmbeddedPair:
    """As tests.integration.conftest.Pair."""

    release: str
    transport: Transport
    server: EmbeddedServer
    models: dict[str, EngineShape]

    def connect(self, model: str) -> LMCacheKVCacheContext:
        context = lmc_sdk.connect(self.server.url, self.server.http_url, model, CONNECT_TIMEOUT)
        try:
            assert context.transport == self.transport
        except BaseException:
            context.close()
            raise
        return context


def played(model: str, shape: EngineShape) -> PlayedEngine:
    return PlayedEngine(
        model_name=model,
        num_layers=shape.num_layers,
        num_kv_heads=1 if shape.layout == "MLA" else shape.num_heads,
        head_dim=shape.head_size,
        dtype={"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[shape.dtype],
        form=shape.layout,
        tokens_per_block=shape.block_size,
        num_blocks=shape.num_blocks,
        world_size=shape.world_size,
    )


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[tuple[str, Transport], EmbeddedServer]]:
    """One server for every pair, all at once: starting one for each test costs more than the tests."""
    with ExitStack() as stack:
        yield {
            (release, transport): EmbeddedServer(
                release,
                stack.enter_context(
                    DevServer(
                        speak=release,
                        shm_name=unique_shm_name() if transport == "shm" else "",
                        l1_size_bytes=POOL_NBYTES,
                        models=[played(name, shape) for name, shape in models_of(release).items()],
                    )
                ),
            )
            for release, transport in PAIRS
        }


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def pair(
    request: pytest.FixtureRequest, servers: dict[tuple[str, Transport], EmbeddedServer]
) -> Iterator[EmbeddedPair]:
    release, transport = request.param
    models = models_of(release)
    model = request.node.callspec.params.get("model")
    if model is not None and model not in models:
        pytest.skip(f"an engine cannot tell a {release} server without a GPU of this layout")
    embedded = servers[release, transport]
    before = embedded.held()
    yield EmbeddedPair(release, transport, embedded, models)
    assert embedded.wait_until_held(before) == before
