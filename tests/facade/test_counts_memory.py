"""What the speed of moving bytes rests on, counted: each byte is moved once, into memory that has been used before.

The servers are DevServers, whose own copies are other threads' and are not counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import pytest
import torch
import zmq

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import LMCacheKVCacheContext, StoreResult
from lmcache_sdk.devserver import DevServer, PlayedEngine, unique_shm_name
from lmcache_sdk.facade import transfer
from lmcache_sdk.layout import packing
from lmcache_sdk.protocol import Buffer
from lmcache_sdk.session import shared_memory, zmq_transport
from lmcache_sdk.session.buffers import BufferPool
from tests.facade.meter import Meter, wide
from tests.facade.moves import Moves
from tests.facade.rig import TOKENS, Rig
from tests.fix_faults import FakeClock

MIB: Final = 2**20
CHUNK: Final = 16
WIDTH: Final = 2048
"""Elements of a row: 256 KiB a chunk of two planes, two layers and bfloat16."""
CHUNK_NBYTES: Final = 2 * 2 * CHUNK * WIDTH * 2
SMALL: Final = 4
"""Chunks that are moved in the calling thread, by memmove."""
LARGE: Final = 128
"""Chunks that torch moves, 16 MiB; their result lies in a buffer of the pool."""


@attrs.frozen
class World:
    """A context on a server of its own."""

    ctx: LMCacheKVCacheContext
    shm: bool

    def tokens(self, num_chunks: int, seed: int = 0) -> range:
        return range(seed * 100_000, seed * 100_000 + num_chunks * CHUNK)


@contextlib.contextmanager
def world(*, shm: bool) -> Iterator[World]:
    engine = PlayedEngine(model_name="m", num_layers=2, head_dim=WIDTH)
    name = unique_shm_name() if shm else ""
    with (
        DevServer(models=[engine], shm_name=name, chunk_size=CHUNK, l1_size_bytes=128 * MIB) as server,
        lmc_sdk.connect(server.url, server.http_url, "m", 20.0) as ctx,
    ):
        yield World(ctx, shm)


@pytest.fixture(params=[True, False], ids=["shm", "inline"])
def here(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(shm=request.param) as made:
        yield made


@pytest.fixture
def shm_here() -> Iterator[World]:
    with world(shm=True) as made:
        yield made


@pytest.fixture
def inline_here() -> Iterator[World]:
    with world(shm=False) as made:
        yield made


def kv_of(num_chunks: int, seed: int = 0) -> torch.Tensor:
    """Numbers of 0 to 250, exact in bfloat16; no two rows side by side are alike."""
    rows = torch.arange(2 * 2 * num_chunks * CHUNK).view(2, 2, -1, 1) * 7 + torch.arange(WIDTH) + seed
    return (rows % 251).to(torch.bfloat16)


# ---- copies ----------------------------------------------------------------------------------------------------------

PIECES: Final[dict[tuple[bool, int], list[tuple[str, int]]]] = {
    # one call for all neighbouring slots; in this thread one memmove for each piece of one layer and plane
    (True, LARGE): [("copy_", LARGE * CHUNK_NBYTES)],
    (True, SMALL): 4 * SMALL * [("memmove", CHUNK_NBYTES // 4)],
    # chunk after chunk: between them stand their headers
    (False, LARGE): 4 * LARGE * [("memmove", CHUNK_NBYTES // 4)],
    (False, SMALL): 4 * SMALL * [("memmove", CHUNK_NBYTES // 4)],
}


@pytest.mark.parametrize("num_chunks", [SMALL, LARGE], ids=["small", "large"])
def test_a_store_moves_each_byte_once(here: World, monkeypatch: pytest.MonkeyPatch, num_chunks: int) -> None:
    kv, tokens = kv_of(num_chunks), here.tokens(num_chunks)
    with Moves(monkeypatch) as moves:
        stored = here.ctx.store(kv, tokens)
    assert stored == StoreResult(num_chunks, 0, 0, 0, "")
    assert moves.made == PIECES[here.shm, num_chunks]
    with Moves(monkeypatch) as moves:
        here.ctx.store(kv, tokens)
    assert moves.made == []


@pytest.mark.parametrize("num_chunks", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("into_out", [False, True], ids=["result", "out"])
def test_a_retrieve_moves_each_byte_once(
    here: World, monkeypatch: pytest.MonkeyPatch, num_chunks: int, *, into_out: bool
) -> None:
    kv, tokens = kv_of(num_chunks), here.tokens(num_chunks)
    assert here.ctx.store(kv, tokens)
    out = torch.zeros_like(kv) if into_out else None
    with Moves(monkeypatch) as moves:
        found = here.ctx.retrieve(tokens, out=out)
    assert found is not None and torch.equal(found, kv)
    assert out is None or found.data_ptr() == out.data_ptr()
    assert moves.made == PIECES[here.shm, num_chunks]


def test_slots_with_a_gap_between_them_are_one_more_run(shm_here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores with another between them: their slots are two runs."""
    kv, tokens, half = kv_of(LARGE), shm_here.tokens(LARGE), LARGE // 2 * CHUNK
    ctx = shm_here.ctx
    assert ctx.store(kv[:, :, :half], tokens[:half]) and ctx.store(kv_of(3), shm_here.tokens(3, seed=1))
    with Moves(monkeypatch) as moves:
        assert ctx.store(kv, tokens) == StoreResult(LARGE // 2, LARGE // 2, 0, 0, "")
    assert moves.made == [("copy_", kv.nbytes // 2)]
    with Moves(monkeypatch) as moves:
        found = ctx.retrieve(tokens)
    assert found is not None and torch.equal(found, kv)
    assert moves.made == 2 * [("copy_", kv.nbytes // 2)]


def test_a_view_moves_nothing(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inline its tensors lie in the message, as zmq has received it."""
    kv, tokens = kv_of(LARGE), here.tokens(LARGE)
    assert here.ctx.store(kv, tokens)
    places = received_places(monkeypatch)
    with Moves(monkeypatch) as moves, here.ctx.view(tokens) as chunks:
        pool = here.ctx._now.endpoint.session.pool
        if pool is not None:
            places.append((address(pool.buffer), pool.size))
        assert len(places) == 1 and len(chunks) == LARGE
        (start, nbytes), ends = places[0], [chunk.data_ptr() + CHUNK_NBYTES for chunk in chunks]
        assert all(start + CHUNK_NBYTES <= end <= start + nbytes for end in ends)
    assert moves.made == []


def test_what_a_server_sends_inline_is_copied_out_of_its_message_only(
    inline_here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, tokens = kv_of(LARGE), inline_here.tokens(LARGE)
    assert inline_here.ctx.store(kv, tokens)
    places, sources = received_places(monkeypatch), []
    real = packing._copy

    def copy(source: torch.Tensor, out: torch.Tensor) -> None:
        sources.append(source.data_ptr())
        real(source, out)

    monkeypatch.setattr(packing, "_copy", copy)
    assert inline_here.ctx.retrieve(tokens) is not None
    ((start, nbytes),) = places
    assert len(sources) == LARGE and all(start <= source < start + nbytes for source in sources)


def received_places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where each large frame that is received from now on lies in zmq's own message: address and bytes."""
    places: list[tuple[int, int]] = []
    real = zmq_transport.ZmqTransport._receive_now

    def receive(self: zmq_transport.ZmqTransport) -> list[Buffer] | None:
        frames = real(self)
        large = [frame for frame in frames or () if len(frame) >= CHUNK_NBYTES]
        assert all(isinstance(frame, memoryview) and isinstance(frame.obj, zmq.Frame) for frame in large)
        places.extend((address(frame), len(frame)) for frame in large if isinstance(frame, memoryview))
        return frames

    monkeypatch.setattr(zmq_transport.ZmqTransport, "_receive_now", receive)
    return places


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


# ---- memory that is used again ---------------------------------------------------------------------------------------


def test_an_inline_store_writes_into_the_message_of_the_one_before(
    inline_here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And zmq takes it as it is: its own message, whose bytes are counted and not copied."""
    sent: list[tuple[int, int]] = []
    copied: list[int] = []
    real = zmq_transport._message_of

    def message_of(frame: Buffer) -> Any:
        message = real(frame)
        if isinstance(frame, memoryview) and message is not frame:
            sent.append((address(frame), len(frame)))
        else:
            copied.append(len(frame))
        return message

    made: list[int] = []

    def message_buffer(nbytes: int) -> memoryview:
        made.append(nbytes)
        return zmq_transport.message_buffer(nbytes)

    monkeypatch.setattr(transfer, "message_buffer", message_buffer)
    monkeypatch.setattr(zmq_transport, "_message_of", message_of)
    monkeypatch.setattr(transfer, "_INLINE_BATCH_NBYTES", 2 * CHUNK_NBYTES)
    for seed in range(3):
        assert inline_here.ctx.store(kv_of(8, seed), inline_here.tokens(8, seed))
    size = 140 + 2 * (33 + CHUNK_NBYTES)
    assert made == 2 * [size]  # two are on their way at a time, whatever is stored and how often
    assert len(sent) == 3 * 4 and {length for _, length in sent} == {size} and len({place for place, _ in sent}) == 2
    assert max(copied) < 4096


def test_the_memory_of_a_dropped_result_is_the_next_ones(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, tokens = kv_of(LARGE), here.tokens(LARGE)
    assert here.ctx.store(kv, tokens)
    made: list[int] = []
    real = BufferPool.lend
    first = here.ctx.retrieve(tokens)
    assert first is not None and first.nbytes >= 8 * MIB
    place = first.data_ptr()
    second = here.ctx.retrieve(tokens)
    assert second is not None and second.data_ptr() != place
    del first

    def lend(self: BufferPool, nbytes: int) -> memoryview | None:
        made.append(nbytes)
        return real(self, nbytes)

    monkeypatch.setattr(BufferPool, "lend", lend)
    for turn in range(3):
        again = here.ctx.retrieve(tokens)
        assert again is not None and again.data_ptr() == place
        assert made == (turn + 1) * [kv.nbytes]
        del again
    assert torch.equal(second, kv)


def test_the_pools_pages_are_faulted_in_once(shm_here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all slots of a store, and none for what was written or read before."""
    advised: list[tuple[int, int]] = []
    real = shared_memory._advise

    def advise(mapping: Any, offset: int, length: int, advice: int) -> None:
        advised.append((length, advice))
        real(mapping, offset, length, advice)

    kv, tokens, ctx = kv_of(LARGE), shm_here.tokens(LARGE), shm_here.ctx
    monkeypatch.setattr(shared_memory, "_advise", advise)
    assert ctx.store(kv, tokens)
    write = shared_memory._ADVICE[shared_memory._WRITABLE]
    assert {advice for _, advice in advised} == {write}
    assert kv.nbytes <= sum(length for length, _ in advised) <= kv.nbytes + 2 * MIB
    del advised[:]
    for _ in range(2):
        assert ctx.retrieve(tokens) is not None
    assert advised == []


def faults(place: int, nbytes: int) -> int:
    """Minor page faults of this thread while it fills memory."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(place, 7, nbytes)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_a_recycled_buffer_has_its_pages() -> None:
    """A fresh one takes a fault for each page, of whichever size the kernel gives: at least one for every 2 MiB."""
    pool, nbytes = BufferPool(64 * MIB), 8 * MIB
    counted: list[int] = []
    for _ in range(4):
        view = pool.lend(nbytes)
        assert view is not None
        place = address(view)
        counted.append(faults(place, nbytes))
        del view
    assert counted[0] >= nbytes // (2 * MIB)
    assert min(counted[1:]) == 0  # all of them, unless the kernel was so short of memory that it took idle pages


@pytest.mark.parametrize("name", ["retrieve", "retrieve out", "view", "store"])
def test_python_allocates_the_same_whatever_the_bytes(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """12 KiB or 12 MiB in as many chunks: what is not a tensor does not grow."""
    peaks = [allocated(clock, monkeypatch, name, hidden) for hidden in (64, 65_536)]
    assert abs(peaks[1] - peaks[0]) < 16_384


def allocated(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, name: str, hidden: int) -> int:
    """The peak of what Python allocates during one call."""
    monkeypatch.setattr("tests.facade.rig.POOL_NBYTES", 64 * MIB)
    with Rig(shm=True) as rig:
        rig.engines.clear()
        ctx = Meter(rig, clock, monkeypatch).connect(layout=wide(hidden))
        kv = torch.ones(2, 2, len(TOKENS), hidden)
        calls: dict[str, Callable[[str], object]] = {
            "retrieve": lambda salt: ctx.retrieve(TOKENS, salt),
            "retrieve out": lambda salt: ctx.retrieve(TOKENS, salt, out=kv),
            "view": lambda salt: ctx.view(TOKENS, salt).__enter__().__exit__(None, None, None),
            "store": lambda salt: ctx.store(kv, TOKENS, salt + "new"),
        }
        for salt in ("warm", "cold"):
            assert ctx.store(kv, TOKENS, salt)
        calls[name]("warm")
        tracemalloc.start()
        try:
            calls[name]("cold")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
