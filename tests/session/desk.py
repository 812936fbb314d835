"""One operation on a FakeServer by a fake clock, without a session: where leases and reservations are tested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.protocol.envelope import bin_header
from lmcache_sdk.session import Deadline, Identity, Operation, ReadLease, Reservation, SlotWriter
from lmcache_sdk.session.channel import Channel
from lmcache_sdk.session.transport import Transport
from lmcache_sdk.values import InstanceId, TokenIds
from tests.fix_fake_server import Chunk, FakeServer
from tests.fix_faults import FakeClock, Fault, FaultyTransport, MemoryTransport

TOKENS: Final = list(range(100, 114))
"""Three whole chunks of four, and two tokens more."""
CHUNK: Final = 4
READ_TTL: Final = 300.0
WRITE_TTL: Final = 600.0
INSTANCE: Final = InstanceId(77)
SLOT: Final = ((1, CHUNK, 8), "uint8")
SLOT_NBYTES: Final = CHUNK * 8


def chunk_bytes(index: int) -> bytes:
    """What is stored in one chunk; no two are alike and none is zero."""
    return bytes(16 + index * 32 + at for at in range(32))


class Desk:
    """See the module. `cached` chunks of TOKENS are in the cache, and INSTANCE is registered."""

    def __init__(
        self,
        release: str = "0.5.6",
        *,
        shm: bool = True,
        cached: int = 0,
        seconds: float = 5.0,
        name: str = "retrieve",
        sent: Mapping[int, Fault] | None = None,
        received: Mapping[int, Fault] | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.shm = shm
        self.pool = memoryview(bytearray(2**16))
        self.server = FakeServer(release, pool=self.pool if shm else None, shm_name="pool" if shm else "")
        self.server.cache(TOKENS, [Chunk(*SLOT, chunk_bytes(index)) for index in range(cached)])
        self.server.instances[INSTANCE] = p.Registration(
            instance_id=INSTANCE, model_name="private", world_size=1, block_size=CHUNK, num_layers=1,
            hidden_dim_size=8, dtype_str="uint8", use_mla=True,
        )  # fmt: skip
        self.memory = MemoryTransport(self.server, self.clock)
        transport: Transport = FaultyTransport(self.memory, sent=sent, received=received)
        self.channel = Channel(self.server.dialect, transport)
        identity = Identity("m", 1, INSTANCE, CHUNK)
        tokens = TokenIds(TOKENS[: 3 * CHUNK])
        self.operation = Operation(name, self.channel, identity, tokens, "", self.within(seconds))

    def within(self, seconds: float) -> Deadline:
        return Deadline(seconds, self.clock)

    def lease(self, ttl: float | None = READ_TTL) -> ReadLease:
        return ReadLease(self.operation, ttl, shm=self.shm, clock=self.clock)

    def reservation(self, first: int = 0, count: int = 3, ttl: float | None = WRITE_TTL) -> Reservation:
        return Reservation(self.operation, first, count, ttl, clock=self.clock)

    def finish(self, seconds: float = 0.5) -> bool:
        """One attempt to give everything back, as the session makes it after a call."""
        return self.operation.finish(self.within(seconds))

    def ended_last_and_once(self) -> bool:
        """Whether END_SESSION came exactly once, after everything else."""
        names = self.server.names()
        return names.count("EndSession") == 1 and names[-1] == "EndSession"

    def range_of(self, key: p.IPCCacheServerKey) -> tuple[int, int]:
        """The chunks that a key means."""
        return key.start // CHUNK, key.end // CHUNK

    def freed(self) -> list[tuple[int, int]]:
        """The chunk ranges of all FREE_LOOKUP_LOCKS that came."""
        return [self.range_of(request.key) for request in self.server.asked(p.FreeLookupLocks)]

    def published(self) -> list[bytes]:
        """The bytes of every cached chunk, in the order in which they got their slots."""
        slots = [chunk.slot for chunk in self.server.objects.values()]
        return [bytes(self.pool[slot.offset : slot.offset + slot.length]) for slot in slots if slot is not None]


class Writer:
    """A `SlotWriter`: writes `chunk_bytes`, fails when it is told to, and remembers what it did."""

    def __init__(self, desk: Desk, first: int = 0, failures: list[BaseException] | None = None) -> None:
        self._desk = desk
        self._first = first
        self.data = [chunk_bytes(index) for index in range(6)]  # the tensor of a call is longer than one range
        self.failures = failures if failures is not None else []
        self.illegal = ""
        self.takes = 0.0
        """Seconds that a write takes."""
        self.writes = 0
        self.copies: list[Writer] = []

    def check(self, prepared: p.PreparedStore) -> None:
        if self.illegal:
            raise RemoteProtocolError(self.illegal, path="prepare_store.context.slots[0]")

    def write(self, prepared: p.PreparedStore) -> None:
        self.writes += 1
        self._desk.clock.advance(self.takes)
        for number, (slot, index) in enumerate(zip(prepared.slots or (), prepared.chunk_indices, strict=True)):
            if self.failures and number == 1:  # in the middle
                raise self.failures.pop(0)
            self._desk.pool[slot.offset : slot.offset + slot.length] = self.data[(self._first + index) % len(self.data)]

    def snapshot(self) -> Writer:
        copy = Writer(self._desk, self._first, self.failures)
        copy.data, copy.illegal, copy.takes = list(self.data), self.illegal, self.takes
        self.copies.append(copy)
        return copy


def read(desk: Desk, lease: ReadLease, *batches: int) -> int:
    """A whole retrieve: look up, prepare and commit batch after batch."""
    hit = lease.acquire()
    for count in batches or ((hit,) if hit else ()):
        entry = lease.prepare(count)
        lease.received(entry)
        lease.commit(entry)
    return hit


def store_slots(reservation: Reservation, writer: SlotWriter) -> None:
    """One range stored whole: PREPARE_STORE, the slots filled, COMMIT_STORE, and its answer."""
    reservation.prepare(writer)
    reservation.fill()
    reservation.verdict()


def store_inline(reservation: Reservation, payload: bytearray) -> None:
    """The same with the chunks in the message."""
    reservation.send_inline(payload)
    reservation.verdict()


ALL: Final = [chunk_bytes(index) for index in range(3)]


def store_desk(release: str = "0.5.6", **options: object) -> Desk:
    return Desk(release, name="store", **options)  # type: ignore[arg-type]  # the options of a desk


def inline_payload() -> bytearray:
    data = b"".join(ALL)
    return bytearray(bin_header(len(data)) + data)
