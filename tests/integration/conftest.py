"""Fixtures of the real-server tests: one server and one engine for each (release, transport), shared by all its tests.

Contract: every test here carries the mark `interop`. Without the environment that make_env.py builds they are
skipped, or fail when LMCACHE_SDK_REQUIRE_INTEROP=1. `pair` checks after every test that the server holds what it held
before: no lock, session, prefetch job or registration more. pytest sorts the tests by the session's parameter, so one
server is alive at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import LMCacheKVCacheContext

from .cases import ALL_MODELS, models_of
from .make_env import RELEASES, is_present
from .servers import Engine, EngineShape, RealServer, Transport

HERE = Path(__file__).resolve().parent
TRANSPORTS: tuple[Transport, ...] = ("shm", "inline")
PAIRS = [(release, transport) for release in RELEASES for transport in TRANSPORTS]
CONNECT_TIMEOUT = 30.0


@dataclass(frozen=True)
class Pair:
    """A running server of one release with one transport, and the engine that registered the models."""

    release: str
    transport: Transport
    server: RealServer
    engine: Engine

    @property
    def models(self) -> dict[str, EngineShape]:
        """What the engine registered."""
        return self.engine.models

    def connect(self, model: str) -> LMCacheKVCacheContext:
        """A context on a model; the transport is asserted, for a silent other one would test nothing."""
        context = lmc_sdk.connect(self.server.url, self.server.http_url, model, CONNECT_TIMEOUT)
        try:
            assert context.transport == self.transport
        except BaseException:
            context.close()
            raise
        return context


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; drop the models that a release cannot be told."""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.interop)
            # The first test of a pair starts a server and an engine inside its own time.
            item.add_marker(pytest.mark.timeout(300))
        (dropped if _cannot_be(item) else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def _cannot_be(item: pytest.Item) -> bool:
    call: object = getattr(item, "callspec", None)
    parameters: dict[str, object] = getattr(call, "params", {})
    pair, model = parameters.get("running_pair"), parameters.get("model")
    return isinstance(pair, tuple) and model in ALL_MODELS and model not in models_of(pair[0])


@pytest.fixture(scope="session", autouse=True)
def pyzmq_collector() -> None:
    """Starts the thread that pyzmq keeps for the process once a long frame was sent without a copy.

    It comes with the first large inline store, and would be taken for what that test left behind.
    """
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        right.bind("inproc://collector")
        left.connect("inproc://collector")
        left.send(bytes(2 * zmq.COPY_THRESHOLD), copy=False)
        right.recv()


@pytest.fixture(scope="session")
def interop_env() -> None:
    """The environment of the real servers is there."""
    if is_present():
        return
    hint = "no real servers here: run tests/integration/make_env.py"
    if os.environ.get("LMCACHE_SDK_REQUIRE_INTEROP") == "1":
        pytest.fail(hint, pytrace=False)
    pytest.skip(hint)


@pytest.fixture(scope="session", params=PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def running_pair(
    request: pytest.FixtureRequest, interop_env: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """One server and its engine, for all tests of that pair."""
    release, transport = request.param
    log_dir = tmp_path_factory.mktemp(f"{release}-{transport}")
    with (
        RealServer(release, transport=transport, log_dir=log_dir) as server,
        Engine(server, models_of(release), blocks=True) as engine,
    ):
        yield Pair(release, transport, server, engine)


@pytest.fixture
def pair(running_pair: Pair) -> Iterator[Pair]:
    """The pair, and after the test the proof that nothing was left on its server."""
    before = running_pair.server.held()
    yield running_pair
    assert running_pair.server.wait_until_held(before) == before
