"""Row 11, replies: a server that lies. Nothing of it becomes a tensor, a write or a wait; what it holds is freed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch

from lmcache_sdk import DeadlineExceededError, KVCacheSDKError, LMCacheKVCacheContext, RemoteProtocolError
from lmcache_sdk import protocol as p
from tests.fix_fake_server import Action, Delivery, Turn
from tests.fix_faults import changed, loading, payload, reframed, says, silence, value, wrong_opcode, wrong_uid

from .conftest import TRANSPORTS
from .liar import CHUNK, Liar, T, liar
from .report import SLACK, Fault

RELEASES: Final = ("0.5.6", "0.5.0", "0.5.7rc2")
INLINE: Final = [(release, "inline") for release in RELEASES]
SHM: Final = [(release, "shm") for release in RELEASES]


@pytest.fixture
def server(request: pytest.FixtureRequest, fault: Fault) -> Iterator[Liar]:
    release, transport = request.param
    fault.server = f"scripted {release}"
    with liar(release, transport) as made:
        yield made


def on(places: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", places, ids="-".join, indirect=True)


on_056 = on([("0.5.6", transport) for transport in TRANSPORTS])
_numbers = random.Random(11)


def new_tokens(num_chunks: int = 2) -> list[int]:
    return [_numbers.randrange(2**32) for _ in range(num_chunks * CHUNK)]


def lied_to(
    fault: Fault,
    server: Liar,
    request: type[p.Request[Any]],
    *actions: Action,
    kind: type[KVCacheSDKError] = RemoteProtocolError,
    within: float = 0.5,
) -> None:
    """A retrieve of two cached chunks that meets this lie fails, and the next one is right."""
    tokens = new_tokens()
    kv = server.cache(tokens, 1)
    ctx = server.connect()
    server.server.on(request, *actions)
    fault.error(lambda: ctx.retrieve(tokens), kind, within=within)
    fault.exact(ctx.retrieve(tokens), kv, "the next retrieve")
    server.judge(fault)


# ---- code ------------------------------------------------------------------------------------------------------------


def code_payloads(marker: Path, server: Liar) -> dict[str, bytes]:
    """Payloads that run `touch marker` in whoever gives them to pickle.loads or torch.load."""
    command = f"touch {marker}".encode()
    plain = b"cposix\nsystem\n(S'" + command + b"'\ntR."
    inner = b"\x80\x02cposix\nsystem\nX" + len(command).to_bytes(4, "little") + command + b"\x85R."
    load = b"\x8c\x0dtorch.storage\x8c\x10_load_from_bytes\x93"
    nested = b"\x80\x04](" + load + b"B" + len(inner).to_bytes(4, "little") + inner + b"\x85Re."
    real = server.payload(server.values(CHUNK, 1), server.values(CHUNK, 2))
    return {"plain": plain, "in a storage": nested, "behind real tensors": real[:-1] + plain}


@pytest.mark.row("11.1")
@on(INLINE)
@pytest.mark.parametrize("form", ["plain", "in a storage", "behind real tensors"])
def test_code_in_a_reply(fault: Fault, server: Liar, tmp_path: Path, form: str) -> None:
    marker = tmp_path / "ran"
    bad = code_payloads(marker, server)[form]
    try:
        lied_to(fault, server, p.PrepareRetrieve, says(p.PreparedRetrieve(success=True, data=bad, slots=None)))
    finally:
        fault.never(marker.exists(), "the reply's code ran")


# ---- tensors inside messages -----------------------------------------------------------------------------------------


def wrong_tensors(server: Liar) -> dict[str, list[torch.Tensor]]:
    one, two = server.values(CHUNK, 1), server.values(CHUNK, 2)
    return {
        "float32": [one.float(), two.float()],
        "float16": [one.view(torch.float16), two.view(torch.float16)],
        "one of two": [one],
        "four of two": [one, two, one, two],
        "none": [],
        "6 x 3": [torch.zeros(6, 3), torch.zeros(6, 3)],
        "transposed": [one.transpose(0, 2).contiguous(), two.transpose(0, 2).contiguous()],
        "flat": [one.flatten(), two.flatten()],
        "second differs": [one, two[:, :, :2]],
    }


@pytest.mark.row("11.2")
@on(INLINE)
@pytest.mark.parametrize(
    "form",
    ["float32", "float16", "one of two", "four of two", "none", "6 x 3", "transposed", "flat", "second differs"],
)
def test_other_tensors(fault: Fault, server: Liar, form: str) -> None:
    data = server.payload(*wrong_tensors(server)[form])
    lied_to(fault, server, p.PrepareRetrieve, says(p.PreparedRetrieve(success=True, data=data, slots=None)))


@pytest.mark.row("11.3")
@on(INLINE)
@pytest.mark.parametrize("form", ["junk", "truncated", "a dict", "empty", "half", "zeros"])
def test_junk(fault: Fault, server: Liar, form: str) -> None:
    real = server.payload(server.values(CHUNK, 1), server.values(CHUNK, 2))
    data = {
        "junk": b"junk",
        "truncated": real[:-10],
        "a dict": b"\x80\x04}." if server.server.dialect.release != "0.5.7rc2" else b"\x80",
        "empty": b"",
        "half": real[: len(real) // 2],
        "zeros": bytes(4096),
    }[form]
    lied_to(fault, server, p.PrepareRetrieve, says(p.PreparedRetrieve(success=True, data=data, slots=None)))


# ---- frames ----------------------------------------------------------------------------------------------------------

GARBAGE: Final = payload(b"\xc1\xff\x00")
READS: Final[list[type[p.Request[Any]]]] = [p.QueryPrefetchStatus, p.PrepareRetrieve]


@pytest.mark.row("11.4")
@on_056
@pytest.mark.parametrize("request_", READS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(GARBAGE, id="garbage"),
        pytest.param(reframed(lambda frames: frames[:1]), id="one frame"),
        pytest.param(reframed(lambda frames: [*frames, b"\xc0", b"\xc0"]), id="five frames"),
        pytest.param(reframed(lambda frames: [frames[0], b"\xcd\x7f\xff", *frames[2:]]), id="unknown operation"),
        pytest.param(reframed(lambda frames: [frames[0], b"", *frames[2:]]), id="empty operation"),
    ],
)
def test_illegal_frames(fault: Fault, server: Liar, request_: type[p.Request[Any]], lie: Action) -> None:
    lied_to(fault, server, request_, lie)


@pytest.mark.row("11.4")
@on_056
@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(wrong_uid, id="other uid"),
        pytest.param(reframed(lambda frames: [msgspec.msgpack.encode("a"), *frames[1:]]), id="str uid"),
        pytest.param(reframed(lambda frames: [b"\xc1", *frames[1:]]), id="garbage uid"),
        pytest.param(reframed(lambda _: [b""]), id="one empty frame"),
    ],
)
def test_replies_to_nobody(fault: Fault, server: Liar, lie: Action) -> None:
    """A reply that answers no request of ours is as good as none."""
    tokens = new_tokens()
    kv = server.cache(tokens, 3)
    ctx = server.connect()
    server.server.on(p.Lookup, lie)
    fault.error(lambda: ctx.retrieve(tokens), DeadlineExceededError, within=T + SLACK, says="LOOKUP")
    fault.exact(ctx.retrieve(tokens), kv, "the next retrieve")

    server.judge(fault)


@pytest.mark.row("11.4")
@on_056
def test_replies_to_nobody_before_the_real_one(fault: Fault, server: Liar) -> None:
    tokens = new_tokens()
    kv = server.cache(tokens, 3)
    ctx = server.connect()

    def among_others(turn: Turn) -> list[Delivery]:
        real = turn.frames(turn.handle())
        strange = [[msgspec.msgpack.encode(2**40), *real[1:]], [b"\xc1", b"\xc1"], [b""], [b"", *real[1:]]]
        return [*(Delivery(frames) for frames in strange), Delivery(real), Delivery(real)]

    requests: list[type[p.Request[Any]]] = [p.Lookup, *READS]
    for request in requests:
        server.server.on(request, among_others)
    fault.exact(ctx.retrieve(tokens), kv, "among strange replies")
    fault.exact(ctx.retrieve(tokens), kv, "the next retrieve")
    server.judge(fault)


@pytest.mark.row("11.5")
@on_056
@pytest.mark.parametrize("request_", [p.Lookup, *READS], ids=lambda kind: kind.__name__)
def test_reply_to_another_operation(fault: Fault, server: Liar, request_: type[p.Request[Any]]) -> None:
    lied_to(fault, server, request_, wrong_opcode)
    assert server.server.names().count("EndSession") >= 2


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.row("11.6")
@on([*SHM, *INLINE])
@pytest.mark.parametrize("count", [3, 5, 10**6, 2**63])
def test_more_found_than_asked(fault: Fault, server: Liar, count: int) -> None:
    tokens = new_tokens()
    kv = server.cache(tokens, 4)
    ctx = server.connect()
    for call in (ctx.retrieve, ctx.lookup):
        server.server.on(p.QueryPrefetchStatus, value(count))
        fault.error(lambda call=call: call(tokens), RemoteProtocolError, within=0.5, says="prefetch_status")  # type: ignore[misc]
    fault.exact(ctx.retrieve(tokens), kv, "the next retrieve")
    if server.server.dialect.free_clips_to_hit:
        server.judge(fault)
    else:  # its FREE is unconditional: with an unknown hit it could take another reader's lock, so the TTL must do it
        server.contexts.close()
        held = server.server.held()
        fault.never(held.stolen > 0, "another reader's lock was given back")
        assert held.sessions == held.jobs == 0 and held.read_locks == 4, held


@pytest.mark.row("11.7")
@on_056
@pytest.mark.parametrize("count", [-1, "2", 2.0, True, [2], {"n": 2}], ids=repr)
def test_found_is_no_count(fault: Fault, server: Liar, count: object) -> None:
    lied_to(fault, server, p.QueryPrefetchStatus, value(count))


@pytest.mark.row("11.7")
@on_056
def test_found_is_never_there(fault: Fault, server: Liar) -> None:
    tokens = new_tokens()
    kv = server.cache(tokens, 5)
    ctx = server.connect()
    server.server.always(p.QueryPrefetchStatus, loading)
    fault.error(lambda: ctx.retrieve(tokens), DeadlineExceededError, within=T + SLACK, says="QUERY_PREFETCH_STATUS")
    polls = server.server.names().count("QueryPrefetchStatus")
    assert polls < 400, f"{polls} polls in {T:g} s"
    del server.server._always[p.QueryPrefetchStatus]
    fault.exact(ctx.retrieve(tokens), kv, "the next retrieve")
    server.judge(fault)


# ---- slots to read ---------------------------------------------------------------------------------------------------


def read_slots(change: Callable[[list[dict[str, Any]]], object]) -> Action:
    """The true slots of a retrieve as maps, changed."""

    def act(turn: Turn) -> list[Delivery]:
        reply = turn.handle()
        assert isinstance(reply, p.PreparedRetrieve) and reply.slots is not None
        slots = [
            {"offset": s.offset, "length": s.length, "shape": list(s.shape), "dtype": s.dtype} for s in reply.slots
        ]
        told = change(slots)
        body = {"success": True, "data": b"", "context": {"slots": slots if told is None else told}}
        frames = turn.frames(p.PreparedRetrieve(success=True, data=b"", slots=()))
        return [Delivery([*frames[:2], msgspec.msgpack.encode(body)])]

    return act


def setting(index: int, **fields: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda slots: slots[index].update(fields)


def without(index: int, name: str) -> Callable[[list[dict[str, Any]]], object]:
    return lambda slots: slots[index].pop(name) and None


def overlapping(slots: list[dict[str, Any]]) -> None:
    slots[1]["offset"] = slots[0]["offset"] + 128


NBYTES: Final = 256
POOL: Final = 2**20
BAD_SLOTS: Final[dict[str, Callable[[list[dict[str, Any]]], object]]] = {
    "beyond the pool": setting(1, offset=POOL),
    "negative offset": setting(0, offset=-NBYTES),
    "across the end": setting(1, offset=POOL - 128),
    "huge length": setting(0, length=2**62),
    "huge offset": setting(0, offset=2**63 - 128),
    "zero length": setting(0, length=0),
    "negative length": setting(0, length=-1),
    "bad dtype": setting(0, dtype="os.system"),
    "no shape": without(0, "shape"),
    "no offset": without(1, "offset"),
    "text offset": setting(0, offset="0"),
}
OTHER_SLOTS: Final[dict[str, Callable[[list[dict[str, Any]]], object]]] = {
    "axes swapped": setting(0, shape=[2, 4, 2, 8]),
    "flat": setting(0, shape=[128]),
    "float16": setting(1, dtype="float16"),
    "float32, half as long": setting(0, dtype="float32", shape=[2, 2, 2, 8]),
    "misaligned": setting(1, offset=4097),
    "length and shape differ": setting(1, length=NBYTES - 2),
}
COUNTED_SLOTS: Final[dict[str, Callable[[list[dict[str, Any]]], object]]] = {
    "one of two": lambda slots: slots[:1],
    "three of two": lambda slots: [*slots, slots[0]],
    "none of two": lambda _: [],
    "overlapping": overlapping,
    "the first twice": lambda slots: [slots[0], slots[0]],
}


@pytest.mark.row("11.8")
@on([("0.5.6", "shm")])
@pytest.mark.parametrize("form", BAD_SLOTS)
def test_slots_outside(fault: Fault, server: Liar, form: str) -> None:
    lied_to(fault, server, p.PrepareRetrieve, read_slots(BAD_SLOTS[form]))


@pytest.mark.row("11.9")
@on(SHM)
@pytest.mark.parametrize("form", OTHER_SLOTS)
def test_slots_of_another_kind(fault: Fault, server: Liar, form: str) -> None:
    lied_to(fault, server, p.PrepareRetrieve, read_slots(OTHER_SLOTS[form]))


@pytest.mark.row("11.6")
@on(SHM)
@pytest.mark.parametrize("form", COUNTED_SLOTS)
def test_slots_miscounted(fault: Fault, server: Liar, form: str) -> None:
    lied_to(fault, server, p.PrepareRetrieve, read_slots(COUNTED_SLOTS[form]))


# ---- slots to write --------------------------------------------------------------------------------------------------


def write_slots(change: Callable[[dict[str, Any]], object]) -> Action:
    """The true context of a PREPARE_STORE as a map, changed."""

    def act(turn: Turn) -> list[Delivery]:
        reply = turn.handle()
        assert isinstance(reply, p.PreparedStore) and reply.slots is not None
        slots = [
            {"offset": s.offset, "length": s.length, "shape": list(s.shape), "dtype": s.dtype} for s in reply.slots
        ]
        context: dict[str, Any] = {"slots": slots, "chunk_indices": list(reply.chunk_indices)}
        change(context)
        frames = turn.frames(p.PreparedStore(slots=(), chunk_indices=()))
        return [Delivery([*frames[:2], msgspec.msgpack.encode({"context": context})])]

    return act


def indices(*numbers: int) -> Callable[[dict[str, Any]], object]:
    return lambda context: context.update(chunk_indices=list(numbers))


def in_slot(index: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda context: context["slots"][index].update(fields)


BAD_WRITES: Final[dict[str, tuple[str, Callable[[dict[str, Any]], object]]]] = {
    "index twice": ("11.10", indices(0, 0)),
    "indices fall": ("11.10", indices(1, 0)),
    "overlapping": ("11.10", lambda context: overlapping(context["slots"])),
    "float16": ("11.10", in_slot(1, dtype="float16")),
    "another shape": ("11.10", in_slot(0, shape=[2, 4, 2, 8])),
    "no slots at all": ("11.10", dict.clear),
    "index out of range": ("11.11", indices(0, 2)),
    "negative index": ("11.11", indices(-1, 0)),
    "too few indices": ("11.11", indices(0)),
    "no indices": ("11.11", lambda context: context.pop("chunk_indices")),
    "outside the pool": ("11.11", in_slot(1, offset=POOL)),
    "misaligned": ("11.11", in_slot(1, offset=4097)),
    "too short": ("11.11", in_slot(0, length=NBYTES - 2)),
}


@on(SHM)
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.row(row)) for form, (row, _) in BAD_WRITES.items()]
)
def test_slots_to_write(fault: Fault, server: Liar, form: str) -> None:
    """The server holds what it reserved; it cannot be completed, and it is not published by leaving."""
    action = write_slots(BAD_WRITES[form][1])
    tokens = new_tokens()
    kv = server.values(2 * CHUNK, 6)
    ctx: LMCacheKVCacheContext = server.connect()
    before = bytes(server.server.pool or b"")
    server.server.on(p.PrepareStore, action)
    error = fault.error(lambda: ctx.store(kv, tokens), RemoteProtocolError, within=1.0)
    assert "slot" in error.path or "prepare_store" in error.path or "object" in error.path, error.path
    fault.never(bytes(server.server.pool or b"") != before, "something was written")
    fault.never(p.CommitStore in map(type, server.server.requests[-2:]), "it was committed")
    # the same tokens again: refused at once or blocked, never a second PREPARE and never True
    answers = []
    try:
        answers.append(bool(ctx.store(kv, tokens)))
    except KVCacheSDKError as error:
        fault.saw(f"the same again: {type(error).__name__}")
    fault.never(True in answers, "the same store again said True")
    others = new_tokens()
    assert ctx.store(kv, others)
    fault.exact(ctx.retrieve(others), kv, "other tokens")
    server.judge(fault, reservations=2)


@pytest.mark.row("11.10")
@on([*SHM, *INLINE])
def test_commit_that_is_no_answer(fault: Fault, server: Liar) -> None:
    tokens = new_tokens()
    kv = server.values(2 * CHUNK, 7)
    ctx = server.connect()
    for lie in (value("true"), value(1), payload(b""), reframed(lambda frames: frames[:2])):
        server.server.on(p.CommitStore, lie)
        fault.error(lambda: ctx.store(kv, new_tokens()), RemoteProtocolError, within=1.0)
    server.server.on(p.CommitStore, changed(lambda _: p.Committed(success=False)))
    answers: list[bool] = []
    try:
        answers.append(bool(ctx.store(kv, tokens)))
    except KVCacheSDKError as error:
        fault.saw(type(error).__name__)
    fault.exact_or_miss(ctx.retrieve(tokens), kv)
    server.judge(fault)


@pytest.mark.row("11.4")
@on_056
def test_a_late_reply_is_not_mixed_up(fault: Fault, server: Liar) -> None:
    """The answer to a lookup that was given up comes in the middle of the next one."""
    tokens, others = new_tokens(), new_tokens(3)
    kv, others_kv = server.cache(tokens, 8), server.cache(others, 9)
    ctx = server.connect()
    server.server.on(p.QueryPrefetchStatus, silence)
    fault.error(lambda: ctx.retrieve(tokens), DeadlineExceededError, within=T + SLACK)
    fault.exact(ctx.retrieve(others), others_kv, "others")
    fault.exact(ctx.retrieve(tokens), kv, "the same")
