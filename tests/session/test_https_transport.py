"""HTTP over TLS: certificates are checked before anything is said, and the bounds of plain HTTP hold."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from requests.utils import DEFAULT_CA_BUNDLE_PATH

from lmcache_sdk.errors import (
    ConnectError,
    DeadlineExceededError,
    Fate,
    HTTPStatusError,
    RemoteProtocolError,
    UsageError,
)
from lmcache_sdk.session import Deadline
from lmcache_sdk.session import http_transport as http
from lmcache_sdk.session.deadline_sockets import tls_context
from tests.session.ports import RawPort, stay_silent

CERTIFICATE: Final = str(Path(__file__).with_name("localhost.pem"))
SOON: Final = 0.5
"""A deadline that is meant to pass."""

Talk = Callable[[socket.socket, threading.Event], object]


def over_tls(talk: Talk) -> Talk:
    """The same conversation behind a TLS handshake; a client that refuses it is an OSError, which the port expects."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)

    def secured(connection: socket.socket, over: threading.Event) -> None:
        with context.wrap_socket(connection, server_side=True) as inner:
            talk(inner, over)

    return secured


class Answers:
    """Gives each connection the same answer, and keeps what it was asked."""

    def __init__(self, head: str, body: bytes = b"") -> None:
        self._answer = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        self.asked: list[str] = []

    def __call__(self, connection: socket.socket, over: threading.Event) -> None:
        self.asked.append(connection.recv(65536).decode("latin-1"))
        connection.sendall(self._answer)


def url_of(port: RawPort, host: str = "127.0.0.1") -> str:
    return f"https://{host}:{port.port}"


@pytest.fixture(autouse=True)
def no_context_of_another_test() -> None:
    tls_context.cache_clear()


@contextlib.contextmanager
def trusting(url: str, seconds: float = 10.0, api_key: str | None = None) -> Iterator[http.HttpConversation]:
    """A conversation that trusts the certificate of the tests, as a user's environment can have it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", CERTIFICATE)
        with http.converse(url, api_key, Deadline.after(seconds)) as conversation:
            yield conversation


def get(url: str, seconds: float = 10.0) -> bytes:
    with trusting(url, seconds) as conversation:
        return conversation.get("/status")


# ---- certificates ----------------------------------------------------------------------------------------------------


def test_a_certificate_that_nobody_vouches_for_is_refused_and_nothing_is_said() -> None:
    answers = Answers("200 OK", b"{}")
    with (
        RawPort(over_tls(answers)) as port,
        http.converse(url_of(port), "secret", Deadline.after(10)) as conversation,
    ):
        with pytest.raises(ConnectError, match=r"http_url: .*certificate") as caught:
            conversation.get("/status")
        assert caught.value.fate is Fate.NOT_SENT
    assert answers.asked == []


def test_a_certificate_that_is_trusted_is_taken() -> None:
    answers = Answers("200 OK", b'{"chunk_size": 16}')
    with RawPort(over_tls(answers)) as port, trusting(url_of(port), api_key="secret") as conversation:
        assert conversation.get("/status") == b'{"chunk_size": 16}'
    [asked] = answers.asked
    assert asked.startswith("GET /status HTTP/1.1\r\n") and "Authorization: Bearer secret\r\n" in asked


def test_a_certificate_of_another_host_is_refused() -> None:
    """It is of 127.0.0.1, whatever else leads there."""
    answers = Answers("200 OK", b"{}")
    with RawPort(over_tls(answers)) as port, pytest.raises(ConnectError, match="localhost"):
        get(url_of(port, "localhost"))
    assert answers.asked == []


def test_no_proxy_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with RawPort(over_tls(Answers("200 OK", b"{}"))) as port:
        assert get(url_of(port)) == b"{}"


def test_the_authorities_of_requests_are_trusted_too() -> None:
    context = tls_context()
    bundle = ssl.create_default_context(cafile=DEFAULT_CA_BUNDLE_PATH)
    assert {found["serialNumber"] for found in bundle.get_ca_certs()} <= {
        found["serialNumber"] for found in context.get_ca_certs()
    }


def test_nothing_is_said_to_a_peer_that_speaks_first() -> None:
    """A ZMTP peer greets; a TLS handshake would be bytes on its port as any others."""
    heard: list[bytes] = []

    def greet(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f")
        with contextlib.suppress(OSError):  # reset: it leaves with the greeting unread
            heard.append(connection.recv(65536))

    with RawPort(greet) as port, pytest.raises(UsageError, match="spoke first"):
        get(url_of(port))
    assert b"".join(heard) == b""


def test_a_port_without_tls_is_refused() -> None:
    with RawPort(Answers("200 OK", b"{}")) as port, pytest.raises(ConnectError, match="http_url"):
        get(url_of(port))


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["503 Busy", "302 Found\r\nLocation: https://127.0.0.1:1/status"])
def test_another_status_is_an_error_and_a_redirect_is_not_followed(head: str) -> None:
    with RawPort(over_tls(Answers(head, b"busy"))) as port, pytest.raises(HTTPStatusError) as caught:
        get(url_of(port))
    assert caught.value.status == int(head[:3]) and caught.value.reply == "busy"


def test_a_body_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY", 200_000)
    with RawPort(over_tls(Answers("200 OK", bytes(200_000)))) as port:
        assert len(get(url_of(port))) == 200_000
    with (
        RawPort(over_tls(Answers("200 OK", bytes(200_001)))) as port,
        pytest.raises(RemoteProtocolError, match="larger than 200000 bytes"),
    ):
        get(url_of(port))


def test_a_body_that_ends_too_early_is_an_error() -> None:
    def cut(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}")

    with RawPort(over_tls(cut)) as port, pytest.raises((ConnectError, RemoteProtocolError)):
        get(url_of(port))


# ---- time ------------------------------------------------------------------------------------------------------------


def silent_when_asked(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(65536)
    over.wait(10)


def silent_in_the_body(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    over.wait(10)


def dripping_body(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
    while not over.wait(0.05):
        connection.sendall(b"x")


@pytest.mark.parametrize(
    "talk",
    [stay_silent, over_tls(silent_when_asked), over_tls(silent_in_the_body), over_tls(dripping_body)],
    ids=["handshake", "answer", "body", "dripping body"],
)
def test_silence_is_bounded_by_the_deadline(talk: Talk) -> None:
    with RawPort(talk) as port:
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError) as caught:
            get(url_of(port), SOON)
        assert time.monotonic() - began < 3 * SOON + 1
        assert caught.value.step == f"GET {url_of(port)}/status"


def test_nothing_is_sent_after_the_deadline() -> None:
    answers = Answers("200 OK", b"{}")
    with RawPort(over_tls(answers)) as port:
        with pytest.raises(DeadlineExceededError) as caught:
            get(url_of(port), 1e-9)
        assert caught.value.fate is Fate.NOT_SENT and port.num_connections == 0
