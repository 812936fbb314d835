"""connect: what it sends and in which order, its arguments, and what is refused before anything is sent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import (
    ArgumentTypeError,
    Fate,
    KVCacheSDKError,
    UnsupportedError,
    UsageError,
)
from lmcache_sdk import protocol as p
from tests.facade.rig import CHUNK, LAYOUT, MODEL, TOKENS, Rig
from tests.fix_fake_server import NOTHING
from tests.session.pages import config_page
from tests.session.ports import RawPort


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# ---- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", p.DIALECTS)
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "inline"])
def test_it_tells_what_it_found(release: str, shm: bool) -> None:
    with Rig(release, shm=shm) as rig:
        ctx = rig.connect()
        assert (ctx.dialect, ctx.server_version, ctx.model_name) == (release, release, MODEL)
        assert (ctx.transport, ctx.chunk_size, ctx.closed) == ("shm" if shm else "inline", CHUNK, False)
        assert ctx.layout == LAYOUT
        assert repr(ctx) == f"<LMCacheKVCacheContext {MODEL!r} {ctx.transport} {release} open>"
        assert rig.server.held() == NOTHING
        ctx.close()
        assert rig.server.instances == {} and rig.server.held() == NOTHING
        assert ctx.closed and repr(ctx).endswith("closed>")


def test_it_registers_a_private_name_with_the_engines_numbers(rig: Rig) -> None:
    rig.connect()
    registration = rig.server.asked(p.Register)[0].registration
    assert registration.model_name != MODEL and "@" not in registration.model_name
    assert (registration.num_layers, registration.hidden_dim_size, registration.dtype_str) == (2, 4, "float32")
    assert (registration.block_size, registration.num_physical_slots) == (CHUNK, CHUNK)
    assert (registration.world_size, registration.use_mla) == (1, False)


def test_no_name_and_no_id_is_used_twice(rig: Rig) -> None:
    for _ in range(3):
        rig.connect().close()
    registrations = [request.registration for request in rig.server.asked(p.Register)]
    assert (
        len({r.model_name for r in registrations}) == len({r.instance_id for r in registrations}) == len(registrations)
    )


def test_an_inline_server_of_a_known_release_needs_no_proof(inline_rig: Rig) -> None:
    inline_rig.connect()
    assert inline_rig.server.names() == ["Register"]


def test_a_named_dialect_is_proven_before_real_data_is_touched(inline_rig: Rig) -> None:
    ctx = inline_rig.connect(dialect="0.5.6")
    assert {"CommitStore", "PrepareRetrieve"} <= set(inline_rig.server.names())
    assert all(request.key.model_name != MODEL for request in inline_rig.server.asked(p.CommitStore))
    assert ctx.dialect == "0.5.6" and inline_rig.server.held() == NOTHING


def test_the_proof_leaves_only_its_object(shm_rig: Rig) -> None:
    shm_rig.connect()
    assert len(shm_rig.server.instances) == 1 and len(shm_rig.server.objects) == 1
    names = shm_rig.server.names()
    assert names[:2] == ["Register", "Register"] and names[-1] == "Unregister"


def test_it_is_a_context_manager(rig: Rig) -> None:
    with rig.connect() as ctx:
        assert not ctx.closed
    assert ctx.closed and rig.server.instances == {}
    with pytest.raises(ZeroDivisionError), rig.connect() as ctx:
        print(1 // 0)
    assert ctx.closed


# ---- arguments -------------------------------------------------------------------------------------------------------

WRONG: Final[list[tuple[dict[str, Any], type[KVCacheSDKError], str]]] = [
    ({"url": ""}, UsageError, "url: "),
    ({"url": None}, ArgumentTypeError, "url: "),
    ({"url": "udp://host:5"}, UsageError, "url: "),
    ({"http_url": "ftp://host:5"}, UsageError, "http_url: "),
    ({"model_name": ""}, UsageError, "model_name: "),
    ({"model_name": None}, ArgumentTypeError, "model_name: "),
    ({"timeout": 0}, UsageError, "timeout: "),
    ({"timeout": -1}, UsageError, "timeout: "),
    ({"timeout": None}, ArgumentTypeError, "timeout: "),
    ({"timeout": "60"}, ArgumentTypeError, "timeout: "),
    ({"layout": "HND"}, UsageError, "layout: "),
    ({"layout": {"num_layers": 2}}, UsageError, "layout: "),
    ({"dialect": 0.5}, ArgumentTypeError, "dialect: "),
    ({"dialect": "0.9.9"}, UnsupportedError, "dialect="),
    ({"api_key": 5}, ArgumentTypeError, "api_key: "),
    ({"api_key": "a\nb"}, UsageError, "api_key: "),
    ({"transport": "rdma"}, UsageError, "transport: "),
    ({"transport": True}, UsageError, "transport: "),
]


@pytest.mark.parametrize(("wrong", "kind", "name"), WRONG, ids=lambda case: str(case)[:40])
def test_a_wrong_argument_is_named_and_nothing_is_asked(
    inline_rig: Rig, wrong: dict[str, Any], kind: type[KVCacheSDKError], name: str
) -> None:
    with pytest.raises(kind) as caught:
        inline_rig.connect(**wrong)
    assert str(caught.value).startswith(name) and caught.value.fate is Fate.NOT_SENT
    assert inline_rig.http.visits == [] and inline_rig.server.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "0.0.0.0"])
def test_swapped_urls_of_one_port_are_refused_before_anything_is_sent(host: str) -> None:
    heard: list[bytes] = []

    def listen(connection: socket.socket, over: threading.Event) -> None:
        heard.append(connection.recv(65536))

    with RawPort(listen) as port:
        with pytest.raises(UsageError, match=r"^http_url: "):
            lmc_sdk.connect(f"tcp://127.0.0.1:{port.port}", f"http://{host}:{port.port}", MODEL, 5)
        assert port.num_connections == 0 and heard == []


def test_swapped_urls_are_recognised_before_one_byte_is_sent(rig: Rig) -> None:
    """The ZMQ port as http_url: one HTTP line ends the message thread of a real server for all its clients."""
    with within(3), pytest.raises(UsageError, match=r"^http_url: .*swapped"):
        rig.connect(url=rig.http.url.replace("http", "tcp"), http_url=rig.port.url.replace("tcp", "http"))
    assert rig.server.requests == [] and rig.server.malformed == []
    assert rig.connect().lookup(TOKENS).hit_tokens == 0  # the port lives


# ---- transport= ------------------------------------------------------------------------------------------------------


def test_the_transport_is_asserted(rig: Rig) -> None:
    found, other = ("shm", "inline") if rig.shm else ("inline", "shm")
    assert rig.connect(transport=found).transport == found
    with pytest.raises(UnsupportedError, match=r"--shm-name") as caught:
        rig.connect(transport=other)
    assert f"transport={other!r}" in str(caught.value)
    assert len(rig.server.instances) == 1


def test_a_pool_that_was_asked_for_and_is_not_there_says_why(inline_rig: Rig) -> None:
    inline_rig.http.pages["/config"] = config_page(shm_name="wanted")
    with pytest.raises(UnsupportedError, match=r"'wanted'.*announces no pool.*too small"):
        inline_rig.connect(transport="shm")
