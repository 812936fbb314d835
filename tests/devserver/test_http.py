"""HTTP: the paths of each release, and that our own documents can read what is served."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from lmcache_sdk import protocol as p
from lmcache_sdk.devserver import DevServer, unique_shm_name
from tests.devserver.raw import (
    RELEASES,
    chunks,
    commit_store,
    key,
    lookup,
    payload,
    query,
    registration,
    running,
    tokens_of,
)


def get(server: DevServer, path: str, **options: Any) -> requests.Response:
    return requests.get(f"{server.http_url}{path}", timeout=10, **options)


def clear(server: DevServer, path: str = "/cache/clear", **options: Any) -> requests.Response:
    return requests.post(f"{server.http_url}{path}", timeout=10, **options)


@pytest.mark.parametrize("release", RELEASES)
def test_versions(release: str) -> None:
    with DevServer(speak=release) as server:
        assert get(server, "/lmc_version").json() == release
        version = p.parse_version(get(server, "/version").content, "version")
        assert version.rpartition("-")[0] == release
        assert p.dialect_of_server(version.rpartition("-")[0]).release == release
        assert get(server, "/healthcheck").json() == {"status": "healthy"}
        assert get(server, "/healthcheck").headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("shared", [True, False])
def test_config(release: str, shared: bool) -> None:
    name = unique_shm_name() if shared else ""
    with DevServer(speak=release, shm_name=name, chunk_size=32, supported_transfer_mode="engine_driven") as server:
        path = p.dialect_named(release).config_path
        other = "/config" if path == "/conf" else "/conf"
        assert get(server, other).status_code == 404
        config = p.parse_config(get(server, path).content)
        assert config.mp.chunk_size == 32
        assert config.mp.supported_transfer_mode == "engine_driven"
        assert config.mp.shm_name == name
        assert f":{config.mp.port}" in server.url
        raw = get(server, path).json()
        memory = raw["storage_manager"]["l1_manager_config"]["memory_config"]
        assert memory["shm_name"] == server.shm_name
        assert ("transport" in raw["mp"]) is (RELEASES.index(release) >= RELEASES.index("0.5.5"))
        assert ("session_ttl_seconds" in raw["mp"]) is (RELEASES.index(release) >= RELEASES.index("0.5.6"))


@pytest.mark.parametrize("release", RELEASES)
def test_status_counts(release: str) -> None:
    with running(release) as (server, client):
        client.call(registration(5, model="mine", mla=True))
        client.call(registration(6, model="m"))
        client.call(commit_store(6, key(tokens_of(0)), payload(release, chunks(2))))
        client.call(lookup(tokens_of(0), "r"))
        status = p.parse_status(get(server, "/status").content)
        assert status.chunk_size == 16
        assert status.active_prefetch_jobs == 1
        assert status.active_sessions == 2
        manager = status.storage_manager.l1_manager
        assert (manager.total_object_count, manager.read_locked_count, manager.write_locked_count) == (2, 2, 0)
        assert manager.memory_used_bytes == 2 * 4096
        assert (manager.read_ttl_seconds, manager.write_ttl_seconds) == (300, 600)
        assert status.registered_non_cuda_instance_ids == [5, 6]
        entry = p.engine_driven_entries(status, "mine")["status.non_cuda_context_meta.5"]
        assert (entry.world_size, entry.block_size, entry.use_mla) == (1, 16, True)
        assert p.registered_models(status) == ("m", "mine")
        assert status.worker_liveness is not None
        assert status.worker_liveness["tracked_instances"] == 2
        client.call(query("r"))
        assert get(server, "/status").json() == json.loads(json.dumps(server.status()))


def stored(server: DevServer) -> int:
    return p.parse_status(get(server, "/status").content).storage_manager.l1_manager.total_object_count


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("body", "forced"), [(None, None), ({}, None), ({"tier": "l1", "force": True}, True), ({"force": False}, False)]
)
def test_clear(release: str, body: dict[str, object] | None, forced: bool | None) -> None:
    """Up to 0.5.5 forced unless told otherwise; 0.5.0 always, under another path."""
    with running(release) as (server, client):
        client.call(registration(1))
        client.call(commit_store(1, key(tokens_of(0)), payload(release, chunks(2))))
        client.call(commit_store(1, key(tokens_of(100)), payload(release, chunks(2))))
        client.call(lookup(tokens_of(0), "r"))
        old = RELEASES.index(release) < RELEASES.index("0.5.6")
        if release == "0.5.0":
            assert clear(server).status_code == 404
            assert clear(server, "/clear-cache", json=body).status_code == 200
            assert stored(server) == 0
            return
        answer = clear(server, json=body)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "cleared": {"tier": "l1"}})
        assert stored(server) == (0 if (old if forced is None else forced) else 2)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("force", [True, False])
def test_clear_over_messages(release: str, force: bool) -> None:
    with running(release) as (server, client):
        client.call(registration(1))
        client.call(commit_store(1, key(tokens_of(0)), payload(release, chunks(2))))
        client.call(lookup(tokens_of(0), "r"))
        client.call(p.Clear(force=force))
        kept = not force and RELEASES.index(release) >= RELEASES.index("0.5.6")
        assert stored(server) == (2 if kept else 0)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"json": {"tier": "l2"}}, 400),
        ({"data": b"{"}, 422),
        ({"json": []}, 422),
        ({"json": {"force": "yes"}}, 422),
        ({"json": {"tier": 3}}, 422),
    ],
    ids=str,
)
def test_a_wrong_clear(options: dict[str, Any], code: int) -> None:
    with DevServer() as server:
        answer = clear(server, **options)
        assert answer.status_code == code
        assert "detail" in answer.json()


def test_other_paths_and_methods() -> None:
    with DevServer() as server:
        assert get(server, "/").json()["status"] == "ok"
        assert (get(server, "/nothing").status_code, get(server, "/nothing").json()) == (404, {"detail": "Not Found"})
        assert clear(server, "/status").status_code == 405
        assert get(server, "/status?x=1").status_code == 200
        assert requests.put(server.http_url, timeout=5).status_code == 501


def test_the_api_key_guards_all_but_the_health() -> None:
    with DevServer(speak="0.5.7rc2", api_key="secret") as server:
        for path in ("/", "/healthcheck"):
            assert get(server, path).status_code == 200
        refused = get(server, "/status")
        assert refused.status_code == 401
        assert "detail" in refused.json()
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        wrong = ({"Authorization": "Bearer no"}, {"Authorization": "Basic secret"}, {"X-LMCache-API-Key": ""})
        assert [get(server, "/config", headers=each).status_code for each in wrong] == [401, 401, 401]
        right = (
            {"Authorization": "Bearer secret"},
            {"X-LMCache-API-Key": "secret"},
            {"authorization": "bearer secret"},
        )
        assert [get(server, "/config", headers=each).status_code for each in right] == [200, 200, 200]
        assert clear(server).status_code == 401
        assert get(server, "/nothing").status_code == 401


def test_one_connection_takes_many_requests() -> None:
    with DevServer() as server, requests.Session() as session:
        for _ in range(5):
            assert session.get(f"{server.http_url}/status", timeout=5).status_code == 200
            assert session.post(f"{server.http_url}/cache/clear", json={}, timeout=5).status_code == 200


def test_a_huge_body_is_not_read() -> None:
    with DevServer() as server:
        assert clear(server, data=b" " * (2**20 + 1)).status_code == 200
