"""A session by a fake clock whose connections lead to a FakeServer in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from lmcache_sdk.session import (
    Addresses,
    Identity,
    Operation,
    ReadLease,
    RegisteredShape,
    Reservation,
    Session,
)
from lmcache_sdk.values import TokenIds
from tests.fix_fake_server import Chunk, FakeServer
from tests.fix_faults import FakeClock, MemoryTransport
from tests.session.desk import CHUNK, READ_TTL, SLOT, TOKENS, WRITE_TTL, Desk, Writer, chunk_bytes, store_slots

SHAPE: Final = RegisteredShape(
    block_size=CHUNK, num_layers=1, hidden_dim_size=8, dtype_name="uint8", one_plane=True, num_physical_slots=CHUNK
)
OTHER: Final = [9, *TOKENS[1:]]


class Office(Desk):
    """A session whose connections lead to a FakeServer in memory; a Desk's writers write into its pool."""

    def __init__(self, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, release: str = "0.5.6") -> None:
        super().__init__(release)
        self.clock = clock
        self.server = FakeServer(release, pool=self.pool, shm_name="lmcache_l1_pool_x")
        self.lines: list[MemoryTransport] = []
        monkeypatch.setattr("lmcache_sdk.session.session.open_dealer", self.open_line)
        monkeypatch.setattr("lmcache_sdk.session.session.boot_time", clock)
        self.session = Session(Addresses("tcp://memory:1", "http://memory:2"), self.server.dialect)
        self.instance, _ = self.session.register("private", SHAPE, self.within(5))
        self.session.opened()

    def open_line(self, *_: object, **__: object) -> MemoryTransport:
        self.lines.append(MemoryTransport(self.server, self.clock))
        return self.lines[-1]

    @contextmanager
    def call(
        self, name: str = "retrieve", tokens: list[int] | None = None, seconds: float = 1.0
    ) -> Iterator[Operation]:
        """One exclusive call."""
        identity = Identity("m", 1, self.instance, CHUNK)
        ids = TokenIds((TOKENS if tokens is None else tokens)[: 3 * CHUNK])
        with self.session.operation(name, identity, ids, "", self.within(seconds), exclusive=True) as operation:
            yield operation

    def store(self, writer: Writer, tokens: list[int] | None = None, seconds: float = 1.0) -> tuple[int, ...]:
        with self.call("store", tokens, seconds) as operation:
            reservation = Reservation(operation, 0, 3, WRITE_TTL, clock=self.clock)
            store_slots(reservation, writer)
            return reservation.written

    def look(self, tokens: list[int] | None = None, seconds: float = 1.0) -> int:
        with self.call("lookup", tokens, seconds) as operation:
            return ReadLease(operation, READ_TTL, shm=True, clock=self.clock).acquire()

    def cache(self, count: int) -> None:
        self.server.cache(TOKENS, [Chunk(*SLOT, chunk_bytes(index)) for index in range(count)])
