"""Row 1, and the rows of 11 that are about connecting: addresses that lead nowhere or elsewhere, documents that lie."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

import pytest

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import (
    ConnectError,
    DeadlineExceededError,
    HTTPStatusError,
    KVCacheSDKError,
    NotRegisteredError,
    RemoteProtocolError,
    UnsupportedError,
    UsageError,
)
from lmcache_sdk import protocol as p
from tests.fix_faults import payload, reframed, silence, value
from tests.session.ports import HttpPort, Page, RawPort, closed_port, page, stay_silent

from .conftest import everywhere
from .liar import ENTRY, LAYOUT, MODEL, Liar, liar
from .report import SLACK, Fault
from .worlds import KV, FaultServer, World, tokens_of

T: Final = 1.0


def connect(url: str, http_url: str, model: Any = KV, timeout: Any = T, **more: Any) -> str:
    """Connects and closes; the transport."""
    with lmc_sdk.connect(url, http_url, model, timeout, **more) as ctx:
        return ctx.transport


def port_of(url: str) -> str:
    return url.rpartition(":")[2]


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.row("1.1")
def test_server_down(fault: Fault) -> None:
    http = f"http://127.0.0.1:{closed_port()}"
    error = fault.error(
        lambda: connect(f"tcp://127.0.0.1:{closed_port()}", http), ConnectError, within=0.5, says="refused"
    )
    assert http in str(error) and error.fate.name == "NOT_SENT"


@contextlib.contextmanager
def pages_of(here: World) -> Iterator[HttpPort]:
    """The pages of a real server at another port, so that its url can be wrong on purpose."""
    pages = {}
    for path in ("/lmc_version", "/config", "/status"):
        with urllib.request.urlopen(here.server.http_url + path, timeout=10) as response:
            pages[path] = Page(response.read())
    with HttpPort(pages) as port:
        yield port


@pytest.mark.row("1.2")
@pytest.mark.parametrize("what", ["closed", "black hole", "http server"])
def test_zmq_port_is_wrong(fault: Fault, here: World, what: str) -> None:
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(pages_of(here))
        if what == "black hole":
            port = str(stack.enter_context(RawPort(stay_silent)).port)
        else:
            port = port_of(here.server.http_url) if what == "http server" else str(closed_port())
        url = f"tcp://127.0.0.1:{port}"
        kinds = (ConnectError, DeadlineExceededError)
        within = 0.5 if what == "closed" else T + SLACK
        error = fault.error(lambda: connect(url, http.url), kinds, within=within, says=url)
        assert {"closed": "refused", "black hole": "handshake", "http server": "ZMTP"}[what] in str(error), error
    assert here.server.status()["is_healthy"]


@pytest.mark.row("1.3")
def test_http_is_closed(fault: Fault, here: World) -> None:
    http_url = f"http://127.0.0.1:{closed_port()}"
    error = fault.error(lambda: connect(here.server.url, http_url), ConnectError, within=0.5, says=http_url)
    assert "refused" in str(error)


@pytest.mark.row("1.4")
@everywhere
@pytest.mark.parametrize("how", ["swapped", "both zmq", "both http", "another host name", "through a proxy of ports"])
def test_urls_are_swapped(fault: Fault, here: World, how: str) -> None:
    zmq_port, http_port = port_of(here.server.url), port_of(here.server.http_url)
    with contextlib.ExitStack() as stack:
        urls = {
            "swapped": (f"tcp://127.0.0.1:{http_port}", f"http://127.0.0.1:{zmq_port}"),
            "both zmq": (here.server.url, f"http://127.0.0.1:{zmq_port}"),
            "both http": (f"tcp://127.0.0.1:{http_port}", here.server.http_url),
            "another host name": (here.server.url, f"http://localhost:{zmq_port}/"),
            "through a proxy of ports": (here.server.url, ""),
        }[how]
        if how == "through a proxy of ports":
            urls = (urls[0], f"http://127.0.0.1:{stack.enter_context(forwarding(int(zmq_port)))}")
        fault.error(lambda: connect(*urls, timeout=5), UsageError, within=SLACK, says="http_url")
    tokens = tokens_of(1)
    kv = here.values(len(tokens), 1)
    stored = False
    try:
        stored = bool(here.connect(timeout=3).store(kv, tokens))
    except KVCacheSDKError as error:
        fault.never(True, f"the server's message thread is dead: {error}")
    assert stored
    fault.exact(here.read(tokens), kv, "others")


@contextlib.contextmanager
def forwarding(target: int) -> Iterator[int]:
    """A port that leads to another, as a published port of a container does."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    def talk(connection: socket.socket, over: threading.Event) -> None:
        with socket.create_connection(("127.0.0.1", target)) as inner:
            back = threading.Thread(target=pump, args=(inner, connection))
            back.start()
            pump(connection, inner)
            with contextlib.suppress(OSError):
                inner.shutdown(socket.SHUT_RDWR)
            back.join(5)

    with RawPort(talk) as port:
        yield port.port


