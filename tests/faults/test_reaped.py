"""Rows 8.1 and 7.2, reaped: what the server does to instances that it takes for dead. Waits once for the grace, 30 s.

The server publishes what a reaped instance had reserved, when the write TTL is not over by then. By default it is: the
grace of a client that never pings is 3600 s, the write TTL 600 s. Here it is the other way round, and what it does is
bounded to what a store reserves at a time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from lmcache_sdk import LMCacheKVCacheContext
from tests.integration.cases import CHUNK
from tests.integration.patterns import same_bytes

from .clients import client
from .conftest import BOTH
from .report import Fault
from .worlds import WIDE, WIDE_BATCH, World, tokens_of, world

GRACE = 30.0
OPTIONS = ("--worker-reap-timeout-seconds", "30", "--worker-registration-grace-seconds", "30", "--l1-size-gb", "0.5")
PROOF = "grace below the write TTL: {} unwritten chunks published, of at most 16; with the default times none"


@dataclass
class Reaped:
    """A server after it has forgotten everybody, and what was there before."""

    world: World
    idle: list[LMCacheKVCacheContext] = field(default_factory=list)
    stored: list[int] = field(default_factory=lambda: tokens_of(2))
    half_done: list[int] = field(default_factory=lambda: tokens_of(24))


@pytest.fixture(scope="module")
def reaped(request: pytest.FixtureRequest, real_servers: None) -> Iterator[Reaped]:
    """A client was killed in mid-store, contexts were idle, and the grace is over."""
    release, transport = request.param
    with world(release, transport, *OPTIONS) as here:
        made = Reaped(here)
        made.idle = [here.connect(WIDE, timeout=10) for _ in range(3)]
        assert made.idle[0].store(here.values(2 * CHUNK, 1, WIDE), made.stored)
        with client(here, WIDE) as victim:
            victim.stop_in("store", 4, made.half_done, 2)
            victim.signal(signal.SIGKILL)
            victim.wait()
        end = time.monotonic() + 2 * GRACE
        while here.server.held().registrations and time.monotonic() < end:
            time.sleep(0.5)
        assert not here.server.held().registrations
        here.start_engine()
        yield made


at_both = pytest.mark.parametrize("reaped", BOTH, ids="-".join, indirect=True, scope="module")


@pytest.mark.row("8.1")
@at_both
@pytest.mark.parametrize("kind", ["retrieve", "store", "lookup"])
def test_reaped_instance(fault: Fault, reaped: Reaped, kind: str) -> None:
    here, ctx = reaped.world, reaped.idle[("retrieve", "store", "lookup").index(kind)]
    kv = here.values(2 * CHUNK, 1, WIDE)
    if kind == "retrieve":
        fault.exact(fault.timed(lambda: ctx.retrieve(reaped.stored), 4.0, kind), kv)
    elif kind == "lookup":
        assert fault.timed(lambda: ctx.lookup(reaped.stored), 4.0, kind).hit_tokens == 2 * CHUNK
    else:
        tokens = tokens_of(2)
        assert fault.timed(lambda: ctx.store(kv, tokens), 4.0, kind).written_chunks == 2
        fault.exact(here.read(tokens, model=WIDE), kv, "another reader")
    held = here.server.held()
    assert (held.read_locked, held.write_locked) == (0, 0), held


@pytest.mark.row("7.2")
@at_both
def test_reaped_in_mid_store(fault: Fault, reaped: Reaped) -> None:
    here = reaped.world
    found = here.read(reaped.half_done, model=WIDE)
    length = 0 if found is None else found.shape[2]
    right = here.values(24 * CHUNK, 2, WIDE)
    wrong = sum(
        not same_bytes(found[:, :, at : at + CHUNK], right[:, :, at : at + CHUNK])
        for at in range(0, length, CHUNK)
        if found is not None
    )
    fault.never(wrong > WIDE_BATCH, f"{wrong} unwritten chunks were published")
    if wrong:
        fault.bounded(PROOF.format(wrong))
    else:
        fault.saw("nothing unwritten was published")
