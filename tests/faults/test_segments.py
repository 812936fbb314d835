"""Row 13: the shared memory that a client sees is not the server's, as in another container or on another host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import ConnectError

from .conftest import shm_everywhere
from .report import Fault
from .worlds import KV, World, tokens_of


@contextlib.contextmanager
def segment_replaced(here: World, size: int | None) -> Iterator[Path]:
    """The server's segment has another name, and what is at its own is foreign: so many bytes, or nothing."""
    path = here.server.segment_path
    aside = path.with_name(path.name + "-aside")
    path.rename(aside)
    try:
        if size is not None:
            with path.open("wb") as foreign:
                os.fchmod(foreign.fileno(), 0o600)
                foreign.truncate(size)
        yield path
    finally:
        path.unlink(missing_ok=True)
        aside.rename(path)


def check_refused(fault: Fault, here: World, says: str) -> None:
    """Connecting fails, leaves nothing, and both sides' data are as they were."""
    before = here.server.held()

    def connect() -> object:
        with lmc_sdk.connect(here.server.url, here.server.http_url, KV, 5.0) as ctx:
            return ctx.transport

    error = fault.error(connect, ConnectError, within=2.0, says=says)
    assert "--ipc=host" in str(error)
    here.settled(before)


@pytest.mark.row("13.1")
@shm_everywhere
def test_segment_cannot_be_seen(fault: Fault, here: World) -> None:
    tokens = tokens_of(2)
    kv = here.values(len(tokens), 1)
    assert here.connect().store(kv, tokens)
    with segment_replaced(here, None):
        check_refused(fault, here, "does not exist here")
    fault.exact(here.read(tokens), kv, "others")


@pytest.mark.row("13.2")
@shm_everywhere
def test_foreign_segment_of_the_same_size(fault: Fault, here: World) -> None:
    tokens = tokens_of(2)
    kv = here.values(len(tokens), 2)
    assert here.connect().store(kv, tokens)
    with segment_replaced(here, here.server.segment_path.stat().st_size) as foreign:
        check_refused(fault, here, "is not the server's")
        with foreign.open("rb") as written:
            fault.never(any(written.read()), "the foreign pool was written into")
    fault.exact(here.read(tokens), kv, "others")


@pytest.mark.row("13.3")
@shm_everywhere
@pytest.mark.parametrize("size", ["1 MiB", "empty", "larger"])
def test_foreign_segment_of_another_size(fault: Fault, here: World, size: str) -> None:
    tokens = tokens_of(2)
    kv = here.values(len(tokens), 3)
    assert here.connect().store(kv, tokens)
    larger = here.server.segment_path.stat().st_size + 4096
    with segment_replaced(here, {"1 MiB": 2**20, "empty": 0, "larger": larger}[size]):
        check_refused(fault, here, "belongs to another server")
    fault.exact(here.read(tokens), kv, "others")
