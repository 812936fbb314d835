"""Every lie in a store is a RemoteProtocolError before a byte is written, and nothing unwritten is ever published."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from lmcache_sdk import DeadlineExceededError, Fate, RemoteProtocolError, StoreRejectedError
from lmcache_sdk import protocol as p
from tests.facade.rig import CHUNK, TOKENS, Rig, kv, raw
from tests.fix_fake_server import Action
from tests.fix_faults import changed, instead, late, payload, says, silence, value, wrong_opcode

pytestmark = pytest.mark.usefixtures("hasty")

Prepared = p.PreparedStore


def bent(index: int, **changes: Any) -> Callable[[Prepared], Prepared]:
    """Changes fields of one slot."""

    def bend(reply: Prepared) -> Prepared:
        slots = []
        for at, slot in enumerate(reply.slots or ()):
            fields = {"offset": slot.offset, "length": slot.length, "shape": slot.shape, "dtype": slot.dtype}
            slots.append(p.Slot(**{**fields, **(changes if at == index else {})}))
        return Prepared(tuple(slots), reply.chunk_indices)

    return bend


def indices(*chosen: int) -> Callable[[Prepared], Prepared]:
    return lambda reply: Prepared(reply.slots, chosen)


def slots_of(reply: Prepared) -> tuple[p.Slot, ...]:
    assert reply.slots is not None
    return reply.slots


LIES: Final[dict[str, Callable[[Prepared], Prepared]]] = {
    "duplicate index": indices(0, 1, 1),
    "index out of range": indices(0, 1, 3),
    "index far out of range": indices(0, 1, 2**21),
    "negative index": indices(-1, 0, 1),
    "indices out of order": indices(2, 1, 0),
    "too few indices": indices(0, 1),
    "too many indices": indices(0, 1, 2, 3),
    "more slots than chunks": lambda reply: Prepared((*slots_of(reply), slots_of(reply)[0]), (0, 1, 2, 3)),
    "the same slot twice": lambda reply: Prepared((slots_of(reply)[0],) * 3, reply.chunk_indices),
    "overlapping": lambda reply: bent(1, offset=slots_of(reply)[0].offset + 4)(reply),
    "negative offset": bent(0, offset=-4096),
    "offset behind the pool": bent(0, offset=2**40),
    "straddling the end": bent(2, offset=64 * 4096 - 4),
    "misaligned": bent(2, offset=3 * 4096 * 4 + 2),
    "length too short": bent(1, length=252),
    "length zero": bent(1, length=0),
    "length huge": bent(1, length=2**62),
    "another shape of the same bytes": bent(1, shape=(2, 4, 4, 2)),
    "flat": bent(1, shape=(64,)),
    "one plane of the same bytes": bent(1, shape=(1, 4, 4, 4)),
    "another dtype of the same bytes": bent(1, dtype="int32"),
    "another dtype": bent(1, dtype="float16", length=128),
    "a dtype of another module": bent(1, dtype="nn"),
}


def nothing_published(rig: Rig) -> None:
    assert all(rig.cached(index) is None for index in range(3))
    assert rig.server.held().unwritten == 0 and rig.server.held().stolen == 0


@pytest.mark.parametrize("lie", LIES)
def test_slots_that_cannot_be(shm_rig: Rig, lie: str) -> None:
    ctx = shm_rig.connect()
    inside = len(shm_rig.server.objects)
    assert shm_rig.server.pool is not None
    before = bytes(shm_rig.server.pool)
    shm_rig.server.on(p.PrepareStore, changed(LIES[lie]))
    with pytest.raises(RemoteProtocolError) as caught:
        ctx.store(kv(), TOKENS)
    assert "prepare_store" in caught.value.path or "slot" in caught.value.path
    assert bytes(shm_rig.server.pool) == before and len(shm_rig.server.objects) == inside
    nothing_published(shm_rig)
    began = time.monotonic()
    with pytest.raises(StoreRejectedError, match="until the server's write TTL") as refused:
        ctx.store(kv(), TOKENS)
    assert time.monotonic() - began < 3.0 and refused.value.fate is Fate.NOT_SENT
    assert ctx.store(kv(seed=1), [7, *TOKENS[1:]])
    ctx.close()
    nothing_published(shm_rig)
    own = {request.registration.instance_id for request in shm_rig.server.asked(p.Register)[:1]}
    assert own & set(shm_rig.server.instances) == own  # it does not leave: the server would publish the slots


@pytest.mark.parametrize(
    "lie",
    [payload(b"\xc1"), payload(b""), value([]), value({}), value({"context": {"slots": "x"}}), wrong_opcode],
    ids=["garbage", "empty", "list", "no context", "str", "operation"],
)
def test_a_reservation_that_is_no_answer(shm_rig: Rig, lie: Action) -> None:
    ctx = shm_rig.connect()
    shm_rig.server.on(p.PrepareStore, lie)
    with pytest.raises(RemoteProtocolError):
        ctx.store(kv(), TOKENS)
    ctx.close()
    nothing_published(shm_rig)
    assert len(shm_rig.server.asked(p.CommitStore)) == 1  # the proof's


def test_no_slots_of_a_server_that_has_a_pool(shm_rig: Rig) -> None:
    ctx = shm_rig.connect()
    shm_rig.server.on(p.PrepareStore, instead(Prepared(None, ())))
    with pytest.raises(RemoteProtocolError, match="announced a pool"):
        ctx.store(kv(), TOKENS)
    with pytest.raises(StoreRejectedError):
        ctx.store(kv(), TOKENS)
    ctx.close()
    nothing_published(shm_rig)


@pytest.mark.parametrize("lie", [payload(b"\xc1"), value("yes"), value(None), wrong_opcode])
def test_a_commit_that_is_no_answer(rig: Rig, lie: Action) -> None:
    ctx = rig.connect()
    rig.server.on(p.CommitStore, lie)
    with pytest.raises(RemoteProtocolError):
        ctx.store(kv(), TOKENS)
    assert rig.server.held().unwritten == 0


# ---- the most likely one in real life: a timeout, and a second try (FAULTS.md 6.3) -----------------------------------


def test_a_second_try_after_a_timeout_never_publishes_unwritten_slots(shm_rig: Rig) -> None:
    ctx = shm_rig.connect(call_timeout=1.0)
    shm_rig.server.on(p.PrepareStore, late(2.0))
    with pytest.raises(DeadlineExceededError):
        ctx.store(kv(), TOKENS)
    nothing_published(shm_rig)
    result = None
    for _ in range(4):
        try:
            result = ctx.store(kv(seed=9), TOKENS)
            break
        except DeadlineExceededError as error:
            assert error.fate is Fate.NOT_SENT  # noqa: PT017  # each try may end so
    assert result is not None and result
    # the first call's data, or the second's, but never the slots' old bytes
    stored = [shm_rig.cached(index) for index in range(3)]
    options = [[raw(kv(seed=s)[:, :, i * CHUNK : (i + 1) * CHUNK]) for i in range(3)] for s in (0, 9)]
    assert stored in options
    assert len(shm_rig.server.asked(p.PrepareStore)) <= 2 and shm_rig.server.held().reservations == 0


def test_the_callers_tensor_may_change_after_the_timeout(shm_rig: Rig) -> None:
    ctx = shm_rig.connect(call_timeout=1.0)
    shm_rig.server.on(p.PrepareStore, late(2.0))
    mine = kv()
    with pytest.raises(DeadlineExceededError):
        ctx.store(mine, TOKENS)
    mine.zero_()
    ctx.close()
    published = [shm_rig.cached(index) for index in range(3)]
    assert published in ([None] * 3, [raw(kv()[:, :, i * CHUNK : (i + 1) * CHUNK]) for i in range(3)])
    assert shm_rig.server.held().unwritten == 0


def test_a_close_with_a_reservation_out_does_not_unregister(shm_rig: Rig) -> None:
    ctx = shm_rig.connect(call_timeout=1.5)  # time to reserve, on a slow machine too
    shm_rig.server.on(p.PrepareStore, silence)
    with pytest.raises(DeadlineExceededError):
        ctx.store(kv(), TOKENS)
    ctx.close()
    nothing_published(shm_rig)
    assert shm_rig.server.held().reservations == 3 and len(shm_rig.server.instances) == 1


def test_an_interrupted_store_is_completed_and_then_interrupted(shm_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = shm_rig.connect()
    copied = []
    copy = torch.Tensor.copy_

    def interrupted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied.append(1)
        if len(copied) == 1:
            raise KeyboardInterrupt
        return copy(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ctx.store(kv(), TOKENS)
    monkeypatch.undo()
    assert [shm_rig.cached(i) for i in range(3)] == [raw(kv()[:, :, i * CHUNK : (i + 1) * CHUNK]) for i in range(3)]
    assert shm_rig.server.held().reservations == 0
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, kv())


def test_a_number_that_cannot_be_after_a_store(inline_rig: Rig) -> None:
    ctx = inline_rig.connect()
    inline_rig.server.on(p.QueryPrefetchStatus, says(p.PrefetchStatus(0)), says(p.PrefetchStatus(99)))
    with pytest.raises(RemoteProtocolError):
        ctx.store(kv(), TOKENS)
    assert inline_rig.server.held().read_locks == 0 and inline_rig.server.held().stolen == 0
