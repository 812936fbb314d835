"""The HTTP port: a few paths of the real server's, as JSON, each request in a thread of its own.

Closing ends every connection, idle ones of a client's pool included, and waits for the threads.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, cast

from lmcache_sdk.devserver import status
from lmcache_sdk.devserver.core import Core
from lmcache_sdk.devserver.wire import JOIN_TIMEOUT, Gate
from lmcache_sdk.values import override

_log = logging.getLogger("lmcache_sdk.devserver")

MAX_BODY_NBYTES: Final = 2**20
_PUBLIC: Final = ("/", "/healthcheck")


class Refusal(Exception):  # noqa: N818  # it is an answer
    """An answer other than 200."""

    def __init__(self, code: int, detail: object) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "lmcache-sdk-devserver"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        """Answers a GET."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Answers a POST."""
        self._answer("POST")

    @override
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class calls it so
        """Logs where this package logs."""
        _log.debug(format, *args)

    def _answer(self, method: str) -> None:
        port = cast("_Server", self.server).port
        port.gate.wait()
        body = self._read_body()
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            code, document = 200, port.document(method, self.path.partition("?")[0], headers, body)
        except Refusal as refusal:
            code, document = refusal.code, {"detail": refusal.detail}
        text = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(text)

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > MAX_BODY_NBYTES:
            self.close_connection = True
            return b""
        return self.rfile.read(int(length))


class _Server(ThreadingHTTPServer):
    """Knows its connections, so that it can end them."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], port: HttpPort) -> None:
        self.port = port
        self._connections: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__(address, _Handler)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._connections.add(request)
        super().process_request(request, client_address)

    @override
    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._connections.discard(request)
        super().shutdown_request(request)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A client that went away is no news."""
        _log.debug("HTTP connection of %s ended", client_address, exc_info=True)

    def end_connections(self) -> None:
        """Ends every connection there is."""
        with self._guard:
            connections = list(self._connections)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                _log.debug("HTTP connection was gone already")


class HttpPort:
    """The HTTP server and its thread."""

    def __init__(self, core: Core, gate: Gate, message_address: tuple[str, int]) -> None:
        self._core = core
        self.gate = gate
        self._message_address = message_address
        self._server = _Server((core.settings.host, core.settings.http_port), self)
        self._port = int(self._server.server_address[1])
        self.url: str = f"http://{core.settings.host}:{self._port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="devserver-http", daemon=True
        )

    def start(self) -> None:
        """Starts answering."""
        self._thread.start()

    def close(self) -> None:
        """Stops answering and waits for the threads."""
        self.gate.open()
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join(JOIN_TIMEOUT)
        self._server.end_connections()
        self._server.server_close()

    # ---- what is answered --------------------------------------------------------------------------------------------

    def document(self, method: str, path: str, headers: dict[str, str], body: bytes) -> object:
        """The JSON of one request."""
        core = self._core
        self._check_key(path, headers)
        config_path = core.dialect.config_path
        if method == "GET" and path == config_path:
            return status.config(core, *self._message_address, self._port)
        if method == "POST" and path == ("/cache/clear" if core.behaviour.cache_api else "/clear-cache"):
            return self._clear(body)
        known: dict[str, Callable[[], object]] = {
            "/": lambda: {"status": "ok", "service": "LMCache HTTP API"},
            "/healthcheck": lambda: {"status": "healthy"},
            "/version": lambda: status.version(core),
            "/lmc_version": lambda: core.settings.speak,
            "/status": lambda: status.status(core),
        }
        if path not in known:
            raise Refusal(404, "Not Found")
        if method != "GET":
            raise Refusal(405, "Method Not Allowed")
        return known[path]()

    def _check_key(self, path: str, headers: dict[str, str]) -> None:
        wanted = self._core.settings.api_key
        if wanted is None or path in _PUBLIC:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-lmcache-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(token.strip())
        if not any(hmac.compare_digest(key.encode(), wanted.encode()) for key in given):
            raise Refusal(401, "Invalid or missing API key")

    def _clear(self, body: bytes) -> object:
        core = self._core
        options: object = {}
        if core.behaviour.cache_api and body.strip():
            try:
                options = json.loads(body)
            except ValueError as error:
                raise Refusal(422, "the body is not JSON") from error
        if not isinstance(options, dict):
            raise Refusal(422, "the body is not a JSON object")
        tier, force = options.get("tier", "l1"), options.get("force", core.behaviour.forced_by_default)
        if tier not in ("l1", "l2", "all") or not isinstance(force, bool):
            raise Refusal(422, "tier or force is not what it may be")
        if tier != "l1":
            raise Refusal(400, f"tier {tier!r} not supported; only 'l1'")
        with core.lock:
            core.objects.clear(force=force)
        return {"status": "ok", "cleared": {"tier": "l1"}} if core.behaviour.cache_api else {"status": "ok"}
