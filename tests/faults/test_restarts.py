"""Rows 5 and 10.8: the server dies, and comes back as the same one or as another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from lmcache_sdk import (
    ConnectionLostError,
    KVCacheSDKError,
    LayoutChangedError,
    LayoutError,
    LMCacheKVCacheContext,
    NotRegisteredError,
    TransportError,
)
from tests.integration.cases import CHUNK
from tests.integration.servers import Engine, EngineShape

from .conftest import own_at_both, own_everywhere
from .report import Fault
from .test_processes import said, script
from .worlds import KV, MODELS, World, free_of_clients, tokens_of

T = 5.0


@pytest.mark.row("5.1")
@own_at_both
def test_killed_then_called(fault: Fault, own: World) -> None:
    tokens = tokens_of(2)
    kv = own.values(len(tokens), 1)
    contexts = [own.connect(timeout=T) for _ in range(3)]
    assert contexts[0].store(kv, tokens)
    found = contexts[0].retrieve(tokens)
    own.kill()
    calls: list[Callable[[LMCacheKVCacheContext], object]] = [
        lambda ctx: ctx.retrieve(tokens),
        lambda ctx: ctx.lookup(tokens),
        lambda ctx: ctx.store(kv, tokens_of(1) + tokens[CHUNK:]),
    ]
    for ctx, call in zip(contexts, calls, strict=True):
        for _ in range(2):
            error = fault.error(lambda ctx=ctx, call=call: call(ctx), TransportError, within=1.0)  # type: ignore[misc]
            assert own.server.url in str(error) or own.server.http_url in str(error), error
            assert "refused" in str(error), error
        fault.timed(ctx.close, 1.5, "close")
    fault.exact(found, kv, "a tensor from before")


@pytest.mark.row("5.2")
@own_at_both
@pytest.mark.parametrize("kind", ["retrieve", "store"])
def test_frozen_then_killed_in_a_call(fault: Fault, own: World, kind: str) -> None:
    tokens = tokens_of(2)
    kv = own.values(len(tokens), 2)
    ctx = own.connect(timeout=T)
    assert ctx.store(kv, tokens)
    ended: list[tuple[BaseException | None, float]] = []

    def call() -> None:
        try:
            ctx.retrieve(tokens) if kind == "retrieve" else ctx.store(kv, tokens_of(2))
            ended.append((None, time.monotonic()))
        except KVCacheSDKError as error:
            ended.append((error, time.monotonic()))

    own.server.freeze()
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(1.0)
    assert not ended, ended
    own.kill()
    killed = time.monotonic()
    thread.join(T)
    error, when = ended[0]
    assert isinstance(error, ConnectionLostError), error
    assert when - killed <= 1.0, f"{when - killed:.2f} s after the kill"
    fault.saw(f"{kind}: ConnectionLostError {max(0.0, when - killed):.1f} s after the kill")
    fault.timed(ctx.close, 1.5, "close")


@pytest.mark.row("5.3")
@own_at_both
def test_restarted(fault: Fault, own: World) -> None:
    """The same context goes on with the new server; nothing of before is replayed into it."""
    old, new = tokens_of(2), tokens_of(2)
    old_kv, new_kv = own.values(len(old), 3), own.values(len(new), 4)
    ctx, idle = own.connect(timeout=10), own.connect(timeout=10)
    assert ctx.store(old_kv, old)
    found = ctx.retrieve(old)
    lost: list[KVCacheSDKError] = []
    own.server.freeze()
    in_flight = threading.Thread(target=lambda: lost.append(fault.error(lambda: idle.retrieve(old), KVCacheSDKError)))
    in_flight.start()  # its LOOKUP was sent to the server that dies
    time.sleep(0.2)
    own.restart(engine=False)
    in_flight.join(12)
    assert isinstance(lost[0], ConnectionLostError), lost
    fault.error(lambda: ctx.retrieve(old), NotRegisteredError, within=1.5)
    own.start_engine()
    clean = free_of_clients(own.server.held())
    own.settled(clean)
    assert fault.timed(lambda: ctx.retrieve(old), 2.0, "retrieve: a miss") is None  # the new pool is empty
    assert fault.timed(lambda: ctx.store(new_kv, new), 2.0, "store").written_chunks == 2
    fault.exact(own.read(new), new_kv, "another reader")
    fault.exact(ctx.retrieve(new), new_kv, "retrieve")
    fault.exact(idle.retrieve(new), new_kv, "another old context")
    fault.exact(found, old_kv, "a tensor from before")
    ctx.close()
    idle.close()
    own.settled(clean)


@pytest.mark.row("5.4")
@own_everywhere
def test_restarted_and_the_old_mapping(fault: Fault, own: World) -> None:
    """Straight after the restart, without a call in between: the old segment has the same name and is dead."""
    tokens, others = tokens_of(4), tokens_of(4)
    kv, others_kv = own.values(len(tokens), 5), own.values(len(others), 6)
    ctx = own.connect(timeout=10)
    assert ctx.store(kv, tokens)
    found = ctx.retrieve(tokens)
    own.restart()
    other = own.connect()
    assert other.store(others_kv, others)  # into the slots that the first had in the old pool
    fault.exact(ctx.retrieve(others), others_kv, "what others stored")
    assert ctx.store(kv, tokens)
    fault.exact(own.read(tokens), kv, "another reader")
    fault.exact(other.retrieve(others), others_kv, "others' own")
    fault.exact(found, kv, "a tensor from before")


@pytest.mark.row("5.5")
@own_at_both
@pytest.mark.parametrize("change", ["chunk size", "layers"])
def test_restarted_as_another(fault: Fault, own: World, change: str) -> None:
    tokens = tokens_of(4)
    kv = own.values(len(tokens), 7)
    contexts = [own.connect(timeout=T) for _ in range(2)]
    assert contexts[0].store(kv, tokens)
    eight = {**MODELS, KV: EngineShape(num_layers=8)}
    if change == "chunk size":
        own.restart(chunk_size=512)
    else:
        own.restart(models=eight)
    before = free_of_clients(own.server.held())
    for ctx, call in (
        (contexts[0], lambda: contexts[0].retrieve(tokens)),
        (contexts[1], lambda: contexts[1].store(kv, tokens)),
    ):
        error = fault.error(
            call, LayoutChangedError, within=2.0, says="chunk size" if change == "chunk size" else "layout"
        )
        assert error.before != error.after
        ctx.close()
    own.settled(before)


@pytest.mark.row("5.6")
@own_at_both
def test_two_layouts_of_one_model(fault: Fault, own: World) -> None:
    model, tokens = "faults/two-layouts", tokens_of(1)
    shape = EngineShape()
    with Engine(own.server, {model: shape}):
        ctx = own.connect(model)
        assert ctx.store(own.values(CHUNK, 8), tokens)
        with Engine(own.server, {model: replace(shape, num_layers=8)}):
            error = fault.error(lambda: own.connect(model), LayoutError, within=1.0, says="different layouts")
            assert "4" in str(error) and "8" in str(error)
            fault.exact(ctx.retrieve(tokens), own.values(CHUNK, 8), "a context from before")


@pytest.mark.row("10.8")
@own_at_both
@pytest.mark.parametrize("how", ["dead", "dead-close"])
def test_server_dead_at_exit(fault: Fault, own: World, how: str) -> None:
    with script(own, "leaving", how) as child:
        assert said(child) == {"ready": True}
        own.kill()
        child.send_line("go")
        answer = said(child)
        assert answer["ended"] == "ConnectionLostError", answer
        seconds = float(str(answer["seconds"]))
        assert seconds <= 1.5, answer
        began = time.monotonic()
        assert child.wait(10) == 0
        left = time.monotonic() - began
        assert left <= T + 1.0, f"it took {left:.1f} s to exit"
    fault.saw(f"{how}: ConnectionLostError after {seconds:.1f} s, exit after {left:.1f} s")
