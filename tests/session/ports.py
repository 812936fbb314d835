"""Real sockets for tests, all on 127.0.0.1, all gone when their block ends.

`MessagePort` moves frames between clients and a FakeServer, on a ROUTER in a thread of its own, and keeps the delays of
its answers. `HttpPort` serves scripted pages and remembers what it was asked. `RawPort` hands each connection to a
function: what no well-behaved server does.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final

import attrs
import pytest
import zmq

from lmcache_sdk.values import override
from tests.fix_fake_server import FakeServer

JOIN: Final = 10.0


class _Port:
    """A thread that serves until its block ends."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=type(self).__name__, daemon=True)

    def _serve(self) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it; twice does no harm."""
        if self._thread.is_alive():
            self._stop()
            self._thread.join(JOIN)
            assert not self._thread.is_alive(), f"{self._thread.name} did not end"


class MessagePort(_Port):
    """The ZMQ port of a FakeServer."""

    def __init__(self, server: FakeServer, url: str = "tcp://127.0.0.1:0") -> None:
        super().__init__()
        self.server = server
        server.patience = 0.5
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(url)
        self.url = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_read, self._wake_write = os.pipe()

    def __enter__(self) -> MessagePort:
        self._thread.start()
        return self

    @override
    def _stop(self) -> None:
        os.write(self._wake_write, b"!")

    @override
    def _serve(self) -> None:
        order = itertools.count()
        due: list[tuple[float, int, list[bytes]]] = []
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        try:
            while True:
                wait = math.ceil(max(0.0, due[0][0] - time.monotonic()) * 1000) if due else None
                ready: dict[object, int] = dict(poller.poll(wait))
                if self._wake_read in ready:
                    return
                if self._router in ready:
                    peer, *frames = self._router.recv_multipart()
                    for delivery in self.server.take(frames):
                        message = [peer, *delivery.frames]
                        heapq.heappush(due, (time.monotonic() + delivery.delay, next(order), message))
                while due and due[0][0] <= time.monotonic():
                    self._router.send_multipart(heapq.heappop(due)[2])
        finally:
            self._router.close()
            self._context.term()
            os.close(self._wake_read)
            os.close(self._wake_write)


# ---- HTTP ------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Page:
    """One answer of an HTTP port."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Visit:
    """One request that an HTTP port got."""

    path: str
    headers: Mapping[str, str]


def page(document: object) -> Page:
    """A page of JSON."""
    return Page(json.dumps(document).encode())


Pages = Mapping[str, Page | Callable[[], Page]]


class HttpPort(_Port):
    """Serves `pages` by path, 404 for others; each page may be changed at any time, or be made when it is asked for."""

    def __init__(self, pages: Pages | None = None, *, keep_alive: bool = True) -> None:
        super().__init__()
        self.pages: dict[str, Page | Callable[[], Page]] = dict(pages or {})
        self.visits: list[Visit] = []
        self.num_connections = 0
        port = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1" if keep_alive else "HTTP/1.0"
            timeout = 2.0
            wbufsize = -1  # one segment per answer: two would wait for a delayed acknowledgement

            @override
            def setup(self) -> None:
                port.num_connections += 1
                super().setup()

            def do_GET(self) -> None:
                port.visits.append(Visit(self.path, {name.lower(): text for name, text in self.headers.items()}))
                wanted = port.pages.get(self.path, Page(b'{"detail": "Not Found"}', 404))
                found = wanted if isinstance(wanted, Page) else wanted()
                with suppress(OSError):  # the client may have left
                    self.send_response(found.status)
                    for name, text in {"Content-Length": str(len(found.body)), **found.headers}.items():
                        self.send_header(name, text)
                    self.end_headers()
                    self.wfile.write(found.body)

            @override
            def log_message(self, *args: Any) -> None:
                """Says nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = False

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HttpPort:
        self._thread.start()
        return self

    @override
    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.005)
        self._server.server_close()

    @override
    def _stop(self) -> None:
        self._server.shutdown()

    @property
    def paths(self) -> list[str]:
        """The paths that were asked for, in order."""
        return [visit.path for visit in self.visits]


# ---- anything --------------------------------------------------------------------------------------------------------


class RawPort(_Port):
    """A TCP port whose connections go, one after the other, to `talk(connection, over)`; `over` is set at the end.

    What a connection brings within its talk is the talk's business; `received` holds what came before it was closed.
    """

    def __init__(self, talk: Callable[[socket.socket, threading.Event], object]) -> None:
        super().__init__()
        self._talk = talk
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.005)
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        self.received = b""

    def __enter__(self) -> RawPort:
        self._thread.start()
        return self

    @override
    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.num_connections += 1
            with connection:
                connection.settimeout(JOIN)
                with suppress(OSError):
                    self._talk(connection, self._over)
                with suppress(OSError):
                    connection.setblocking(False)
                    while piece := connection.recv(65536):
                        self.received += piece
        self._listener.close()

    @override
    def _stop(self) -> None:
        self._over.set()


def stay_silent(connection: socket.socket, over: threading.Event) -> None:
    """Accepts and says nothing until the end, or until the peer has gone."""
    connection.settimeout(0.02)
    while not over.is_set():
        with suppress(TimeoutError):
            if connection.recv(1, socket.MSG_PEEK) == b"":
                return
        over.wait(0.005)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests with many connections to what is an HTTP server for sure: listens a moment only before it asks."""
    monkeypatch.setattr("lmcache_sdk.session.http_transport._LISTEN_MS", 1)


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