@pytest.mark.row("1.5")
@pytest.mark.parametrize("model", ["nobody's", "", None], ids=repr)
def test_model_is_wrong(fault: Fault, here: World, model: Any) -> None:
    kind = NotRegisteredError if model else UsageError
    error = fault.error(lambda: connect(here.server.url, here.server.http_url, model), kind, within=0.5)
    if isinstance(error, NotRegisteredError):
        assert KV in error.registered_models and KV in str(error)


@pytest.mark.row("1.6")
def test_lmcache_driven(fault: Fault, real_servers: None) -> None:
    fault.server, fault.transport = "0.5.6", "inline"
    with FaultServer("0.5.6", transport="inline", extra_args=("--supported-transfer-mode", "lmcache_driven")) as server:
        fault.error(
            lambda: connect(server.url, server.http_url),
            UnsupportedError,
            within=0.5,
            says="--supported-transfer-mode auto",
        )


@pytest.mark.parametrize(
    "timeout",
    [
        *(pytest.param(each, marks=pytest.mark.row("1.7")) for each in (0, -1, float("nan"), float("inf"), "5", True)),
        pytest.param(None, marks=pytest.mark.row("1.8")),
    ],
    ids=repr,
)
def test_timeout_is_wrong(fault: Fault, here: World, timeout: Any) -> None:
    fault.refused(lambda: connect(here.server.url, here.server.http_url, KV, timeout), says="timeout")


@pytest.mark.row("1.9")
def test_http_black_hole(fault: Fault, here: World) -> None:
    with RawPort(stay_silent) as port:
        http_url = f"http://127.0.0.1:{port.port}"
        call = lambda: connect(here.server.url, http_url)  # noqa: E731
        fault.error(call, DeadlineExceededError, within=T + 0.5, says=http_url)


