"""What the soak does, in numbers: the cache, the key space, the clients, the servers' patience.

Contract: no torch, no I/O; the controlling process, the clients and the tests read the same constants. `Orders` is
all that a client process is told.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

MODEL: Final = "soak/model"

# ---- the cache: 256 chunks of 256 KiB
CHUNK: Final = 256
LAYERS: Final = 4
HEADS: Final = 2
HEAD_SIZE: Final = 32
WIDTH: Final = HEADS * HEAD_SIZE
ITEMSIZE: Final = 2  # bfloat16
CHUNK_NBYTES: Final = 2 * LAYERS * CHUNK * WIDTH * ITEMSIZE
POOL_NBYTES: Final = 64 * 2**20
POOL_CHUNKS: Final = POOL_NBYTES // CHUNK_NBYTES

# ---- the key space: families of sequences that share their first chunks and differ in the rest
SHARED_CHUNKS: Final = 4
OWN_CHUNKS: Final = 4
VARIANTS: Final = 2
MAX_CHUNKS: Final = SHARED_CHUNKS + OWN_CHUNKS
FAMILY_CHUNKS: Final = SHARED_CHUNKS + VARIANTS * OWN_CHUNKS
FAMILIES: Final = -(-4 * POOL_CHUNKS // FAMILY_CHUNKS)
KEY_SPACE_CHUNKS: Final = FAMILIES * FAMILY_CHUNKS
HOT_FAMILIES: Final = 8
HOT_SHARE: Final = 0.3
SALTS: Final = ("", "tenant-a", "tenant-b")
"""Families 3n, 3n+1 and 3n+2 have the same tokens under different salts: a salt that is mixed up is seen."""

# ---- the clients
PROCESSES: Final = 8
THREADS: Final = 4
RECONNECTING: Final = 2
"""So many of the processes close their context and connect again, all the time."""
SURVIVORS: Final = 2
"""The first of the steady and the first of the reconnecting processes are never killed; they measure themselves."""
MIX: Final = {"store": 30, "lookup": 25, "retrieve": 30, "edit": 15}
VIEWS: Final = 0.3
"""The share of what is retrieved, edits included, that is read through a view."""

# ---- the servers' patience, in seconds
WRITE_TTL: Final = 20
READ_TTL: Final = 10
SESSION_TTL: Final = 30
SESSION_SWEEP: Final = 60
"""Expired sessions are removed once in so many seconds; the servers have no option for it."""
REAP: Final = 30
"""The shortest that the servers take."""
GRACE: Final = 40
"""Above the write TTL: a server that reaps an instance earlier publishes the slots it had reserved."""

# ---- what is tolerated
MEMORY_TOLERANCE: Final = 16 * 2**20
"""Growth of RssAnon between the first part of a run after the warm-up and its end."""
BLOCKS_TOLERANCE: Final = 20_000
"""Growth of the number of Python's allocated blocks over the same time."""
OVERRUN_TOLERANCE: Final = 3.0
"""Seconds that a call may take longer than its timeout: 0.5 of clean-up, the rest for a machine with few cores."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What one client process is told."""

    name: str
    url: str
    http_url: str
    transport: str
    seed: int
    timeout: float
    reconnects: bool
    measures: bool
    """Whether it gives back what the allocators keep for later, before each sample: what is left is held."""
    report: str
    log: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Orders:
        """Out of that line."""
        return cls(**json.loads(line))
