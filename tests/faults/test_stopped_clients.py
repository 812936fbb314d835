"""Row 7: a client is killed or stopped in the middle of a copy, on servers whose locks live for seconds.

What a SIGKILL in mid-store leaves behind is the server's: it has no way to abort a reservation, and up to 0.5.5 it
makes unwritten slots readable when their time is over. What the client can do is bound it: two batches of 32 MiB
reserved, one of them being copied.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from lmcache_sdk import DeadlineExceededError
from tests.integration.cases import CHUNK
from tests.integration.patterns import same_bytes

from .clients import client
from .conftest import BOTH, SHM_EVERYWHERE
from .report import Fault
from .worlds import WIDE, WIDE_BATCH, World, tokens_of, world

READ_TTL, WRITE_TTL = 5, 8
OPTIONS = ("--l1-size-gb", "0.25", "--l1-read-ttl-seconds", str(READ_TTL), "--l1-write-ttl-seconds", str(WRITE_TTL))
NUM_CHUNKS = 40
STOP_AT = WIDE_BATCH + 4
"""In the third batch."""
PUBLISHES_GARBAGE = ("0.5.0",)
"""Of the releases here: slots that were never committed become readable when the write TTL is over."""


@pytest.fixture(scope="module")
def hasty_world(request: pytest.FixtureRequest, real_servers: None) -> Iterator[World]:
    """A server whose locks live for seconds and whose pool is 64 chunks of WIDE."""
    release, transport = request.param
    with world(release, transport, *OPTIONS) as made:
        yield made


@pytest.fixture
def hasty(hasty_world: World) -> Iterator[World]:
    """The same, empty. What dead clients leave is looked at by the tests themselves."""
    hasty_world.server.clear()
    yield hasty_world
    hasty_world.contexts.close()


on_shm = pytest.mark.parametrize("hasty_world", SHM_EVERYWHERE, ids="-".join, indirect=True, scope="module")
on_all = pytest.mark.parametrize("hasty_world", [*SHM_EVERYWHERE, BOTH[1]], ids="-".join, indirect=True, scope="module")


def wrong_chunks(here: World, tokens: list[int], seed: int) -> int:
    """How many chunks a new reader gets whose bytes nobody stored."""
    found = here.read(tokens, model=WIDE)
    if found is None:
        return 0
    right = here.values(len(tokens), seed, WIDE)
    starts = range(0, found.shape[2], CHUNK)
    return sum(not same_bytes(found[:, :, at : at + CHUNK], right[:, :, at : at + CHUNK]) for at in starts)


def crowd(here: World, count: int = 20) -> dict[int, list[int]]:
    """Others' sequences of four chunks, enough to use all that is free of the pool; tokens by their seed."""
    stored = {}
    other = here.connect(WIDE, timeout=30)
    for seed in range(100, 100 + count):
        stored[seed] = tokens_of(4)
        other.store(here.values(4 * CHUNK, seed, WIDE), stored[seed])
    return stored


def wait_for_write_ttl(began: float) -> None:
    time.sleep(max(0.0, began + WRITE_TTL + 2.0 - time.monotonic()))


@pytest.mark.row("7.1")
@on_all
def test_killed_in_mid_store(fault: Fault, hasty: World) -> None:
    tokens, seed = tokens_of(NUM_CHUNKS), 1
    others, kv = hasty.connect(WIDE, timeout=30), hasty.values(NUM_CHUNKS * CHUNK, seed, WIDE)
    fresh, fresh_kv = tokens_of(2), hasty.values(2 * CHUNK, 2, WIDE)
    with client(hasty, WIDE) as victim:
        began = time.monotonic()
        victim.stop_in("store", STOP_AT, tokens, seed)
        victim.signal(signal.SIGKILL)
        victim.wait()
    locked = hasty.server.held().write_locked
    assert locked <= WIDE_BATCH
    if hasty.transport == "shm":
        assert locked > 0, "the client was not stopped between PREPARE and COMMIT"
        again = others.store(kv, tokens)
        if time.monotonic() < began + WRITE_TTL:
            fault.never(bool(again), "True for chunks that a dead client holds")
            assert 0 < again.missing_chunks <= NUM_CHUNKS - WIDE_BATCH and again.reason, again
    assert others.store(fresh_kv, fresh)
    fault.exact(others.retrieve(fresh), fresh_kv, "other sequences")
    # what was published before the kill is whole
    assert wrong_chunks(hasty, tokens, seed) == 0
    wait_for_write_ttl(time.monotonic() - 1.0)
    wrong = wrong_chunks(hasty, tokens, seed)
    limit = WIDE_BATCH if hasty.release in PUBLISHES_GARBAGE else 0
    fault.never(wrong > limit, f"{wrong} unwritten chunks are served, more than {limit}")
    stored = others.store(kv, tokens)
    assert stored, stored
    if not wrong:
        fault.exact(others.retrieve(tokens), kv, "after the TTL")
    if locked:
        served = f", after which {wrong} unwritten chunks are served" if wrong else ""
        fault.bounded(f"{locked} of {NUM_CHUNKS} chunks blocked until the write TTL{served}")


