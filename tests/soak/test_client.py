"""A client process of the soak against the embedded server: it works, ends in order, survives a kill in its journal,
and sees a single byte that somebody changed in the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_sdk import KVLayout
from lmcache_sdk.devserver import DevServer, PlayedEngine
from tests.soak.hosts import Clients
from tests.soak.plan import HEAD_SIZE, HEADS, LAYERS, MODEL, POOL_NBYTES, Orders
from tests.soak.report import read_journal

pytestmark = pytest.mark.slow

_SECONDS = 20.0


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """A nursery, whose clients every test ends."""
    nursery = Clients(tmp_path_factory.mktemp("nursery") / "nursery.log")
    yield nursery
    nursery.stop()


@pytest.fixture(params=["shm", "inline"])
def server(request: pytest.FixtureRequest) -> Iterator[DevServer]:
    """An embedded server with the model of the soak."""
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_SIZE, dtype=torch.bfloat16)
    name = None if request.param == "shm" else ""
    shm_name = f"soaktest-{time.monotonic_ns()}" if name is None else ""
    with DevServer(
        models=[PlayedEngine.from_layout(MODEL, layout)], shm_name=shm_name, l1_size_bytes=POOL_NBYTES
    ) as running:
        yield running


def _orders(server: DevServer, folder: Path, *, reconnects: bool = False) -> Orders:
    return Orders(
        name="client-0-1",
        url=server.url,
        http_url=server.http_url,
        transport="shm" if server.settings.shm_name else "inline",
        seed=7,
        timeout=5.0,
        reconnects=reconnects,
        measures=True,
        report=str(folder / "client-0-1.jsonl"),
        log=str(folder / "client-0-1.log"),
    )


def _wait(journal: str, done: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Reads a journal until it tells what is waited for."""
    end = time.monotonic() + _SECONDS
    while True:
        records = read_journal(Path(journal)) if Path(journal).exists() else []
        if done(records) or time.monotonic() > end:
            return records
        time.sleep(0.1)


def _total(records: list[dict[str, Any]], name: str) -> int:
    return max((record["counts"].get(name, 0) for record in records if "counts" in record), default=0)


def _busy(records: list[dict[str, Any]]) -> bool:
    return min(_total(records, f"done.{kind}") for kind in ("store", "lookup", "retrieve", "edit")) > 3


@pytest.mark.parametrize("reconnects", [False, True])
def test_it_works_and_ends_in_order(server: DevServer, clients: Clients, tmp_path: Path, reconnects: bool) -> None:
    orders = _orders(server, tmp_path, reconnects=reconnects)
    pid = clients.spawn(orders)
    _wait(orders.report, lambda records: _busy(records) and (not reconnects or _total(records, "reconnects") > 0))
    assert clients.finish([pid], _SECONDS) == {pid: 0}
    records = read_journal(Path(orders.report))
    assert _busy(records) and _total(records, "retrieve.views") > 0
    assert [record for record in records if record.get("event") in ("wrong", "undocumented", "unexpected")] == []
    assert records[-1]["phase"] == "after"
    assert records[-1]["sample"]["fds"] == records[0]["sample"]["fds"]
    assert records[-1]["sample"]["threads"] == 1
    held = server.held()
    assert (held.read_locks, held.write_reservations, held.sessions) == (0, 0, 0)


def test_a_kill_leaves_its_journal(server: DevServer, clients: Clients, tmp_path: Path) -> None:
    orders = _orders(server, tmp_path)
    pid = clients.spawn(orders)
    _wait(orders.report, _busy)
    assert clients.kill(pid) == -9
    assert clients.ended_by_themselves() == {}
    assert _busy(read_journal(Path(orders.report)))


def test_a_byte_that_changes_in_the_pool_is_seen(server: DevServer, clients: Clients, tmp_path: Path) -> None:
    if not server.settings.shm_name:
        pytest.skip("its pool has no name")
    orders = _orders(server, tmp_path)
    pid = clients.spawn(orders)
    _wait(orders.report, _busy)
    (segment,) = Path("/dev/shm").glob(f"*{server.settings.shm_name}")
    with segment.open("r+b") as pool:
        for offset in range(0, POOL_NBYTES, 2**18):
            pool.seek(offset + 4711)
            (byte,) = pool.read(1)
            pool.seek(offset + 4711)
            pool.write(bytes([byte ^ 1]))
    records = _wait(orders.report, lambda records: any(record.get("event") == "wrong" for record in records))
    clients.finish([pid], _SECONDS)
    wrong = [record["text"] for record in records if record.get("event") == "wrong"]
    assert wrong
    assert "num_bytes=" in wrong[0]
