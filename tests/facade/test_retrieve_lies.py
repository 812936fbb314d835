"""Every lie in a retrieve is a RemoteProtocolError at once, and leaves nothing behind (FAULTS.md 11.1 to 11.9)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from lmcache_sdk import RemoteProtocolError
from lmcache_sdk import protocol as p
from tests.facade.rig import CHUNK, TOKENS, Rig, inline_payload, kv, raw
from tests.fix_fake_server import NOTHING, Action, Chunk
from tests.fix_faults import (
    changed,
    payload,
    reframed,
    says,
    value,
    wrong_opcode,
)

pytestmark = pytest.mark.usefixtures("hasty")

# ---- lies of both planes ---------------------------------------------------------------------------------------------

NUMBERS: Final = {
    "3 of 2": says(p.PrefetchStatus(4)),
    "a million": says(p.PrefetchStatus(10**6)),
    "negative": value(-1),
    "str": value("2"),
    "float": value(2.0),
    "bool": value(True),
    "garbage": payload(b"\xc1"),
    "another operation": wrong_opcode,
    "a frame too many": reframed(lambda frames: [*frames, b"\x00"]),
    "the uid alone": reframed(lambda frames: frames[:1]),
}


def refused(rig: Rig, lie: Action, kind: type[p.Request[Any]]) -> RemoteProtocolError:
    """One lie is an error at once, leaves nothing, and the next call is as if it had not been."""
    cached = rig.cache(2)
    ctx = rig.connect()
    rig.server.on(kind, lie)
    with pytest.raises(RemoteProtocolError) as caught:
        ctx.retrieve(TOKENS)
    assert rig.server.held() == NOTHING and rig.server.names()[-1] == "EndSession"
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, cached)
    assert rig.server.held() == NOTHING
    return caught.value


@pytest.mark.parametrize("lie", NUMBERS)
def test_a_number_that_cannot_be(rig: Rig, lie: str) -> None:
    refused(rig, NUMBERS[lie], p.QueryPrefetchStatus)


@pytest.mark.parametrize(
    "lie",
    [payload(b"\xc1"), payload(b""), value([]), value({"success": True}), value(None), wrong_opcode],
    ids=["garbage", "empty", "list", "half", "nil", "operation"],
)
def test_a_read_that_is_no_answer(rig: Rig, lie: Action) -> None:
    refused(rig, lie, p.PrepareRetrieve)


@pytest.mark.parametrize("lie", [payload(b"\xc0"), wrong_opcode])
def test_a_lookup_that_is_no_answer(rig: Rig, lie: Action) -> None:
    refused(rig, lie, p.Lookup)


# ---- lies about slots ------------------------------------------------------------------------------------------------

Slots = Sequence[p.Slot]


def bent(index: int, **changes: Any) -> Callable[[Slots], Slots]:
    """Changes fields of one slot."""

    def bend(slots: Slots) -> Slots:
        slot = slots[index]
        fields = {"offset": slot.offset, "length": slot.length, "shape": slot.shape, "dtype": slot.dtype, **changes}
        return [p.Slot(**fields) if at == index else other for at, other in enumerate(slots)]

    return bend


SLOT_LIES: Final[dict[str, Callable[[Slots], Slots]]] = {
    "one too few": lambda slots: slots[:1],
    "one too many": lambda slots: [*slots, slots[0]],
    "none": lambda slots: slots[:0],
    "the same twice": lambda slots: [slots[0], slots[0]],
    "overlapping": lambda slots: [slots[0], p.Slot(slots[0].offset + 4, slots[0].length, slots[0].shape, "float32")],
    "negative offset": bent(0, offset=-4096),
    "offset behind the pool": bent(0, offset=2**40),
    "straddling the end": bent(0, offset=64 * 4096 - 4),
    "misaligned": bent(0, offset=4098),
    "length zero": bent(0, length=0),
    "length negative": bent(0, length=-256),
    "length too short": bent(0, length=252),
    "length huge": bent(0, length=2**62),
    "another shape of the same bytes": bent(0, shape=(2, 4, 4, 2)),
    "flat": bent(0, shape=(64,)),
    "rank 5": bent(0, shape=(2, 2, 4, 2, 2)),
    "one plane of the same bytes": bent(0, shape=(1, 4, 4, 4)),
    "three planes": bent(0, shape=(3, 2, 4, 4), length=384),
    "more tokens": bent(0, shape=(2, 2, 8, 2)),
    "another dtype of the same bytes": bent(0, dtype="int32"),
    "half the width": bent(0, dtype="float16", shape=(2, 2, 4, 8)),
    "a dtype of another module": bent(0, dtype="nn"),
    "no dtype": bent(0, dtype=""),
    "zero in the shape": bent(0, shape=(2, 2, 0, 4)),
    "negative in the shape": bent(0, shape=(2, 2, -4, -4)),
    "empty shape": bent(0, shape=()),
    "second slot of another dtype": bent(1, dtype="int32"),
}


@pytest.mark.parametrize("lie", SLOT_LIES)
def test_slots_that_cannot_be(shm_rig: Rig, lie: str) -> None:
    bend = SLOT_LIES[lie]
    action = changed(lambda reply: p.PreparedRetrieve(success=True, data=b"", slots=tuple(bend(reply.slots))))
    error = refused(shm_rig, action, p.PrepareRetrieve)
    assert "slot" in str(error) or "prepare_retrieve" in str(error)
    assert len(shm_rig.server.asked(p.CommitRetrieve)) >= 2


@pytest.mark.parametrize(
    "context",
    [
        {"slots": [{}]},
        {"slots": [{"offset": 0, "length": 256, "shape": [2, 2, 4, 4]}]},
        {"slots": "x"},
        {"slots": [{"offset": "0", "length": 256, "shape": [2, 2, 4, 4], "dtype": "float32"}]},
        {},
    ],
    ids=["empty slot", "no dtype", "str", "str offset", "no slots"],
)
def test_slots_with_missing_or_wrong_keys(shm_rig: Rig, context: object) -> None:
    refused(shm_rig, value({"success": True, "data": b"", "context": context}), p.PrepareRetrieve)


def test_bytes_instead_of_slots(shm_rig: Rig) -> None:
    data = inline_payload([Chunk((2, 2, 4, 4), "float32", bytes(256))] * 2, p.PayloadForm.PICKLE)
    refused(shm_rig, says(p.PreparedRetrieve(success=True, data=data, slots=None)), p.PrepareRetrieve)


# ---- lies about bytes ------------------------------------------------------------------------------------------------


def chunks_of(tensors: Sequence[torch.Tensor]) -> list[Chunk]:
    return [Chunk(tuple(t.shape), str(t.dtype).removeprefix("torch."), raw(t)) for t in tensors]


GOOD: Final = [kv()[:, :, :CHUNK].contiguous(), kv()[:, :, CHUNK : 2 * CHUNK].contiguous()]
PAYLOAD_LIES: Final[dict[str, list[torch.Tensor]]] = {
    "one too few": GOOD[:1],
    "one too many": [*GOOD, GOOD[0]],
    "four of two": [*GOOD, *GOOD],
    "none": [],
    "another width": [torch.zeros(2, 2, 4, 3)] * 2,
    "another shape of the same bytes": [torch.zeros(2, 4, 4, 2)] * 2,
    "another layer count": [torch.zeros(2, 3, 4, 4)] * 2,
    "more tokens": [torch.zeros(2, 2, 8, 4)] * 2,
    "one plane": [torch.zeros(1, 2, 4, 4)] * 2,
    "three planes": [torch.zeros(3, 2, 4, 4)] * 2,
    "rank 2": [torch.zeros(6, 3)] * 2,
    "rank 5": [torch.zeros(2, 2, 4, 2, 2)] * 2,
    "another dtype": [torch.zeros(2, 2, 4, 4, dtype=torch.float16)] * 2,
    "another dtype of the same bytes": [torch.zeros(2, 2, 4, 4, dtype=torch.int32)] * 2,
    "the second of another dtype": [GOOD[0], torch.zeros(2, 2, 4, 4, dtype=torch.bfloat16)],
}


@pytest.mark.parametrize("lie", PAYLOAD_LIES)
@pytest.mark.parametrize("release", ["0.5.6", "0.5.7rc2"])
def test_payloads_that_cannot_be(release: str, lie: str) -> None:
    with Rig(release) as rig:
        data = inline_payload(chunks_of(PAYLOAD_LIES[lie]), rig.server.dialect.payload_form)
        refused(rig, says(p.PreparedRetrieve(success=True, data=data, slots=None)), p.PrepareRetrieve)


@pytest.mark.parametrize(
    "bend",
    [
        lambda d: d[:0],
        lambda d: b"junk" + d[:0],
        lambda d: d[:-1],
        lambda d: d[: len(d) // 2],
        lambda d: d + b"x",
        lambda d: d[:0] + b"N.",
    ],
    ids=["empty", "junk", "cut at the end", "half", "more at the end", "None"],
)
@pytest.mark.parametrize("release", ["0.5.6", "0.5.7rc2"])
def test_payloads_that_are_none(release: str, bend: Callable[[bytes], bytes]) -> None:
    with Rig(release) as rig:
        data = bend(inline_payload(chunks_of(GOOD), rig.server.dialect.payload_form))
        refused(rig, says(p.PreparedRetrieve(success=True, data=data, slots=None)), p.PrepareRetrieve)


def test_slots_instead_of_bytes(inline_rig: Rig) -> None:
    slots = (p.Slot(0, 256, (2, 2, 4, 4), "float32"),) * 2
    refused(inline_rig, says(p.PreparedRetrieve(success=True, data=b"", slots=slots)), p.PrepareRetrieve)


def test_a_payload_that_would_run_code_does_not(inline_rig: Rig) -> None:
    marker = Path("/tmp") / f"lmcache-sdk-test-{secrets.token_hex(8)}"
    command = f"touch {marker}".encode()
    bombs = [
        b"cposix\nsystem\n(S'" + command + b"'\ntR.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + bytes([len(command)]) + command + b"\x85R.",
        b"\x80\x02]cposix\nsystem\n(U" + bytes([len(command)]) + command + b"tRa.",
    ]
    for bomb in bombs:
        refused(inline_rig, says(p.PreparedRetrieve(success=True, data=bomb, slots=None)), p.PrepareRetrieve)
    assert not marker.exists()
