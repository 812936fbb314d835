"""What the straight-line client talks through: a DEALER socket and a kept-alive HTTP connection, nothing checked.

Answers that nobody waits for are passed over when the next one is waited for. A silent server ends a call with
`zmq.Again` or `TimeoutError`, so that a benchmark does not hang.
"""

from __future__ import annotations

import re
import select
import socket
from typing import Any, Final
from urllib.parse import urlsplit

import torch
import zmq

from lmcache_sdk.protocol import Buffer, Dialect, Request, encode_request
from lmcache_sdk.values import CorrelationId

TIMEOUT: Final = 120.0
_LISTEN: Final = 0.02
"""Seconds for which a peer must be silent before it is taken for an HTTP server: a byte sent to a ZMQ port can end an
LMCache server. No client is spared that, so it is part of the floor of a connect."""
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_PIECE: Final = 65_536


class Wire:
    """One DEALER socket, used by one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, dialect: Dialect) -> None:
        self._dialect = dialect
        self._last = 0
        self._socket = context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.RCVTIMEO, int(TIMEOUT * 1000))):
            self._socket.setsockopt(option, value)
        self._socket.connect(url)
        self.warm: torch.Tensor | None = None
        """Where its user copies results to, each time the same memory."""

    def send(self, request: Request[Any], payload: zmq.Frame | None = None) -> bytes:
        """Sends a request; what `answer` takes. A payload takes the place of the last frame, and is not copied."""
        self._last += 1
        frames: list[Buffer | zmq.Frame] = [*encode_request(self._dialect, CorrelationId(self._last), request)]
        uid = frames[0]
        assert isinstance(uid, bytes)
        if payload is not None:
            frames[-1] = payload
        self._socket.send_multipart(frames)
        return uid

    def answer(self, uid: bytes) -> list[bytes]:
        """The frames behind the two of the header."""
        while True:
            found = self._socket.recv_multipart()
            if found[0] == uid:
                return found[2:]

    def bulk_answer(self, uid: bytes) -> memoryview:
        """The one frame behind the header where it was received."""
        while True:
            found = self._socket.recv_multipart(copy=False)
            if found[0].bytes == uid:
                return found[2].buffer

    def call(self, request: Request[Any]) -> list[bytes]:
        """Sends a request and waits."""
        return self.answer(self.send(request))

    def close(self) -> None:
        """Frees the socket."""
        self._socket.close()


class Http:
    """GETs on one connection that stays open, for one thread at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._socket = self._opened()

    def _opened(self) -> socket.socket:
        made = socket.create_connection(self._address, TIMEOUT)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        select.select([made], [], [], _LISTEN)
        return made

    def get(self, path: str) -> bytes:
        """The body."""
        try:
            return self._ask(path)
        except ConnectionError:  # the server hangs up on connections that were idle for seconds
            self.close()
            self._socket = self._opened()
            return self._ask(path)

    def _ask(self, path: str) -> bytes:
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: {self._address[0]}\r\n\r\n".encode())
        head, _, body = self._received(b"", b"\r\n\r\n").partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert length is not None, head
        while len(body) < int(length[1]):
            body = self._received(body)
        return body

    def _received(self, before: bytes, until: bytes = b"") -> bytes:
        """What came before and at least one piece more, up to the piece that has `until`."""
        while True:
            piece = self._socket.recv(_PIECE)
            if not piece:
                raise ConnectionResetError("the server hung up")
            before += piece
            if until in before:
                return before

    def close(self) -> None:
        """Frees the connection."""
        self._socket.close()
