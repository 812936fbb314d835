"""What the speed of a call rests on, counted: requests, round trips that are waited for, and bytes sent.

No timing is asserted anywhere: a slow machine must not fail what is right, nor a fast one hide what is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import pytest
import torch

from lmcache_sdk import LMCacheKVCacheContext, StoreResult
from lmcache_sdk import protocol as p
from lmcache_sdk.facade import transfer
from lmcache_sdk.protocol import codec
from lmcache_sdk.values import override
from tests.facade.meter import Cost, Meter, wide
from tests.facade.rig import CHUNK, TOKENS, Rig, kv
from tests.fix_fake_server import NOTHING
from tests.fix_faults import FakeClock, silence
from tests.session.ports import Page

pytestmark = pytest.mark.usefixtures("hasty")

Call = Callable[[LMCacheKVCacheContext], object]

FOUND: Final = ["Lookup", "QueryPrefetchStatus"]
LOOKUP_HIT: Final = [*FOUND, "FreeLookupLocks", "EndSession"]
MISS: Final = [*FOUND, "EndSession"]
CHUNK_NBYTES: Final = 64 * 4
"""Bytes of a chunk of the rig's model."""


@pytest.fixture
def meter(rig: Rig, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(rig, clock, monkeypatch)


@pytest.fixture
def shm_meter(shm_rig: Rig, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(shm_rig, clock, monkeypatch)


@pytest.fixture
def inline_meter(inline_rig: Rig, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(inline_rig, clock, monkeypatch)


# ---- requests and round trips ----------------------------------------------------------------------------------------

READS: Final[dict[str, Call]] = {
    "lookup": lambda ctx: ctx.lookup(TOKENS).hit_tokens,
    "retrieve": lambda ctx: ctx.retrieve(TOKENS),
    "retrieve out": lambda ctx: ctx.retrieve(TOKENS, out=torch.empty_like(kv())),
    "view": lambda ctx: ctx.view(TOKENS).__enter__(),
}


@pytest.mark.parametrize("name", READS)
def test_a_miss_is_one_round_trip_and_one_get(meter: Meter, name: str) -> None:
    """END_SESSION has left before /status is asked for."""
    ctx = meter.connect()
    before_get: list[str] = []

    def status() -> Page:
        before_get.extend(meter.rig.server.names()[-3:])
        return meter.rig.status()

    meter.rig.http.pages["/status"] = status
    cost = meter.of(lambda: READS[name](ctx))
    assert (cost.requests, cost.trips, cost.gets) == (MISS, 1, 1)
    assert before_get == MISS


def test_less_than_a_chunk_costs_nothing(meter: Meter) -> None:
    ctx = meter.connect()
    for call in (
        lambda: ctx.lookup(TOKENS[:3]),
        lambda: ctx.retrieve(TOKENS[:3]),
        lambda: ctx.store(kv(3), TOKENS[:3]),
    ):
        cost = meter.of(call)
        assert (cost.requests, cost.trips, cost.gets, cost.nbytes) == ([], 0, 0, 0)


@pytest.mark.parametrize("cached", [1, 3])
def test_a_lookup_that_hits_waits_for_the_answer_and_for_its_locks(meter: Meter, cached: int) -> None:
    meter.rig.cache(cached)
    ctx = meter.connect()
    cost = meter.of(lambda: ctx.lookup(TOKENS))
    assert (cost.requests, cost.trips, cost.gets) == (LOOKUP_HIT, 2, 0)


@pytest.mark.parametrize(("cached", "requests", "trips"), [(0, MISS, 2), (3, LOOKUP_HIT, 3)])
def test_a_server_that_is_not_in_order_is_asked_after_its_answer(
    rig: Rig, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, cached: int, requests: list[str], trips: int
) -> None:
    meter = Meter(rig, clock, monkeypatch, in_order=False)
    rig.cache(cached)
    ctx = meter.connect()
    cost = meter.of(lambda: ctx.lookup(TOKENS))
    assert (cost.requests, cost.trips) == (requests, trips)


@pytest.mark.parametrize("cached", [1, 3])
@pytest.mark.parametrize("name", ["retrieve", "retrieve out"])
def test_a_retrieve_prepares_all_chunks_at_once(meter: Meter, name: str, cached: int) -> None:
    meter.rig.cache(cached)
    ctx = meter.connect()
    cost = meter.of(lambda: READS[name](ctx))
    if meter.rig.shm:
        assert (cost.requests, cost.trips) == ([*FOUND, "PrepareRetrieve", "CommitRetrieve", "EndSession"], 3)
    else:
        assert (cost.requests, cost.trips) == ([*FOUND, "PrepareRetrieve", "EndSession"], 2)
    assert cost.gets == 0


def test_a_view_holds_its_locks_between_two_halves_of_a_retrieve(meter: Meter) -> None:
    meter.rig.cache(3)
    ctx = meter.connect()
    view = ctx.view(TOKENS)
    entered = meter.of(view.__enter__)
    assert (entered.requests, entered.trips, entered.gets) == ([*FOUND, "PrepareRetrieve"], 2, 0)
    read = meter.of(lambda: [chunk.sum() for chunk in view])
    assert (read.requests, read.trips) == ([], 0)
    left = meter.of(lambda: view.__exit__(None, None, None))
    assert (left.requests, left.trips) == (
        (["CommitRetrieve", "EndSession"], 1) if meter.rig.shm else (["EndSession"], 0)
    )


@pytest.mark.parametrize("name", ["lookup", "retrieve"])
@pytest.mark.parametrize("cached", [0, 3])
def test_the_end_of_a_session_is_never_waited_for(meter: Meter, name: str, cached: int) -> None:
    meter.rig.cache(cached)
    ctx = meter.connect()
    answered = meter.of(lambda: READS[name](ctx))
    meter.rig.server.on(p.EndSession, silence, silence)
    for _ in range(2):
        assert meter.of(lambda: READS[name](ctx)).trips == answered.trips
    assert ctx.store(kv(), TOKENS)


def test_a_message_holds_as_many_chunks_as_fit_and_two_are_on_their_way(
    inline_meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second range is asked for with the first, the third when the first has come."""
    cached = inline_meter.rig.cache(3)
    ctx = inline_meter.connect()
    monkeypatch.setattr(transfer, "_INLINE_BATCH_NBYTES", CHUNK_NBYTES)
    cost = inline_meter.of(lambda: ctx.retrieve(TOKENS))
    assert (cost.requests, cost.trips) == ([*FOUND, *3 * ["PrepareRetrieve"], "EndSession"], 3)
    assert isinstance(cost.answer, torch.Tensor) and torch.equal(cost.answer, cached)
    monkeypatch.setattr(transfer, "_INLINE_BATCH_NBYTES", 3 * CHUNK_NBYTES - 1)
    cost = inline_meter.of(lambda: ctx.retrieve(TOKENS))
    assert (cost.requests, cost.trips) == ([*FOUND, *2 * ["PrepareRetrieve"], "EndSession"], 2)


def test_new_chunks_are_stored_in_two_round_trips(shm_meter: Meter) -> None:
    ctx = shm_meter.connect()
    cost = shm_meter.of(lambda: ctx.store(kv(), TOKENS))
    assert cost.answer == StoreResult(3, 0, 0, 0, "")
    assert (cost.requests, cost.trips, cost.gets) == (["PrepareStore", "CommitStore", "EndSession"], 2, 0)


def test_batches_are_prepared_two_ahead(shm_meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is prepared with the first commit: three batches wait once more than one does."""
    monkeypatch.setattr(transfer, "_STORE_BATCH_NBYTES", (CHUNK_NBYTES, CHUNK_NBYTES))
    ctx = shm_meter.connect()
    two = shm_meter.of(lambda: ctx.store(kv(8), TOKENS[:8]))
    assert two.requests == [*2 * ["PrepareStore"], *2 * ["CommitStore"], "EndSession"] and two.trips == 2
    three = shm_meter.of(lambda: ctx.store(kv(seed=1), TOKENS, "other salt"))
    steps = ["PrepareStore", "PrepareStore", "CommitStore", "PrepareStore", "CommitStore", "CommitStore", "EndSession"]
    assert (three.requests, three.trips) == (steps, 3)


def test_the_share_of_the_pool_bounds_a_batch(shm_meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_STORE_BATCH_NBYTES", (1, 2**40))
    monkeypatch.setattr(transfer, "_POOL_SHARE", 64 * 4096 // (2 * CHUNK_NBYTES))
    ctx = shm_meter.connect()
    cost = shm_meter.of(lambda: ctx.store(kv(), TOKENS))
    assert [request.key.end - request.key.start for request in shm_meter.rig.server.asked(p.PrepareStore)[-2:]] == [
        8,
        4,
    ]
    assert len(cost.requests) == 5 and cost.trips == 2


def test_what_is_cached_is_prepared_once_and_looked_up_once(shm_meter: Meter) -> None:
    """Empty slots do not tell cached from full: the lookup does."""
    shm_meter.rig.cache(3)
    ctx = shm_meter.connect()
    cost = shm_meter.of(lambda: ctx.store(kv(), TOKENS))
    assert cost.answer == StoreResult(0, 3, 0, 0, "")
    assert (cost.requests, cost.trips, cost.gets) == (["PrepareStore", "EndSession", *LOOKUP_HIT], 3, 0)


def test_an_inline_store_looks_up_before_and_after(inline_meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = inline_meter.connect()
    cost = inline_meter.of(lambda: ctx.store(kv(), TOKENS))
    assert (cost.requests, cost.trips, cost.gets) == ([*MISS, "CommitStore", "EndSession", *LOOKUP_HIT], 4, 0)
    monkeypatch.setattr(transfer, "_INLINE_BATCH_NBYTES", CHUNK_NBYTES)
    cost = inline_meter.of(lambda: ctx.store(kv(), TOKENS, "other salt"))
    assert (cost.requests, cost.trips) == ([*MISS, *3 * ["CommitStore"], "EndSession", *LOOKUP_HIT], 5)


def test_an_inline_store_of_what_is_cached_looks_up_once(inline_meter: Meter) -> None:
    inline_meter.rig.cache(3)
    ctx = inline_meter.connect()
    cost = inline_meter.of(lambda: ctx.store(kv(), TOKENS))
    assert cost.answer == StoreResult(0, 3, 0, 0, "")
    assert (cost.requests, cost.trips, cost.gets) == (LOOKUP_HIT, 2, 0)


class CountedCondition(threading.Condition):
    """Lets go of `full` when that many threads wait on it at a time."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__()
        self._left = num_waiting
        self.full = threading.Event()

    @override
    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        if self._left == 0:
            self.full.set()
        return super().wait(timeout)


def test_eight_concurrent_misses_ask_twice(shm_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first asks; the answer to a question that was out already is too old for the others, who share the second."""
    ctx = shm_rig.connect()
    assert ctx.lookup(TOKENS).hit_tokens == 0
    waiting = CountedCondition(7)
    monkeypatch.setattr(ctx._now.probe, "_changed", waiting)

    def when_all_have_asked() -> Page:
        assert waiting.full.wait(10.0)
        return shm_rig.status()

    shm_rig.http.pages["/status"] = when_all_have_asked
    visits = len(shm_rig.http.visits)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ctx.retrieve, [[number, *TOKENS] for number in range(8)]))
    assert found == 8 * [None]
    assert shm_rig.http.paths[visits:] == 2 * ["/status"]


# ---- bytes sent ------------------------------------------------------------------------------------------------------


def stored(rig: Rig, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, hidden: int, num_chunks: int = 3) -> Cost:
    """A store of some chunks whose rows are that wide."""
    rig.engines.clear()
    meter = Meter(rig, clock, monkeypatch)
    ctx = meter.connect(layout=wide(hidden))
    data = torch.ones(2, 2, num_chunks * CHUNK, hidden)
    cost = meter.of(lambda: ctx.store(data, TOKENS[: num_chunks * CHUNK]))
    assert cost.answer == StoreResult(num_chunks, 0, 0, 0, "")
    return cost


@pytest.mark.parametrize("hidden", [1, 1024])
def test_a_store_in_shared_memory_sends_the_same_whatever_it_stores(
    shm_rig: Rig, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, hidden: int
) -> None:
    """192 bytes or 192 KiB: two keys with their 12 token ids, and names."""
    cost = stored(shm_rig, clock, monkeypatch, hidden)
    assert cost.nbytes == 466
    assert [len(frames) for frames in cost.messages] == [4, 5, 3]


INLINE: Final = [
    # release, head of the message, around each chunk, all other frames of the call
    ("0.5.0", 139, 33, 898),
    ("0.5.6", 139, 33, 1030),
    ("0.5.7rc2", 24, 38, 1091),
]


@pytest.mark.parametrize(("release", "head", "each", "others"), INLINE)
@pytest.mark.parametrize("hidden", [1024, 2048])
def test_an_inline_store_sends_each_byte_once_and_little_around_them(
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    head: int,
    each: int,
    others: int,
    hidden: int,
) -> None:
    """The other frames are four keys with their 12 token ids, and names: no byte of them depends on the width."""
    with Rig(release) as rig:
        cost = stored(rig, clock, monkeypatch, hidden)
    payloads = [frame for frames in cost.messages for frame in frames if len(frame) >= 64 * hidden]
    assert [len(payload) for payload in payloads] == [head + 3 * (each + 64 * hidden)]
    assert cost.nbytes - len(payloads[0]) == others


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every token list that is encoded."""
    made: list[object] = []
    real = codec._encode

    def encode(value: object) -> bytes:
        if isinstance(value, (list, bytes)) and len(value) >= len(TOKENS):
            made.append(value)
        return real(value)

    monkeypatch.setattr(codec, "_encode", encode)
    return made


WRITES: Final[dict[str, Call]] = {"store": lambda ctx: ctx.store(kv(), TOKENS, "other salt")}


@pytest.mark.parametrize("release", p.DIALECTS)
@pytest.mark.parametrize("name", ["lookup", "retrieve", "store"])
def test_token_ids_are_encoded_once_and_sent_with_every_key(
    rig: Rig, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, encoded: list[object], release: str, name: str
) -> None:
    with Rig(release, shm=rig.shm) as rig:
        meter = Meter(rig, clock, monkeypatch)
        rig.cache(3)
        ctx = meter.connect()
        encoded.clear()
        cost = meter.of(lambda: {**READS, **WRITES}[name](ctx))
        assert len(encoded) == 1
        wire = msgspec.msgpack.encode(encoded[0])
        keyed = [name for name in cost.requests if name not in {"QueryPrefetchStatus", "EndSession"}]
        assert len(keyed) >= 2
        assert sum(frame.count(wire) for frames in cost.messages for frame in frames) == len(keyed)
        assert len(wire) in {4 * len(TOKENS) + 2, 3 * len(TOKENS) + 1}
        assert rig.server.held() == NOTHING