@pytest.mark.row("7.2")
@on_shm
@pytest.mark.parametrize("how", ["close", "exit"])
def test_half_done_client_leaves(fault: Fault, hasty: World, how: str) -> None:
    """It gives up a store on a frozen server and goes; the server then does what it was asked."""
    tokens, seed = tokens_of(8), 3
    for filler, filled in crowd(hasty).items():  # so that free slots hold somebody's bytes
        assert wrong_chunks(hasty, filled, filler) == 0
    hasty.server.clear()
    with client(hasty, WIDE, timeout=1.0) as victim:
        with hasty.frozen():
            answer = victim.ask(do="store", tokens=tokens, seed=seed)
            assert answer["error"] == DeadlineExceededError.__name__, answer
            began = time.monotonic()
            if how == "close":
                closed = victim.ask(do="close")
                assert float(str(closed["seconds"])) <= 3.0, closed
            victim.send(do="quit")
            assert victim.wait() == 0
            assert time.monotonic() - began <= 6.0
        time.sleep(0.5)
        assert hasty.server.held().write_locked in (0, 8)
        fault.never(wrong_chunks(hasty, tokens, seed) > 0, "unwritten slots were published")
    wait_for_write_ttl(began)
    wrong = wrong_chunks(hasty, tokens, seed)
    if hasty.release in PUBLISHES_GARBAGE and wrong:
        fault.never(wrong > WIDE_BATCH, f"{wrong} unwritten chunks are served")
        fault.bounded(f"{how}: {wrong} unwritten chunks served after the write TTL")
    else:
        fault.never(wrong > 0, f"{wrong} unwritten chunks are served after the write TTL")
        fault.saw(f"{how}: nothing published that was not written")


@pytest.mark.row("7.2")
@on_shm
def test_half_done_client_closes_on_a_server_that_is_back(fault: Fault, hasty: World) -> None:
    tokens, seed = tokens_of(8), 4
    before = hasty.server.held()
    with client(hasty, WIDE, timeout=1.0) as victim:
        with hasty.frozen_for(2.2):
            answer = victim.ask(do="store", tokens=tokens, seed=seed)
            assert answer["error"] == DeadlineExceededError.__name__, answer
        assert float(str(victim.ask(do="close")["seconds"])) <= 3.0
    fault.exact(hasty.read(tokens, model=WIDE), hasty.values(len(tokens), seed, WIDE), "completed by close:")
    hasty.settled(before)


@pytest.mark.row("7.3")
@on_shm
def test_stopped_in_mid_store(fault: Fault, hasty: World) -> None:
    tokens, seed = tokens_of(NUM_CHUNKS), 5
    with client(hasty, WIDE) as victim:
        victim.stop_in("store", STOP_AT, tokens, seed)
        wait_for_write_ttl(time.monotonic())
        others = crowd(hasty)
        answer = victim.go_on()
        damaged = sum(wrong_chunks(hasty, filled, filler) for filler, filled in others.items())
        fault.never("true" in answer and bool(answer["true"]), "it reports success")
        assert answer.get("error") == "LeaseExpiredError", answer
        own = wrong_chunks(hasty, tokens, seed)
        fault.never(damaged + own > WIDE_BATCH // 2, f"{damaged} chunks of others and {own} of its own are wrong")
        # what the copy that was stopped did is the machine's; its batch was the last it touched
        if damaged or own:
            fault.bounded(f"LeaseExpiredError; {damaged} chunks of others damaged, {own} of its own unwritten")
        else:
            fault.saw("LeaseExpiredError; 0 chunks damaged")


@pytest.mark.row("7.4")
@on_shm
def test_stopped_in_mid_retrieve(fault: Fault, hasty: World) -> None:
    tokens, seed = tokens_of(WIDE_BATCH), 6
    with client(hasty, WIDE) as victim:
        assert victim.ask(do="store", tokens=tokens, seed=seed)["true"]
        victim.stop_in("retrieve", 8, tokens, seed)
        time.sleep(READ_TTL + 2.0)
        others = crowd(hasty)
        answer = victim.go_on()
        fault.never(answer.get("exact") is False, "it returned a mix of right and foreign bytes")
        assert "tokens" in answer or answer.get("error") == "LeaseExpiredError", answer
        fault.saw(f"{answer.get('tokens', answer.get('error'))} tokens, exact, after the copy was thrown away")
        damaged = sum(wrong_chunks(hasty, filled, filler) for filler, filled in others.items())
        fault.never(damaged > 0, "a retrieve damaged others")
    hasty.settled(hasty.server.held())
    assert hasty.server.held().read_locked == 0
