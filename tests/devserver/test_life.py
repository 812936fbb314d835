"""Starting, ending, pausing, intercepting; the command line. That nothing is left behind, fix_leaks.py sees to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import torch

from lmcache_sdk import protocol as p
from lmcache_sdk.devserver import DevServer, Settings, Verdict, unique_shm_name
from lmcache_sdk.devserver.cli import make_server, parse
from lmcache_sdk.errors import UnsupportedError, UsageError
from tests.devserver.raw import (
    RawClient,
    Silent,
    chunks,
    commit_store,
    key,
    lookup,
    payload,
    prepare_store,
    query,
    registration,
    running,
    tokens_of,
)
from tests.fix_leaks import Snapshot, leaked_since


def test_closing_is_quick_with_clients_of_every_kind_connected() -> None:
    server = DevServer(chunk_size=16, shm_name=unique_shm_name())
    server.start()
    with requests.Session() as idle, RawClient(server.url, "0.5.6") as client:
        idle.get(f"{server.http_url}/status", timeout=5)
        split = urlsplit(server.http_url)
        with socket.create_connection((split.hostname or "", split.port or 0)) as half:
            half.sendall(b"GET /status HTTP/1.1\r\nHo")
            client.call(registration(1))
            started = time.monotonic()
            server.close()
            assert time.monotonic() - started < 2
    server.close()


def test_twenty_lives_leave_nothing() -> None:
    with DevServer(chunk_size=16):
        pass
    before = Snapshot.take()
    for _ in range(20):
        with running(shm_name=unique_shm_name()) as (_, client):
            client.call(registration(1))
            client.call(prepare_store(1, key(tokens_of(0))))
    assert not leaked_since(before)


def test_the_pool_file_goes_whatever_happens() -> None:
    name = unique_shm_name()
    path = Path("/dev/shm", f"lmcache_l1_pool_{name}")
    server = DevServer(shm_name=name)
    server.__enter__()
    assert path.exists()
    server.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert not path.exists()


@pytest.mark.parametrize("which", ["port", "http_port"])
def test_a_port_that_is_taken_fails_and_leaves_nothing(which: str) -> None:
    name = unique_shm_name()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = DevServer(shm_name=name, **{which: taken.getsockname()[1]})
        with pytest.raises(OSError, match="in use"):
            server.start()
    assert not Path("/dev/shm", f"lmcache_l1_pool_{name}").exists()


def test_it_comes_back_on_the_same_ports_with_a_new_pool() -> None:
    name = unique_shm_name()
    with DevServer(shm_name=name) as first:
        port, http_port = (urlsplit(url).port or 0 for url in (first.url, first.http_url))
        inode = Path("/dev/shm", first.shm_name).stat().st_ino
        with RawClient(first.url, "0.5.6") as client:
            client.call(registration(1))
    with DevServer(shm_name=name, port=port, http_port=http_port) as second:
        assert Path("/dev/shm", second.shm_name).stat().st_ino != inode
        assert second.held().registrations == set()


def test_it_starts_once_and_tells_nothing_before() -> None:
    server = DevServer()
    with pytest.raises(UsageError, match="not started"):
        _ = server.url
    assert "not started" in repr(server)
    with server:
        with pytest.raises(UsageError, match="once"):
            server.start()
        assert "0.5.6" in repr(server)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_size": 0},
        {"chunk_size": 2**21},
        {"supported_transfer_mode": "push"},
        {"api_key": "k"},
        {"l1_size_bytes": 10},
        {"shm_name": "a/b"},
    ],
    ids=str,
)
def test_what_no_server_can_be_started_with(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError), DevServer(**wrong):
        pass


def test_an_unknown_release_is_unsupported() -> None:
    with pytest.raises(UnsupportedError):
        DevServer(speak="0.4.7")


@pytest.mark.parametrize(("release", "shared"), [("0.5.3", True), ("0.5.4", False)])
def test_without_a_name_the_release_decides(release: str, shared: bool) -> None:
    with DevServer(speak=release, shm_name=None) as server:
        assert bool(server.shm_name) is shared
        assert Path("/dev/shm", server.shm_name).is_file() is shared


def test_the_defaults_of_settings_are_those_of_the_real_server() -> None:
    settings = Settings()
    assert (settings.read_ttl, settings.write_ttl, settings.session_ttl) == (300, 600, 600)
    assert (settings.reap, settings.grace) == (120, 3600)


# ---- silence on purpose ----------------------------------------------------------------------------------------------


def test_paused_it_is_silent_and_answers_later() -> None:
    with running() as (server, client):
        client.call(registration(1))
        server.pause()
        sent = [client.send(p.Noop()), client.send(p.Ping(instance_id=None)), client.send(lookup(tokens_of(0), "r"))]
        assert client.receive(0.1) is None
        with pytest.raises(requests.Timeout):
            requests.get(f"{server.http_url}/status", timeout=0.1)
        server.resume()
        answered = {int(p.decode_correlation_id(client.receive(5) or [])) for _ in sent}
        assert answered == set(sent)
        assert requests.get(f"{server.http_url}/status", timeout=5).status_code == 200


def test_a_paused_server_closes() -> None:
    with running() as (server, client):
        server.pause()
        client.send(p.Noop())


@pytest.mark.parametrize("verdict", list(Verdict))
def test_intercept(verdict: Verdict) -> None:
    with running() as (server, client):
        client.call(registration(1))
        seen: list[str] = []

        def decide(request: p.Request[Any]) -> Verdict:
            seen.append(type(request).__name__)
            return verdict if isinstance(request, p.Lookup) else Verdict.ANSWER

        server.intercept(decide)
        client.patience = 0.1 if verdict is not Verdict.ANSWER else 5
        client.send(lookup(tokens_of(0), "r"))
        client.call(p.Ping(instance_id=None))
        assert seen == ["Lookup", "Ping"]
        assert server.held().jobs == (0 if verdict is Verdict.IGNORE else 1)
        server.intercept(None)
        client.call(lookup(tokens_of(0), "s"))
        assert len(seen) == 2


def test_the_loop_answers_while_a_worker_is_busy() -> None:
    """SYNC operations do not wait for a transfer, nor does a lookup."""
    with running() as (server, client):
        client.call(registration(1))
        release, entered = threading.Event(), threading.Event()

        def hold(request: p.Request[Any]) -> Verdict:
            if isinstance(request, p.CommitStore):
                entered.set()
                release.wait(5)
            return Verdict.ANSWER

        server.intercept(hold)
        named = key(tokens_of(0))
        uid = client.send(commit_store(1, named, payload("0.5.6", chunks(2))))
        behind = client.send(prepare_store(1, key(tokens_of(100))))
        assert entered.wait(5)
        assert client.call(p.Noop()).text == "OK"
        assert client.call(p.Ping(instance_id=None)).alive
        assert client.call(query("nothing")).ready_chunks == 0
        release.set()
        answered = [int(p.decode_correlation_id(client.receive(5) or [])) for _ in range(2)]
        assert answered == [uid, behind], "transfers of one connection are answered in order"


def test_clients_in_many_threads() -> None:
    def live(server: DevServer, number: int) -> int:
        found = 0
        with RawClient(server.url, "0.5.6") as client:
            client.call(registration(number))
            for turn in range(10):
                tokens = tokens_of(1000 * number + 100 * turn)
                assert client.call(commit_store(number, key(tokens), payload("0.5.6", chunks(2)))).success
                client.call(lookup(tokens, f"{number}-{turn}"))
                found += client.call(query(f"{number}-{turn}")).ready_chunks or 0
        return found

    with running(l1_size_bytes=2**24) as (server, _), ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda number: live(server, number), range(1, 7))) == [20] * 6
        assert server.held().registrations == set(range(1, 7))
        assert server.leases() == 6 * 10 * 2


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_makes_what_it_says() -> None:
    line = "--port 0 --http-port 0 --speak 0.5.7rc2 --chunk-size 32 --l1-size-mb 3 --read-ttl 7 --api-key k"
    engine = "--model a/b --layers 3 --kv-heads 4 --head-dim 8 --dtype float16 --fused"
    server = make_server(parse(f"{line} {engine}".split()))
    assert server.settings.dialect.release == "0.5.7rc2"
    assert server.settings.chunk_size == 32
    assert server.settings.l1_size_bytes == 3 * 2**20
    assert server.settings.read_ttl == 7
    assert server.settings.api_key == "k"
    (model,) = server._models
    assert (model.model_name, model.form, model.dtype) == ("a/b", "FUSED", torch.float16)
    assert (model.num_layers, model.num_kv_heads, model.head_dim) == (3, 4, 8)


@pytest.mark.parametrize("flag", ["--mla", "--planes 1"])
def test_one_plane_on_the_command_line(flag: str) -> None:
    (model,) = make_server(parse(f"--model m {flag}".split()))._models
    assert (model.form, model.num_kv_heads) == ("MLA", 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_the_process_says_ready_and_ends_cleanly(number: signal.Signals) -> None:
    name = unique_shm_name()
    command = [sys.executable, "-m", "lmcache_sdk.devserver", "--port", "0", "--http-port", "0", "--shm-name", name]
    path = Path("/dev/shm", f"lmcache_l1_pool_{name}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            words = process.stdout.readline().split()
            assert words[0] == "ready"
            url, http_url = (word.partition("=")[2] for word in words[1:])
            with RawClient(url, "0.5.6") as client:
                assert client.call(registration(1)).shm_name == path.name
            assert requests.get(f"{http_url}/lmc_version", timeout=5).json() == "0.5.6"
            assert path.exists()
            os.kill(process.pid, number)
            assert process.wait(10) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            process.kill()
    assert not path.exists()


@pytest.mark.slow
def test_a_wrong_start_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "lmcache_sdk.devserver", "--port", port, "--http-port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("devserver: ")
    assert done.stdout == ""


def test_silent_names_the_request() -> None:
    with running() as (_, client), pytest.raises(Silent, match="PrepareStore"):
        client.call(prepare_store(1, key(tokens_of(0))))
