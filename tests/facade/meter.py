"""What a call costs, counted: the requests that it sends, how often it waits, the bytes of its messages, the GETs.

`Meter` puts a Rig's server behind connections without sockets, on a clock that only waiting moves. After `connect`
every answer takes one `TRIP`: the time that a call takes is the number of round trips that it waits for, one after the
other, and answers that are waited for together count once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import pytest
import torch

from lmcache_sdk import KVLayout, LMCacheKVCacheContext
from lmcache_sdk import protocol as p
from lmcache_sdk.values import override
from tests.facade.rig import Rig
from tests.fix_faults import FakeClock, MemoryTransport, late
from tests.session.pages import config_page

TRIP: Final = 0.125
"""Seconds that every answer takes: a number that floats add without a rest, shorter than any patience."""


@attrs.frozen
class Cost:
    """What one call has cost."""

    answer: object
    requests: list[str]
    """The kinds of its requests, in order."""
    trips: float
    """Round trips that it waited for."""
    gets: int
    """HTTP requests for /status."""
    messages: list[list[bytes]]
    """The frames of its requests."""

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(len(frame) for frames in self.messages for frame in frames)


class Meter:
    """See the module. `in_order` is what the server's configuration says of LOOKUP and what follows it."""

    def __init__(self, rig: Rig, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, *, in_order: bool = True) -> None:
        self.rig = rig
        self._clock = clock
        self._messages: list[list[bytes]] = []
        sent = self._messages

        class Line(MemoryTransport):
            @override
            def send(self, frames: Sequence[p.Buffer]) -> None:
                sent.append([bytes(frame) for frame in frames])
                super().send(frames)

        monkeypatch.setattr(
            "lmcache_sdk.session.session.open_dealer", lambda *_arguments, **_options: Line(rig.server, clock)
        )
        for path in {"/conf", "/config"} & rig.http.pages.keys():
            workers = 1 if in_order else 2
            rig.http.pages[path] = config_page(shm_name="test" if rig.shm else "", max_cpu_workers=workers)

    def connect(self, **options: Any) -> LMCacheKVCacheContext:
        """A context; from now on every answer takes one trip."""
        ctx = self.rig.connect(**options)
        for kind in self.rig.server.dialect.rules:
            self.rig.server.always(kind, late(TRIP))
        return ctx

    def of(self, call: Callable[[], object]) -> Cost:
        """What a call costs. Answers that it has left behind arrive before it."""
        self._clock.advance(TRIP)
        began, said, asked = self._clock.now, self.rig.said(), len(self.rig.http.visits)
        del self._messages[:]
        answer = call()
        assert set(self.rig.http.paths[asked:]) <= {"/status"}
        return Cost(
            answer,
            self.rig.server.names()[said:],
            (self._clock.now - began) / TRIP,
            len(self.rig.http.visits) - asked,
            [*self._messages],
        )


def wide(hidden: int) -> KVLayout:
    """The rig's model with wider rows: two layers, two planes, float32; 64 bytes a chunk for each element of a row."""
    return KVLayout(num_layers=2, dtype=torch.float32, num_kv_heads=1, head_dim=hidden, tokens_per_block=4)
