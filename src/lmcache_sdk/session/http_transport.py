"""HTTP calls -> status and bytes, inside one deadline; the only importer of requests.

What it guarantees beyond requests, for `http://` (an `https://` address gets requests' own timeouts, per received
piece): the deadline bounds the whole conversation, dripping headers and bodies included; and not one byte is sent to
a ZMQ port: an HTTP request there can end the message thread of an LMCache server for every client (PROTOCOL.md
section 13). A ZMTP peer greets within a millisecond of accepting while an HTTP server stays silent, so a fresh
connection listens first. For both: a body is read up to a limit; no redirect, no proxy, nothing from the environment.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Final

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool  # requests' own; its connection class is the only door to the socket
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError

from lmcache_sdk.errors import (
    ConnectError,
    Fate,
    HTTPStatusError,
    KVCacheSDKError,
    RemoteProtocolError,
    UsageError,
)
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.values import override

_LISTEN_MS: Final = 20
_PIECE: Final = 65_536
MAX_BODY: Final = 64 * 2**20
"""Bytes. /status of a busy server is some hundred kilobytes."""
_SHOWN: Final = 200


class _SpokeFirstError(Exception):
    """The peer sent bytes before it was asked anything: no HTTP server does."""


class _Bound:
    """The deadline that a conversation's connection is bound to now."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline


class _DeadlineSocket(socket.socket):
    """Every operation takes what remains of one deadline; http.client reads through `recv_into`, whatever drips."""

    bound: _Bound

    def _arm(self) -> None:
        remaining = self.bound.deadline.remaining()
        if remaining <= 0:
            raise TimeoutError("the deadline passed")
        self.settimeout(remaining)

    @override
    def recv_into(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # arguments pass through as it came
        self._arm()
        return super().recv_into(*args, **kwargs)

    @override
    def sendall(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # arguments pass through as it came
        self._arm()
        return super().sendall(*args, **kwargs)


class _ListeningConnection(HTTPConnection):
    """Connects, then listens for a peer that greets before it is asked."""

    bound: _Bound

    @override
    def _new_conn(self) -> socket.socket:
        deadline = self.bound.deadline
        began = deadline.remaining()
        made = _DeadlineSocket(fileno=super()._new_conn().detach())
        # the greeting of a far or busy peer needs as long again as the connection took
        listen = max(_LISTEN_MS, round(2000 * (began - deadline.remaining())) + _LISTEN_MS // 2)
        made.bound = self.bound
        poller = select.poll()
        poller.register(made, select.POLLIN)
        if poller.poll(min(listen, deadline.remaining_ms())):
            try:
                spoke = made.recv(1, socket.MSG_PEEK)
            except OSError as error:
                # not a ConnectionResetError: urllib3 swallows that one and goes on without a socket
                raise ConnectionAbortedError("the peer reset the connection while it was listened to") from error
            finally:
                made.close()
            if spoke:
                raise _SpokeFirstError(spoke)
            raise ConnectionResetError("the peer closed the connection at once")
        return made


class _Adapter(HTTPAdapter):
    """requests' adapter with connections of the class above, all bound to one deadline."""

    def __init__(self, bound: _Bound) -> None:
        super().__init__(max_retries=0)
        connection = type("_BoundConnection", (_ListeningConnection,), {"bound": bound})
        pool = type("_BoundPool", (HTTPConnectionPool,), {"ConnectionCls": connection})
        self.poolmanager.pool_classes_by_scheme = {**self.poolmanager.pool_classes_by_scheme, "http": pool}

    @override
    def close(self) -> None:
        """Closes the sockets now: urllib3 leaves that to the collector, and an error that lives on holds a
        reference.
        """
        pools = self.poolmanager.pools
        for key in pools.keys():  # noqa: SIM118  # not a dict
            pool = pools.get(key)
            if pool is not None:
                pool.close()
        super().close()


class HttpConversation:
    """Some calls to one server, on one connection, under one deadline."""

    def __init__(self, base_url: str, api_key: str | None, deadline: Deadline) -> None:
        self.base_url: str = base_url
        self._bound = _Bound(deadline)
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.mount("http://", _Adapter(self._bound))
        self._session.headers.update({"Accept-Encoding": "identity", "Accept": "application/json"})
        if api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

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
            with self._session.get(
                url, stream=True, timeout=self._deadline.remaining(), allow_redirects=False
            ) as response:
                body = self._read(response, url)
        except (requests.RequestException, HTTPError, HTTPException, OSError, _SpokeFirstError) as error:
            raise self._translate(error, url, step) from error
        if response.status_code != 200:
            raise _status_error(url, response.status_code, body)
        return body

    def _read(self, response: requests.Response, url: str) -> bytes:
        pieces, size = [], 0
        for piece in response.iter_content(_PIECE):
            size += len(piece)
            if size > MAX_BODY:
                raise RemoteProtocolError(f"{url}: the body is larger than {MAX_BODY} bytes", path=url)
            pieces.append(piece)
        return b"".join(pieces)

    def _translate(self, error: Exception, url: str, step: str) -> KVCacheSDKError:
        causes = list(_chain(error))
        if any(isinstance(cause, _SpokeFirstError) for cause in causes):
            return UsageError(
                f"http_url: {self.base_url} is not an HTTP server: it spoke first, as a ZMQ port does. Are url and "
                "http_url swapped? Nothing was sent, because an HTTP request on its ZMQ port ends an LMCache "
                "server's message thread"
            )
        if self._deadline.passed or any(isinstance(cause, TimeoutError) for cause in causes):
            return self._deadline.exceeded(step)
        if isinstance(error, (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema)):
            return UsageError(f"http_url: {self.base_url!r} is not an address: {error}")
        if isinstance(error, (requests.ConnectionError, OSError)):
            return ConnectError(f"{step}: cannot reach the HTTP server of http_url: {causes[-1]}")
        return RemoteProtocolError(f"{url}: not an HTTP answer: {causes[-1]}", path=url)

    def close(self) -> None:
        """Frees the connection."""
        self._session.close()


@contextmanager
def converse(base_url: str, api_key: str | None, deadline: Deadline) -> Iterator[HttpConversation]:
    """A conversation for the time of a block."""
    conversation = HttpConversation(base_url, api_key, deadline)
    try:
        yield conversation
    finally:
        conversation.close()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what caused it, and what requests and urllib3 put into their arguments, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = [arg for arg in error.args if isinstance(arg, BaseException)]
        reason = getattr(error, "reason", None)
        error = next(iter(inner), reason if isinstance(reason, BaseException) else error.__cause__)


def _status_error(url: str, status: int, body: bytes) -> HTTPStatusError:
    shown = body[:_SHOWN].decode("utf-8", "replace")
    hint = ""
    if status == 401:
        hint = ". The server asks for an API key: pass api_key=... or set LMCACHE_SDK_API_KEY"
    return HTTPStatusError(f"{url}: HTTP status {status}: {shown}{hint}", status=status, url=url, reply=shown)
