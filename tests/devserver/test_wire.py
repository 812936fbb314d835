"""Framing: what is echoed, what is met with silence, what ends the message thread, and that nothing else does."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_sdk import protocol as p
from lmcache_sdk.devserver import DevServer, PlayedEngine
from lmcache_sdk.devserver.behaviours import HIGHEST_OPCODE
from lmcache_sdk.values import CorrelationId
from tests.devserver.raw import (
    RELEASES,
    RawClient,
    Silent,
    key,
    lookup,
    prepare_store,
    registration,
    running,
    tokens_of,
)

KILLED = tuple(release for release in RELEASES if p.dialect_named(release).unknown_opcode_kills)
SPARED = tuple(release for release in RELEASES if release not in KILLED)


def opcode(release: str, request: type[p.Request[Any]]) -> int:
    found = p.dialect_named(release).rules[request].opcode
    assert isinstance(found, int)
    return found


def noop(release: str, uid: bytes = b"u") -> list[bytes]:
    return [uid, bytes([opcode(release, p.Noop)])]


def wait_until_ended(server: DevServer) -> None:
    until = time.monotonic() + 5
    while not server.message_thread_ended and time.monotonic() < until:
        time.sleep(0.005)
    assert server.message_thread_ended


@pytest.mark.parametrize("release", RELEASES)
def test_uid_and_operation_are_echoed_byte_for_byte(release: str) -> None:
    with running(release) as (_, client):
        number = opcode(release, p.Noop)
        for uid in (b"", b"\x00", b"any bytes \xff\xfe", b"x" * 1000):
            for operation in (bytes([number]), bytes([0xCC, number]), bytes([0xCD, 0, number])):
                assert client.raw([uid, operation]) == [uid, operation, b"\xa2OK"]


@pytest.mark.parametrize("release", RELEASES)
def test_void_is_two_frames_and_so_is_none(release: str) -> None:
    with running(release) as (_, client):
        number = bytes([opcode(release, p.EndSession)])
        assert client.raw([b"u", number, b"\xa1x"]) == [b"u", number]


@pytest.mark.parametrize("release", SPARED)
def test_operations_have_names_from_0_5_6(release: str) -> None:
    with running(release) as (_, client):
        assert client.raw([b"u", b"\xa4noop"]) == [b"u", b"\xa4noop", b"\xa2OK"]
        name = b"\xb5query_prefetch_status"
        assert client.raw([b"u", name, b"\xa1x"]) == [b"u", name, b"\x00"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_message_of_one_frame_ends_the_message_thread(release: str) -> None:
    with running(release) as (server, client):
        assert client.raw(noop(release)) is not None
        client.raw([b"alone"], timeout=0)
        wait_until_ended(server)
        assert client.raw(noop(release), timeout=0.1) is None
        with RawClient(server.url, release, patience=0.1) as other, pytest.raises(Silent):
            other.call(p.Noop())
        with urllib.request.urlopen(f"{server.http_url}/healthcheck", timeout=5) as response:
            assert json.loads(response.read()) == {"status": "healthy"}


UNDEFINED = [b"", b"\xa4noop", b"\x00", b"\xcc\xc8", b"\xff", b"\xc3", b"\xca\x41\xa8\x00\x00", b"\xcd\x01\x00"]


@pytest.mark.parametrize("operation", UNDEFINED, ids=repr)
@pytest.mark.parametrize("release", KILLED)
def test_an_undefined_operation_ends_the_message_thread(release: str, operation: bytes) -> None:
    with running(release) as (server, client):
        client.raw([b"u", operation], timeout=0)
        wait_until_ended(server)
        assert client.raw(noop(release), timeout=0.05) is None


@pytest.mark.parametrize("release", SPARED)
def test_an_undefined_operation_is_ignored_from_0_5_6(release: str) -> None:
    with running(release) as (server, client):
        for operation in [*UNDEFINED, b"\x0b", b"\xa7nothing"]:
            if operation != b"\xa4noop":
                client.raw([b"ignored", operation], timeout=0)
        assert client.raw(noop(release)) == [*noop(release), b"\xa2OK"]
        assert not server.message_thread_ended


@pytest.mark.parametrize("release", RELEASES)
def test_an_operation_of_the_release_that_is_not_imitated_is_silent(release: str) -> None:
    with running(release) as (server, client):
        for number in range(1, HIGHEST_OPCODE[release] + 1):
            client.raw([b"x", bytes([number]), b"\xc0", b"\xc0", b"\xc0", b"\xc0", b"\xc0", b"\xc0"], timeout=0)
        assert client.raw(noop(release)) == [*noop(release), b"\xa2OK"]
        assert not server.message_thread_ended


@pytest.mark.parametrize("release", ["0.5.3", "0.5.4", "0.5.5", "0.5.6"])
def test_get_experimental_moved(release: str) -> None:
    with running(release) as (server, client):
        number = 40 if release in ("0.5.3", "0.5.4") else 32
        assert client.raw([b"u", bytes([number])]) == [b"u", bytes([number]), b"\x90"]
        if release == "0.5.5":
            client.raw([b"u", b"\x28"], timeout=0)
            wait_until_ended(server)


@pytest.mark.parametrize("release", RELEASES)
def test_wrong_frame_counts_and_types_are_silent(release: str) -> None:
    with running(release) as (_, client):
        client.call(registration(1))
        dialect = client.dialect
        good = [
            bytes(frame) for frame in p.encode_request(dialect, CorrelationId(1), prepare_store(1, key(tokens_of(0))))
        ]
        for frames in (good[:-1], [*good, b"\xc0"], [*good[:2], b"\xc0", *good[3:]], [*good[:3], b"\xa11", *good[4:]]):
            client.raw(frames, timeout=0)
        unnamed = b"\x81\xa5start\x00"
        client.raw([good[0], good[1], unnamed, *good[3:]], timeout=0)
        assert client.raw(good) is not None
        assert client.receive(0.02) is None


@pytest.mark.parametrize("release", RELEASES)
def test_a_key_of_the_other_form_is_silent(release: str) -> None:
    other = "0.5.7rc2" if p.dialect_named(release).key_form is not p.KeyForm.TOKEN_BYTES else "0.5.6"
    with running(release) as (_, client):
        foreign = p.encode_request(p.dialect_named(other), CorrelationId(1), lookup(tokens_of(0), "r"))
        number = bytes([opcode(release, p.Lookup)])
        client.raw([bytes(foreign[0]), number, *(bytes(frame) for frame in foreign[2:])], timeout=0)
        assert client.raw(noop(release)) == [*noop(release), b"\xa2OK"]


@pytest.mark.parametrize("release", ["0.5.0", "0.5.4"])
def test_a_key_with_fields_of_a_later_release_is_taken(release: str) -> None:
    with running(release) as (_, client):
        later = p.encode_request(p.dialect_named("0.5.6"), CorrelationId(1), lookup(tokens_of(0), "r"))
        number = bytes([opcode(release, p.Lookup)])
        assert client.raw([b"u", number, *(bytes(frame) for frame in later[2:])]) == [b"u", number]


@pytest.mark.parametrize("mode", ["lmcache_driven", "engine_driven", "auto"])
def test_operations_that_the_mode_does_not_load(mode: str) -> None:
    models = [PlayedEngine(model_name="m", num_layers=2, head_dim=8)]
    with running(supported_transfer_mode=mode, models=models) as (server, client):
        refused = mode == "lmcache_driven"
        assert client.is_silent(registration(1)) is refused
        status = server.status()
        assert ("registered_non_cuda_instance_ids" in status) is not refused
        assert ("cache_context_meta" in status) is (mode != "engine_driven")
        client.call(lookup(tokens_of(0), "r"))


def test_replies_go_to_whom_they_belong() -> None:
    with running() as (server, client), RawClient(server.url, "0.5.6") as other:
        for number in range(20):
            client.socket.send_multipart([b"mine %d" % number, b"\x18"])
            other.socket.send_multipart([b"theirs %d" % number, b"\x18"])
        for number in range(20):
            assert client.receive(5) == [b"mine %d" % number, b"\x18", b"\xa2OK"]
            assert other.receive(5) == [b"theirs %d" % number, b"\x18", b"\xa2OK"]


def test_a_client_that_left_is_no_matter() -> None:
    with running() as (server, client):
        for _ in range(20):
            with RawClient(server.url, "0.5.6") as guest:
                guest.send(p.Ping(instance_id=None))
        assert client.call(p.Noop()).text == "OK"


# ---- anything at all -------------------------------------------------------------------------------------------------

small = st.binary(max_size=40)
operations = st.integers(1, 32).map(lambda number: bytes([number]))
texts = (
    st.text(max_size=8)
    .map(lambda text: bytes([0xA0 + len(text.encode())]) + text.encode())
    .filter(lambda b: len(b) < 32)
)
frames_of_a_message = st.one_of(
    st.lists(small, min_size=2, max_size=7),
    st.builds(
        lambda operation, rest: [b"u", operation, *rest], operations, st.lists(st.one_of(small, texts), max_size=4)
    ),
)


@pytest.fixture(scope="module")
def fuzzed() -> Any:
    with DevServer(speak="0.5.6", chunk_size=16, l1_size_bytes=2**20) as server:
        yield server


@given(frames_of_a_message)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_frames_leave_it_alive(fuzzed: DevServer, frames: list[bytes]) -> None:
    with RawClient(fuzzed.url, "0.5.6") as client:
        client.raw(frames, timeout=0)
        client.call(p.Ping(instance_id=None))
        client.call(p.Noop())
    assert fuzzed.counters["crashed"] == 0


numbers = st.one_of(
    st.integers(-3, 70), st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 16, 32, 48, 2**32, 2**62])
)
keys = st.builds(
    key,
    st.lists(st.integers(0, 2**32 - 1), max_size=70),
    model=st.sampled_from(["m", "", "a@b", "\x00"]),
    start=numbers,
    end=numbers,
    request_id=st.sampled_from(["a", "b", ""]),
    salt=st.sampled_from(["", "s", "a/b", "x" * 200]),
    worker_id=st.one_of(st.none(), numbers),
    world_size=numbers,
    readers=numbers,
)
instances = st.sampled_from([1, 2, -1, 2**63])
requests = st.one_of(
    st.builds(p.Lookup, key=keys, tp_size=numbers),
    st.builds(p.FreeLookupLocks, key=keys, tp_size=numbers),
    st.builds(p.PrepareStore, key=keys, instance_id=instances),
    st.builds(p.CommitStore, key=keys, instance_id=instances, data=small),
    st.builds(p.PrepareRetrieve, key=keys, instance_id=instances),
    st.builds(p.CommitRetrieve, key=keys, instance_id=instances),
    st.builds(p.QueryPrefetchStatus, request_id=st.sampled_from(["a", "b"])),
    st.builds(p.EndSession, request_id=st.sampled_from(["a", "b", ""])),
    st.builds(p.Unregister, instance_id=instances),
    st.builds(p.Clear, force=st.booleans()),
    st.builds(registration, instances, layers=numbers, hidden=numbers, world_size=numbers, slots=st.none() | numbers),
)


@pytest.mark.parametrize("release", ["0.5.1", "0.5.5", "0.5.6", "0.5.7rc2"])
@pytest.mark.parametrize("shared", [False, True])
@given(made=st.lists(requests, max_size=12))
@settings(max_examples=40, deadline=None)
def test_any_requests_leave_it_alive(release: str, shared: bool, made: list[p.Request[Any]]) -> None:
    """Nothing in the numbers of a request makes a handler fail in a way that was not meant."""
    from lmcache_sdk.devserver.core import Core
    from lmcache_sdk.devserver.operations import Operations
    from lmcache_sdk.devserver.sessions import RefusedError
    from lmcache_sdk.devserver.settings import Settings, unique_shm_name
    from lmcache_sdk.errors import KVCacheSDKError

    name = unique_shm_name() if shared else ""
    core = Core(Settings(speak=release, chunk_size=16, l1_size_bytes=2**16, shm_name=name))
    try:
        operations = Operations(core)
        for request in made:
            try:
                operations.answer(request)
            except (RefusedError, KVCacheSDKError):
                continue
        held = core.held()
        assert held.read_locks >= 0
        core.objects.clear(force=True)
        assert core.pool.used_nbytes == 0, "memory was lost"
    finally:
        core.close()