@pytest.mark.row("1.10")
@pytest.mark.parametrize("what", ["status line", "headers", "body", "endless body"])
def test_http_drips(fault: Fault, here: World, what: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        if what == "endless body":
            connection.sendall(head + b"\r\n")
            while not over.is_set():
                connection.sendall(b" " * 2**20)
            return
        sent = {"status line": b"", "headers": head, "body": head + b"Content-Length: 100000\r\n\r\n"}[what]
        connection.sendall(sent)
        while not over.wait(0.1):
            connection.sendall({"status line": b"H", "headers": b"X", "body": b" "}[what])

    with RawPort(talk) as port:
        http_url = f"http://127.0.0.1:{port.port}"
        kinds = (DeadlineExceededError, RemoteProtocolError)
        fault.error(lambda: connect(here.server.url, http_url), kinds, within=T + 0.5, says=http_url)


@pytest.mark.row("1.11")
@pytest.mark.parametrize(
    "form", ["http://127.0.0.1:{}/", "127.0.0.1:{}", "http://127.0.0.1:{}//", "HTTP://localhost:{}"]
)
def test_http_url_is_normalised(fault: Fault, here: World, form: str) -> None:
    http_url = form.format(port_of(here.server.http_url))
    assert connect(here.server.url, http_url, timeout=5) == here.transport
    assert connect(here.server.url.removeprefix("tcp://"), http_url, timeout=5) == here.transport
    fault.saw("connected")


@pytest.mark.row("1.12")
@pytest.mark.parametrize(
    "url", ["", "ftp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://:1", "grpc://127.0.0.1:1", "tcp://h:0"]
)
def test_url_is_wrong(fault: Fault, here: World, url: str) -> None:
    fault.refused(lambda: connect(url, here.server.http_url), says="url")
    if not url.startswith("grpc"):
        fault.refused(lambda: connect(here.server.url, url.replace("tcp://127.0.0.1", "file:///x")), says="http_url")


# ---- documents -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["shm", "inline"])
def server(request: pytest.FixtureRequest, fault: Fault) -> Iterator[Liar]:
    fault.server, fault.transport = "scripted 0.5.6", request.param
    with liar("0.5.6", request.param) as made:
        yield made


def connect_liar(server: Liar) -> str:
    return connect(server.url, server.http_url, MODEL)


def nothing_sent(server: Liar) -> None:
    assert server.server.requests == []


CONFIGS: Final[dict[str, Page]] = {
    "chunk 0": page({"mp": {"chunk_size": 0, "supported_transfer_mode": "auto"}}),
    "chunk -1": page({"mp": {"chunk_size": -1, "supported_transfer_mode": "auto"}}),
    "chunk abc": page({"mp": {"chunk_size": "abc", "supported_transfer_mode": "auto"}}),
    "chunk 2**70": Page(b'{"mp": {"chunk_size": 1180591620717411303424, "supported_transfer_mode": "auto"}}'),
    "no mp": page({}),
    "mp null": page({"mp": None}),
    "list": page([1]),
    "html": Page(b"<html>hello</html>"),
    "status 500": Page(b'{"detail": "broken"}', 500),
    "empty": Page(b""),
    "deep": Page(b"[" * 100_000),
    "not utf-8": Page(b'{"mp": "\xff\xfe"}'),
}


@pytest.mark.row("11.12")
@pytest.mark.parametrize("form", CONFIGS)
def test_config(fault: Fault, server: Liar, form: str) -> None:
    server.pages["/config"] = CONFIGS[form]
    kinds = (RemoteProtocolError, HTTPStatusError)
    fault.error(lambda: connect_liar(server), kinds, within=0.5, says="config")
    nothing_sent(server)


def entry(**layout: Any) -> dict[str, Any]:
    return {"1": {**ENTRY, "kv_cache_layout": {**LAYOUT, **layout}}}


def group(**fields: Any) -> dict[str, Any]:
    return entry(kernel_groups=[{**LAYOUT["kernel_groups"][0], **fields}])


STATUSES: Final[dict[str, dict[str, Any]]] = {
    "0 layers": group(num_layers=0),
    "huge layers": group(num_layers=2**40),
    "shape": group(engine_kv_concrete_shape="2 x [8, 2, 1]"),
    "shape text": group(engine_kv_concrete_shape="x" * 10_000),
    "entry without layout": {"1": {"model_name": MODEL, "world_size": 1}},
    "world size 0": {"1": {**ENTRY, "world_size": 0}},
    "no groups": entry(kernel_groups=[]),
    "100000 groups": entry(kernel_groups=[{}] * 100_000),
}
UNSTORABLE: Final[dict[str, dict[str, Any]]] = {
    "dtype Tensor": group(dtype="torch.Tensor"),
    "format": group(engine_kv_format="NEW_FORMAT"),
}


@pytest.mark.row("11.13")
@pytest.mark.parametrize("form", ["null", "list", "503", "html", "empty", "chunk 0", "endless list", "meta a list"])
def test_status(fault: Fault, server: Liar, form: str) -> None:
    pages: dict[str, Page] = {
        "null": page(None),
        "list": page([]),
        "503": Page(b"{}", 503),
        "html": Page(b"<html>"),
        "empty": Page(b""),
        "chunk 0": server.status(chunk_size=0),
        "endless list": Page(b"[" + b"0," * 2_000_000),
        "meta a list": server.status(cache_context_meta=[ENTRY]),
    }
    server.pages["/status"] = pages[form]
    kinds = (RemoteProtocolError, HTTPStatusError)
    fault.error(lambda: connect_liar(server), kinds, within=1.0, says="status")
    nothing_sent(server)


@pytest.mark.row("11.13")
@pytest.mark.parametrize("form", STATUSES)
def test_status_entry(fault: Fault, server: Liar, form: str) -> None:
    """The model's own entry is wrong: connecting fails with the field's path, or stores are refused with it."""
    server.pages["/status"] = server.status(cache_context_meta=STATUSES[form])
    said = ""

    def whole() -> None:
        with lmc_sdk.connect(server.url, server.http_url, MODEL, T) as ctx:
            server.pages["/status"] = server.status
            ctx.store(server.values(4, 1), [1, 2, 3, 4])

    error = fault.error(whole, KVCacheSDKError, within=1.0, says="cache_context_meta.1")
    said = str(error)
    assert len(said) < 1000
    assert server.server.instances == {}


@pytest.mark.row("11.13")
@pytest.mark.parametrize("form", UNSTORABLE)
def test_status_entry_that_is_only_unknown(fault: Fault, server: Liar, form: str) -> None:
    """What is cached describes itself: reading works, storing says what is not known."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    kv = server.cache(tokens, 2)
    server.pages["/status"] = server.status(cache_context_meta=UNSTORABLE[form])
    with lmc_sdk.connect(server.url, server.http_url, MODEL, T) as ctx:
        server.pages["/status"] = server.status
        error = fault.error(lambda: ctx.store(kv, tokens), KVCacheSDKError, within=0.5)
        assert "Tensor" in str(error) or "NEW_FORMAT" in str(error), error
        fault.exact(ctx.retrieve(tokens), kv)


# ---- REGISTER --------------------------------------------------------------------------------------------------------

POOLS: Final[dict[str, Any]] = {
    "huge": {"shm_name": None, "pool_size": 1 << 45},
    "no fields": {},
    "a path": {"shm_name": "../../etc/passwd", "pool_size": 4096},
    "a path in the name": {"shm_name": "lmcache_l1_pool_/../x", "pool_size": 4096},
    "missing": {"shm_name": "lmcache_l1_pool_nobody", "pool_size": 4096},
    "size 0": {"shm_name": None, "pool_size": 0},
    "negative": {"shm_name": None, "pool_size": -1},
    "text": {"shm_name": None, "pool_size": "4096"},
    "name a number": {"shm_name": 7, "pool_size": 4096},
}


@pytest.mark.row("11.14")
@pytest.mark.parametrize("form", POOLS)
def test_pool_that_cannot_be(fault: Fault, server: Liar, form: str) -> None:
    reply = dict(POOLS[form])
    if "shm_name" in reply and reply["shm_name"] is None:
        reply["shm_name"] = server.server.shm_name or "lmcache_l1_pool_x"
    server.server.on(p.Register, value(reply))
    error = fault.error(lambda: connect_liar(server), (RemoteProtocolError, ConnectError), within=1.0)
    assert "shm_name" in str(error) or "pool" in str(error) or "register" in str(error), error
    server.server.wait_until(lambda: not server.server.instances)


@pytest.mark.row("11.15")
@pytest.mark.parametrize("form", ["garbage", "void", "silence", "a list"])
def test_register_is_not_answered_right(fault: Fault, server: Liar, form: str) -> None:
    action = {
        "garbage": payload(b"\xc1"),
        "void": reframed(lambda frames: frames[:2]),
        "silence": silence,
        "a list": value([]),
    }[form]
    server.server.on(p.Register, action)
    kind = DeadlineExceededError if form == "silence" else RemoteProtocolError
    within = T + SLACK if form == "silence" else 0.5
    fault.error(lambda: connect_liar(server), kind, within=within, says="REGISTER" if form == "silence" else "")
    server.server.wait_until(lambda: not server.server.instances)
    assert json.loads(server.status().body)["non_cuda_context_meta"] == {}
