"""The fake has tests of its own, so that a wrong fake cannot make wrong code pass: against the golden messages, and
against PROTOCOL.md's rules of what a server locks and unlocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import ConnectionLostError
from lmcache_sdk.session import Deadline
from lmcache_sdk.values import CorrelationId, InstanceId, RequestId, TokenIds
from tests.fix_fake_server import NOTHING, Chunk, FakeServer, Held
from tests.fix_faults import (
    FakeClock,
    Fault,
    FaultyTransport,
    MemoryTransport,
    ignored,
    instead,
    late,
    loading,
    says,
    silence,
    twice,
    value,
    wrong_opcode,
    wrong_uid,
)

GOLDEN: Final = Path(__file__).parent.parent / "golden" / "wire"
TOKENS: Final = list(range(12))
BYTE: Final = Chunk((1, 1, 4, 1), "uint8", b"abcd")


def key(request_id: str = "r", start: int = 0, end: int = 12, worker_id: int | None = 0) -> p.IPCCacheServerKey:
    return p.IPCCacheServerKey(
        model_name="m", world_size=1, worker_id=worker_id, token_ids=TokenIds(TOKENS), start=start, end=end,
        request_id=RequestId(request_id),
    )  # fmt: skip


def registration(instance: int = 7) -> p.Registration:
    return p.Registration(
        instance_id=InstanceId(instance), model_name="private", world_size=1, block_size=4, num_layers=1,
        hidden_dim_size=1, dtype_str="uint8", use_mla=True, num_physical_slots=4,
    )  # fmt: skip


def server_with(num_chunks: int = 2, release: str = "0.5.6", *, shm: bool = False) -> FakeServer:
    made = FakeServer(release, pool=memoryview(bytearray(2**16)) if shm else None, shm_name="pool" if shm else "")
    made.cache(TOKENS, [BYTE] * num_chunks)
    made.handle(p.Register(registration=registration()))
    return made


def ask(server: FakeServer, request: p.Request[Any]) -> Any:
    """The reply to one request as a client of that release reads it; None when there is none."""
    frames = p.encode_request(server.dialect, CorrelationId(5), request)
    deliveries = server.take([bytes(frame) for frame in frames])
    return p.decode_reply(server.dialect, request, deliveries[0].frames) if deliveries else None


def hit(server: FakeServer, request_id: str = "r") -> int | None:
    assert ask(server, p.Lookup(key=key(request_id, worker_id=None))) == p.Void()
    status: p.PrefetchStatus = ask(server, p.QueryPrefetchStatus(request_id=RequestId(request_id)))
    return status.ready_chunks


def _said(op: str, said: Any) -> tuple[p.Request[Any], p.Reply]:
    """A request of that operation, and the reply that a golden value means."""
    if op == "query_prefetch_status":
        return p.QueryPrefetchStatus(request_id=RequestId("r")), p.PrefetchStatus(said)
    if op == "commit_store":
        return p.CommitStore(key=key(), instance_id=InstanceId(7)), p.Committed(said)
    return p.Noop(), p.NoopAnswer(said)


# ---- the wire --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_it_takes_every_golden_request_and_echoes_its_header(path: Path) -> None:
    document = json.loads(path.read_text())
    server = FakeServer(document["lmcache_version"], chunk_size=document.get("chunk_size", 16))
    taken = 0
    for vector in document["vectors"]:
        if vector["kind"] == "request":
            frames = [bytes.fromhex(frame) for frame in vector["frames"]]
            for delivery in server.take(frames):
                assert delivery.frames[:2] == frames[:2] and len(delivery.frames) in (2, 3)
            taken += 1
    assert server.malformed == [] and len(server.requests) == taken > 20


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_what_it_says_is_said_in_the_releases_own_bytes(path: Path) -> None:
    """A golden reply is scripted by value, and comes out byte for byte."""
    document = json.loads(path.read_text())
    server = FakeServer(document["lmcache_version"])
    said = 0
    for vector in document["vectors"]:
        if vector["kind"] == "reply" and vector["op"] in ("query_prefetch_status", "commit_store", "noop"):
            request, reply = _said(vector["op"], vector["value"])
            server.on(type(request), instead(reply))
            frames = p.encode_request(server.dialect, CorrelationId(vector["uid"]), request)
            [delivery] = server.take([bytes(frame) for frame in frames])
            assert [frame.hex() for frame in delivery.frames] == vector["frames"]
            said += 1
    assert said > 2


def test_what_it_cannot_read_is_remembered() -> None:
    server = FakeServer()
    assert server.take([b"\x00", b"\xcc\xff"]) == []
    assert len(server.malformed) == 1


# ---- locks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", p.DIALECTS)
def test_a_lookup_locks_the_hit_prefix_and_its_number_is_delivered_once(release: str) -> None:
    server = server_with(2, release)
    assert hit(server) == 2
    assert server.held() == Held(read_locks=2, sessions=1)
    again: p.PrefetchStatus = ask(server, p.QueryPrefetchStatus(request_id=RequestId("r")))
    assert again.ready_chunks == 0


@pytest.mark.parametrize("release", p.DIALECTS)
def test_free_gives_back_once_and_then_steals(release: str) -> None:
    server = server_with(2, release)
    assert hit(server) == 2
    free = p.FreeLookupLocks(key=key(end=8, worker_id=None))
    assert ask(server, free) == p.Void()
    assert server.held() == Held(sessions=1)
    ask(server, free)
    assert server.held().stolen == 2


@pytest.mark.parametrize("release", p.DIALECTS)
def test_free_of_more_than_the_hit_steals_before_0_5_4(release: str) -> None:
    server = server_with(2, release)
    hit(server)
    ask(server, p.FreeLookupLocks(key=key(worker_id=None)))
    assert server.held().read_locks == 0
    assert server.held().stolen == (0 if p.DIALECTS[release].free_clips_to_hit else 1)


@pytest.mark.parametrize("release", ["0.5.6", "0.5.7rc2"])
def test_from_0_5_6_free_before_the_query_takes_the_job_and_after_end_nothing(release: str) -> None:
    server = server_with(2, release)
    ask(server, p.Lookup(key=key(worker_id=None)))
    ask(server, p.FreeLookupLocks(key=key(worker_id=None)))
    assert server.held() == Held(sessions=1)
    assert hit(server) == 2
    ask(server, p.EndSession(request_id=RequestId("r")))
    ask(server, p.FreeLookupLocks(key=key(end=8, worker_id=None)))
    assert server.held() == Held(read_locks=2)


@pytest.mark.parametrize("release", ["0.5.0", "0.5.3", "0.5.4", "0.5.5"])
def test_up_to_0_5_5_free_before_the_query_is_unconditional(release: str) -> None:
    server = server_with(2, release)
    ask(server, p.Lookup(key=key(worker_id=None)))
    ask(server, p.FreeLookupLocks(key=key(worker_id=None)))
    assert server.held() == Held(jobs=1, sessions=1, stolen=1)


def test_an_inline_prepare_consumes_its_locks_and_an_shm_one_keeps_them_until_commit() -> None:
    for shm in (False, True):
        server = server_with(2, shm=shm)
        hit(server)
        prepared: p.PreparedRetrieve = ask(server, p.PrepareRetrieve(key=key(end=8), instance_id=InstanceId(7)))
        assert prepared.success
        if shm:
            assert prepared.slots is not None and [slot.length for slot in prepared.slots] == [4, 4]
            assert server.held().read_locks == 2
            ask(server, p.CommitRetrieve(key=key(end=8), instance_id=InstanceId(7)))
        else:
            assert bytes(prepared.data) == b"abcdabcd"
        assert server.held() == Held(sessions=1)


def test_a_prepare_of_what_is_not_there_gives_its_locks_back() -> None:
    server = server_with(2, shm=True)
    hit(server)
    server.objects.clear()
    prepared: p.PreparedRetrieve = ask(server, p.PrepareRetrieve(key=key(end=8), instance_id=InstanceId(7)))
    assert not prepared.success and server.held().read_locks == 0


def test_two_reads_in_flight_of_one_key_leave_locks() -> None:
    server = server_with(2, shm=True)
    hit(server, "r1")
    hit(server, "r2")
    for request_id in ("r1", "r2"):
        ask(server, p.PrepareRetrieve(key=key(request_id, end=8), instance_id=InstanceId(7)))
    for request_id in ("r1", "r2"):
        ask(server, p.CommitRetrieve(key=key(request_id, end=8), instance_id=InstanceId(7)))
    assert server.held().read_locks == 2


# ---- stores ----------------------------------------------------------------------------------------------------------


def test_a_reservation_is_found_after_its_commit_only() -> None:
    server = server_with(1, shm=True)
    prepare = p.PrepareStore(key=key(), instance_id=InstanceId(7))
    prepared: p.PreparedStore = ask(server, prepare)
    assert prepared.chunk_indices == (1, 2)
    assert server.held().reservations == 2 and hit(server, "q") == 1
    second: p.PreparedStore = ask(server, prepare)
    assert second.slots == ()
    assert ask(server, p.CommitStore(key=key(), instance_id=InstanceId(7))) == p.Committed(True)
    assert ask(server, p.CommitStore(key=key(), instance_id=InstanceId(7))) == p.Committed(False)
    assert server.held().reservations == 0 and hit(server, "q2") == 3


def test_unregister_publishes_what_is_reserved() -> None:
    server = server_with(0, shm=True)
    ask(server, p.PrepareStore(key=key(), instance_id=InstanceId(7)))
    ask(server, p.Unregister(instance_id=InstanceId(7)))
    assert server.held().unwritten == 3 and server.held().reservations == 0


def test_an_inline_commit_keeps_what_was_there() -> None:
    server = server_with(1)
    commit = p.CommitStore(key=key(), instance_id=InstanceId(7), data=b"xxxxyyyyzzzz")
    assert ask(server, commit) == p.Committed(True)
    assert [chunk.data for chunk in server.objects.values()] == [b"abcd", b"yyyy", b"zzzz"]


def test_a_full_server_says_true_inline_and_gives_no_slots() -> None:
    inline, shm = server_with(0), server_with(0, shm=True)
    inline.full = shm.full = True
    commit = p.CommitStore(key=key(), instance_id=InstanceId(7), data=b"xxxxyyyyzzzz")
    assert ask(inline, commit) == p.Committed(True) and inline.objects == {}
    prepared: p.PreparedStore = ask(shm, p.PrepareStore(key=key(), instance_id=InstanceId(7)))
    assert prepared.slots == ()


def test_an_unregistered_instance_hears_nothing() -> None:
    server = server_with()
    for request in (
        p.PrepareStore(key=key(), instance_id=InstanceId(8)),
        p.CommitStore(key=key(), instance_id=InstanceId(8)),
        p.PrepareRetrieve(key=key(), instance_id=InstanceId(8)),
        p.CommitRetrieve(key=key(), instance_id=InstanceId(8)),
    ):
        assert ask(server, request) is None


def test_what_comes_after_end_opens_the_session_again() -> None:
    server = server_with(shm=True)
    ask(server, p.EndSession(request_id=RequestId("r")))
    ask(server, p.CommitRetrieve(key=key(), instance_id=InstanceId(7)))
    assert server.held() == Held(sessions=1)


# ---- scripts and connections -----------------------------------------------------------------------------------------


def test_actions_come_one_per_request_and_then_health_returns() -> None:
    server = FakeServer()
    server.on(p.Noop, silence, ignored, twice, says(p.NoopAnswer("X")), value(5), wrong_uid, wrong_opcode)
    frames = [bytes(frame) for frame in p.encode_request(server.dialect, CorrelationId(1), p.Noop())]
    uid, opcode = frames
    answers = [[delivery.frames for delivery in server.take(frames)] for _ in range(8)]
    healthy = [uid, opcode, b"\xa2OK"]
    assert answers[:5] == [[], [], [healthy, healthy], [[uid, opcode, b"\xa1X"]], [[uid, opcode, b"\x05"]]]
    assert answers[5] == [[msgspec.msgpack.encode(2**40), opcode, b"\xa2OK"]]
    assert answers[6] == [[uid, msgspec.msgpack.encode(25), b"\xa2OK"]]
    assert answers[7] == [healthy]
    assert server.names() == ["Noop"] * 8 and len(server.asked(p.Noop)) == 8


def test_what_is_done_and_what_is_not() -> None:
    server = server_with(2)
    server.on(p.Lookup, ignored, silence)
    ask(server, p.Lookup(key=key(worker_id=None)))
    assert server.held() == NOTHING
    ask(server, p.Lookup(key=key(worker_id=None)))
    assert server.held() == Held(read_locks=2, jobs=1, sessions=1)
    server.always(p.QueryPrefetchStatus, loading)
    for _ in range(3):
        status: p.PrefetchStatus = ask(server, p.QueryPrefetchStatus(request_id=RequestId("r")))
        assert status.ready_chunks is None
    assert server.held().jobs == 1


def test_memory_transport_moves_the_clock_and_nothing_else() -> None:
    clock = FakeClock(0.0)
    server = FakeServer()
    transport = MemoryTransport(server, clock)
    server.on(p.Noop, late(3.0), late(1.0), late(9.0))
    for uid in range(3):
        transport.send(p.encode_request(server.dialect, CorrelationId(uid), p.Noop()))
    order = []
    for _ in range(2):
        frames = transport.receive(Deadline(5.0, clock))
        assert frames is not None
        order.append((bytes(frames[0]), clock.now))
    assert order == [(b"\x01", 1.0), (b"\x00", 3.0)]
    assert transport.receive(Deadline(5.0, clock)) is None and clock.now == 8.0
    assert transport.receive(Deadline(5.0, clock)) is not None and clock.now == 9.0
    transport.lost = True
    with pytest.raises(ConnectionLostError):
        transport.receive(Deadline(5.0, clock))


@pytest.mark.parametrize(
    ("fault", "arrived"),
    [
        (Fault.DROP, ["1", "2", None]),
        (Fault.DELAY, ["1", "2", None, "0"]),
        (Fault.DUPLICATE, ["0", "0", "1", "2", None]),
        (Fault.REORDER, ["1", "0", "2", None]),
    ],
)
def test_faults_of_answers(fault: Fault, arrived: list[str | None]) -> None:
    clock = FakeClock()
    server = FakeServer()
    transport = FaultyTransport(MemoryTransport(server, clock), received={0: fault})
    for uid in range(3):
        transport.send(p.encode_request(server.dialect, CorrelationId(uid), p.Noop()))
    got = []
    for _ in arrived:
        frames = transport.receive(Deadline(1.0, clock))
        got.append(None if frames is None else str(frames[0][0]))
    assert got == arrived


def test_faults_of_requests_and_cut_or_ended_answers() -> None:
    clock = FakeClock()
    server = FakeServer()
    noop = p.encode_request(server.dialect, CorrelationId(0), p.Noop())
    faults = {0: Fault.DROP, 1: Fault.DUPLICATE, 3: Fault.DISCONNECT}
    transport = FaultyTransport(
        MemoryTransport(server, clock), sent=faults, received={2: Fault.TRUNCATE, 3: Fault.DISCONNECT}
    )
    transport.send(noop)
    assert server.requests == []
    transport.send(noop)
    assert len(server.requests) == 2
    transport.send(noop)
    lengths = [len(transport.receive(Deadline(1.0, clock)) or []) for _ in range(3)]
    assert lengths == [3, 3, 2]
    with pytest.raises(ConnectionLostError):
        transport.send(noop)
    with pytest.raises(ConnectionLostError):
        transport.receive(Deadline(1.0, clock))
