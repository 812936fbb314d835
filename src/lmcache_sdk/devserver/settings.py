"""How a server is started. Checked once, when made; everything else in this package trusts it."""

from __future__ import annotations

import os
import time
from typing import Final, Literal

import attrs

from lmcache_sdk.devserver.behaviours import Behaviour, of_dialect
from lmcache_sdk.devserver.clocks import Clock
from lmcache_sdk.errors import UsageError
from lmcache_sdk.protocol import Dialect, dialect_named

TransferMode = Literal["auto", "engine_driven", "lmcache_driven"]
TRANSFER_MODES: Final = ("auto", "engine_driven", "lmcache_driven")
DEFAULT_L1_NBYTES: Final = 256 * 2**20


def unique_shm_name() -> str:
    """A pool name that no other server has."""
    return f"devserver-{os.getpid()}-{os.urandom(4).hex()}"


@attrs.frozen(kw_only=True)
class Settings:
    """What a server was told at its start."""

    speak: str = "0.5.6"
    """The release whose wire and behaviour it has."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    http_port: int = 0
    shm_name: str | None = ""
    """A name makes a shared-memory pool, "" an inline server, None what the release does by default."""
    chunk_size: int = 256
    l1_size_bytes: int = DEFAULT_L1_NBYTES
    supported_transfer_mode: TransferMode = "auto"
    read_ttl: float = 300.0
    write_ttl: float = 600.0
    session_ttl: float = 600.0
    reap: float = 120.0
    grace: float = 3600.0
    eviction_interval: float = 0.25
    """Seconds between two looks at how full the pool is (the real server's are 1)."""
    eviction_watermark: float = 0.8
    eviction_ratio: float = 0.2
    api_key: str | None = None
    clock: Clock = time.monotonic

    def __attrs_post_init__(self) -> None:
        """Refuses what no server could be started with; an unknown release is an UnsupportedError."""
        behaviour = self.behaviour
        if self.chunk_size < 1 or self.chunk_size > 2**20:
            raise UsageError(f"chunk_size must be 1 to {2**20}, got {self.chunk_size}")
        if self.supported_transfer_mode not in TRANSFER_MODES:
            raise UsageError(f"supported_transfer_mode must be one of {', '.join(TRANSFER_MODES)}")
        if self.api_key is not None and not behaviour.has_api_key:
            raise UsageError(f"an LMCache {self.speak} server knows no API key; leave api_key out")

    @property
    def dialect(self) -> Dialect:
        """The wire it speaks."""
        return dialect_named(self.speak)

    @property
    def behaviour(self) -> Behaviour:
        """How its release behaves."""
        return of_dialect(self.dialect)

    @property
    def pool_name(self) -> str:
        """The shared-memory name asked for; "" for an inline server."""
        if self.shm_name is not None:
            return self.shm_name
        return "" if self.behaviour.inline_by_default else unique_shm_name()

    @property
    def engine_driven(self) -> bool:
        """Whether clients can register and transfer."""
        return self.supported_transfer_mode != "lmcache_driven"
