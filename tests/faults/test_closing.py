"""Rows 10.2 to 10.4 and 12: closing, in every order and at every moment, and what a process has when it is done."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from pathlib import Path

import pytest

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import ConnectError, KVCacheSDKError, NotRegisteredError, SessionClosedError
from tests.fix_leaks import Snapshot, leaked_since
from tests.integration.cases import CHUNK
from tests.session.ports import closed_port

from .conftest import everywhere
from .report import Fault
from .worlds import KV, World, run_threads, tokens_of


@pytest.mark.row("10.2")
def test_use_after_close(fault: Fault, here: World) -> None:
    tokens = tokens_of(1)
    kv = here.values(CHUNK, 1)
    ctx = here.connect()
    assert ctx.store(kv, tokens)
    found = ctx.retrieve(tokens)
    for _ in range(3):
        fault.timed(ctx.close, 1.0)
    lmc_sdk.close(ctx)
    assert ctx.closed
    for call in (lambda: ctx.retrieve(tokens), lambda: ctx.lookup(tokens), lambda: ctx.store(kv, tokens)):
        fault.error(call, SessionClosedError, within=0.2)
    fault.exact(found, kv, "a tensor from before")


@pytest.mark.row("10.3")
@everywhere
def test_close_twice_with_another_open(fault: Fault, here: World) -> None:
    tokens = tokens_of(2)
    kv = here.values(len(tokens), 2)
    one, other = here.connect(), here.connect()
    assert other.store(kv, tokens)
    one.close()
    fault.error(lambda: one.retrieve(tokens), SessionClosedError, within=0.2)
    fault.timed(one.close, 0.5, "the second close")
    run_threads(4, lambda _: one.close(), timeout=5)
    fault.exact(fault.timed(lambda: other.retrieve(tokens), 2.0), kv, "the other context")
    fault.timed(other.close, 2.0, "its close")
    fault.error(lambda: other.retrieve(tokens), SessionClosedError, within=0.2)


@pytest.mark.row("10.4")
@pytest.mark.parametrize("kind", ["retrieve", "lookup", "store"])
def test_close_with_calls_in_flight(fault: Fault, here: World, kind: str) -> None:
    lists = [tokens_of(12) for _ in range(4)]
    kvs = [here.values(len(tokens), index) for index, tokens in enumerate(lists)]
    before = here.server.held()
    ctx = here.connect(timeout=20)
    for kv, tokens in zip(kvs, lists, strict=True):
        assert ctx.store(kv, tokens)
    ended: list[tuple[KVCacheSDKError, float]] = []
    running = threading.Barrier(5)

    def body(index: int) -> None:
        running.wait()
        try:
            while True:
                if kind == "store":
                    assert ctx.store(kvs[index], lists[index], f"salt {time.monotonic_ns()}") is not None
                elif kind == "lookup":
                    assert ctx.lookup(lists[index]).hit_tokens == len(lists[index])
                else:
                    fault.exact(ctx.retrieve(lists[index]), kvs[index], "until then")
        except KVCacheSDKError as error:
            ended.append((error, time.monotonic()))

    threads = [threading.Thread(target=body, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    running.wait()
    time.sleep(0.2)
    began = time.monotonic()
    fault.timed(ctx.close, 2.5, "close")
    for thread in threads:
        thread.join(5)
    assert [type(error) for error, _ in ended] == 4 * [SessionClosedError], ended
    latest = max(when for _, when in ended) - began
    assert latest <= 2.0, f"a call ended {latest:.2f} s after close began"
    here.settled(before, timeout=4)
    fault.saw(f"{kind}: 4 × SessionClosedError after {latest:.1f} s, 0 locks, 0 sessions")


@pytest.mark.row("10.4")
@pytest.mark.parametrize("kind", ["retrieve", "lookup"])
def test_close_with_calls_in_flight_on_a_frozen_server(fault: Fault, here: World, kind: str) -> None:
    tokens = tokens_of(4)
    kv = here.values(len(tokens), 3)
    before = here.server.held()
    ctx = here.connect(timeout=20)
    assert ctx.store(kv, tokens)
    ended: list[KVCacheSDKError] = []

    def body() -> None:
        try:
            (ctx.retrieve if kind == "retrieve" else ctx.lookup)(tokens)
        except KVCacheSDKError as error:
            ended.append(error)

    with here.frozen():
        threads = [threading.Thread(target=body) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        fault.timed(ctx.close, 3.0, "close")
        for thread in threads:
            thread.join(3)
        assert [type(error) for error in ended] == 4 * [SessionClosedError], ended
    here.settled(before, timeout=4)
    fault.saw("4 × SessionClosedError; after the freeze 0 locks, 0 sessions")


@pytest.mark.row("12.1")
def test_close_one_of_two(fault: Fault, here: World) -> None:
    tokens = tokens_of(2)
    kv = here.values(len(tokens), 4)
    one, other = here.connect(), here.connect()
    assert one.store(kv, tokens)
    one.close()
    fault.exact(other.retrieve(tokens), kv, "the other")
    assert other.store(kv, tokens, "again")


@pytest.mark.row("12.2")
@everywhere
def test_50_cycles(fault: Fault, here: World) -> None:
    tokens = tokens_of(1)
    kv = here.values(CHUNK, 5)
    with lmc_sdk.connect(here.server.url, here.server.http_url, KV, 20.0) as ctx:
        assert ctx.store(kv, tokens)
    registered, before = here.server.held(), Snapshot.take()
    server_fds = _num_descriptors(here.server.pid)
    began = time.monotonic()
    for _ in range(50):
        with lmc_sdk.connect(here.server.url, here.server.http_url, KV, 20.0) as ctx:
            fault.exact(ctx.retrieve(tokens), kv, "each time")
    each = (time.monotonic() - began) / 50
    assert leaked_since(before) == []
    here.settled(registered)
    more = _num_descriptors(here.server.pid) - server_fds
    assert more <= 4, f"the server has {more} descriptors more"
    fault.saw(f"{each * 1000:.0f} ms each; fds +0, threads +0, registrations +0")


def _num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.row("12.3")
@pytest.mark.parametrize("cause", ["refused", "model", "zmq refused", "transport"])
def test_30_failed_connects(fault: Fault, here: World, cause: str) -> None:
    server, nobody = here.server, closed_port()
    wrong_transport = "inline" if here.transport == "shm" else "shm"
    url = f"tcp://127.0.0.1:{nobody}" if cause == "zmq refused" else server.url
    http_url = f"http://127.0.0.1:{nobody}" if cause == "refused" else server.http_url
    model = "nobody's" if cause == "model" else KV
    before, registered = Snapshot.take(), server.held()
    kept = []  # an error that is kept must not keep anything open
    for _ in range(30):
        with pytest.raises(KVCacheSDKError) as raised:
            lmc_sdk.connect(url, http_url, model, 5.0, transport=wrong_transport if cause == "transport" else None)  # type: ignore[arg-type]
        kept.append(raised.value)
    gc.disable()
    try:
        assert leaked_since(before, grace=1.0) == []
    finally:
        gc.enable()
    expected = {"model": NotRegisteredError, "refused": ConnectError, "zmq refused": ConnectError}
    assert all(isinstance(error, expected.get(cause, KVCacheSDKError)) for error in kept)
    here.settled(registered)
    fault.saw(f"{cause}: fds +0, threads +0, registrations +0")


@pytest.mark.row("12.4")
def test_20_dropped_contexts(fault: Fault, here: World) -> None:
    tokens = tokens_of(1)
    kv = here.values(CHUNK, 6)
    before, registered = Snapshot.take(), here.server.held()
    warned: list[str] = []

    def note(message: Warning | str, *_: object, **__: object) -> None:
        warned.append(str(message))  # the warning itself holds the context

    with warnings.catch_warnings():
        warnings.simplefilter("always", ResourceWarning)
        warnings.showwarning = note  # put back by the block
        for _ in range(20):
            ctx = lmc_sdk.connect(here.server.url, here.server.http_url, KV, 20.0)
            ctx.store(kv, tokens)
            fault.exact(ctx.retrieve(tokens), kv, "each")
            del ctx
        gc.collect()
    assert len(warned) == 20 and all("dropped without close" in text for text in warned), warned
    assert leaked_since(before) == []
    here.settled(registered)
    fault.saw("20 × ResourceWarning; fds +0, threads +0, registrations +0")
