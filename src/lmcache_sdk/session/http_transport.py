"""HTTP calls -> status and bytes, inside one deadline.

What it guarantees: the deadline bounds the whole conversation, a TLS handshake, dripping headers and bodies included;
and not one byte is sent to a ZMQ port: an HTTP request there, and who knows what of a handshake, can end the message
thread of an LMCache server for every client (PROTOCOL.md section 13). A ZMTP peer greets within a millisecond of
accepting while an HTTP server stays silent, so a fresh connection listens first. A body is read up to a limit; no
redirect, no proxy.

The standard library's client, because a miss waits for an answer of /status: requests takes longer than the server.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTP_PORT, HTTPS_PORT, HTTPConnection, HTTPException, IncompleteRead, InvalidURL
from typing import Final
from urllib.parse import urlsplit

from lmcache_sdk.errors import (
    ConnectError,
    Fate,
    HTTPStatusError,
    KVCacheSDKError,
    RemoteProtocolError,
    UsageError,
)
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.session.deadline_sockets import Bound, connected, secured, tls_context
from lmcache_sdk.values import override

_LISTEN_MS: Final = 20
_PIECE: Final = 65_536
MAX_BODY: Final = 64 * 2**20
"""Bytes. /status of a busy server is some hundred kilobytes."""
_SHOWN: Final = 200


class _SpokeFirstError(Exception):
    """The peer sent bytes before it was asked anything: no HTTP server does."""


class _ListeningConnection(HTTPConnection):
    """Connects, then listens for a peer that greets before it is asked; only then a TLS handshake, if there is one."""

    def __init__(self, host: str, port: int | None, bound: Bound, *, secure: bool) -> None:
        self.default_port = HTTPS_PORT if secure else HTTP_PORT  # is left out of the Host header
        super().__init__(host, port)
        self._bound = bound
        self._secure = secure

    @override
    def connect(self) -> None:
        deadline = self._bound.deadline
        began = deadline.remaining()
        made = connected(self.host, self.port, self._bound)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # the greeting of a far or busy peer needs as long again as the connection took
            listen = max(_LISTEN_MS, round(2000 * (began - deadline.remaining())) + _LISTEN_MS // 2)
            _refuse_speaker(made, min(listen, deadline.remaining_ms()))
            self.sock = secured(made, self.host, tls_context()) if self._secure else made
        except BaseException:
            made.close()
            raise


def _refuse_speaker(made: socket.socket, listen_ms: int) -> None:
    poller = select.poll()
    poller.register(made, select.POLLIN)
    if not poller.poll(listen_ms):
        return
    if spoke := made.recv(1, socket.MSG_PEEK):
        raise _SpokeFirstError(spoke)
    raise ConnectionResetError("the peer closed the connection at once")


def _limited(pieces: Iterator[bytes], url: str) -> bytes:
    """The pieces of a body, joined; raises RemoteProtocolError when there is more of it than MAX_BODY."""
    found, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_BODY:
            raise RemoteProtocolError(f"{url}: the body is larger than {MAX_BODY} bytes", path=url)
        found.append(piece)
    return b"".join(found)


class HttpConversation:
    """Some calls to one server, on one connection, under one deadline."""

    def __init__(self, base_url: str, api_key: str | None, deadline: Deadline) -> None:
        self.base_url: str = base_url
        self._bound = Bound(deadline)
        self._headers = {"Accept-Encoding": "identity", "Accept": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        parts = urlsplit(base_url)
        self._path = parts.path
        secure = parts.scheme == "https"
        self._connection = _ListeningConnection(parts.hostname or "", parts.port, self._bound, secure=secure)

    def rebind(self, deadline: Deadline) -> None:
        """Puts what follows under another deadline; the connection stays open between calls."""
        self._bound.deadline = deadline

    @property
    def _deadline(self) -> Deadline:
        return self._bound.deadline

    def get(self, path: str) -> bytes:
        """The body of GET `path`; raises HTTPStatusError for a status other than 200, and see `_translate`."""
        url = self.base_url + path
        step = f"GET {url}"
        self._deadline.check(step, Fate.NOT_SENT)
        try:
            status, body = self._get(path)
        except (HTTPException, OSError, UnicodeError, _SpokeFirstError) as error:
            raise self._translate(error, url, step) from error
        if status != 200:
            raise _status_error(url, status, body)
        return body

    def _get(self, path: str) -> tuple[int, bytes]:
        try:
            self._connection.request("GET", self._path + path, headers=self._headers)
            # closed on every way out: a body without a length has taken the socket out of the connection's hands
            with closing(self._connection.getresponse()) as response:
                body = _limited(iter(lambda: response.read(_PIECE), b""), path)
                if response.length:
                    raise IncompleteRead(body, response.length)  # read(n) does not say that the peer left
                return response.status, body
        except BaseException:
            self._connection.close()
            raise

    def _translate(self, error: Exception, url: str, step: str) -> KVCacheSDKError:
        if isinstance(error, _SpokeFirstError):
            return UsageError(
                f"http_url: {self.base_url} is not an HTTP server: it spoke first, as a ZMQ port does. Are url and "
                "http_url swapped? Nothing was sent, because an HTTP request on its ZMQ port ends an LMCache "
                "server's message thread"
            )
        if self._deadline.passed or isinstance(error, TimeoutError):
            return self._deadline.exceeded(step)
        if isinstance(error, (InvalidURL, UnicodeError)):
            return UsageError(f"http_url: {self.base_url!r} is not an address: {error}")
        if isinstance(error, OSError):
            return ConnectError(f"{step}: cannot reach the HTTP server of http_url: {error}")
        return RemoteProtocolError(f"{url}: not an HTTP answer: {error}", path=url)

    def close(self) -> None:
        """Frees the connection."""
        self._connection.close()


@contextmanager
def converse(base_url: str, api_key: str | None, deadline: Deadline) -> Iterator[HttpConversation]:
    """A conversation for the time of a block."""
    conversation = HttpConversation(base_url, api_key, deadline)
    try:
        yield conversation
    finally:
        conversation.close()


def _status_error(url: str, status: int, body: bytes) -> HTTPStatusError:
    shown = body[:_SHOWN].decode("utf-8", "replace")
    hint = ""
    if status == 401:
        hint = ". The server asks for an API key: pass api_key=... or set LMCACHE_SDK_API_KEY"
    return HTTPStatusError(f"{url}: HTTP status {status}: {shown}{hint}", status=status, url=url, reply=shown)
