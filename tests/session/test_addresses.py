"""The two addresses: every form that is taken, every refusal by the name of its argument, and the swap that kills."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.errors import ArgumentTypeError, ConnectError, KVCacheSDKError, UsageError
from lmcache_sdk.session import checked_addresses


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("tcp://localhost:5555", "tcp://localhost:5555"),
        ("localhost:5555", "tcp://localhost:5555"),
        ("TCP://Server.Example:5555", "tcp://server.example:5555"),
        ("tcp://localhost:5555/", "tcp://localhost:5555"),
        ("tcp://localhost:5555//", "tcp://localhost:5555"),
        ("  tcp://10.0.0.1:1  ", "tcp://10.0.0.1:1"),
        ("10.0.0.1:65535", "tcp://10.0.0.1:65535"),
        ("[::1]:5555", "tcp://[::1]:5555"),
        ("tcp://[fe80::1]:5555", "tcp://[fe80::1]:5555"),
        ("my_host-1.svc:5555", "tcp://my_host-1.svc:5555"),
        ("ipc:///tmp/lmcache.sock", "ipc:///tmp/lmcache.sock"),
        ("ipc://relative/path", "ipc://relative/path"),
        ("ipc://@abstract", "ipc://@abstract"),
        ("ipc:///tmp/with#hash?and=query", "ipc:///tmp/with#hash?and=query"),
        ("ipc:///tmp/Case", "ipc:///tmp/Case"),
    ],
)
def test_forms_of_the_message_address(url: str, canonical: str) -> None:
    assert checked_addresses(url, "http://web:8080").url == canonical


@pytest.mark.parametrize(
    ("http_url", "canonical"),
    [
        ("http://localhost:9000", "http://localhost:9000"),
        ("http://localhost:9000/", "http://localhost:9000"),
        ("http://localhost:9000///", "http://localhost:9000"),
        ("localhost:9000", "http://localhost:9000"),
        ("localhost", "http://localhost:80"),
        ("HTTP://Web:9000", "http://web:9000"),
        ("http://web:9000/behind/a/proxy/", "http://web:9000/behind/a/proxy"),
        ("https://web", "https://web:443"),
        ("https://web:8443", "https://web:8443"),
        ("http://[::1]:9000", "http://[::1]:9000"),
        (" web:9000\n", "http://web:9000"),
    ],
)
def test_forms_of_the_http_address(http_url: str, canonical: str) -> None:
    assert checked_addresses("tcp://somewhere:5555", http_url).http_url == canonical


@pytest.mark.parametrize(
    "url",
    [
        *("", "   ", "tcp://", "tcp://:5555", ":5555", "tcp://host", "host", "tcp://host:", "//host:5555"),
        *("tcp://host:0", "tcp://host:65536", "tcp://host:-1", "tcp://host:port", "tcp://host:5 5", "a:1,b:2"),
        *("http://host:5555", "https://host:5555", "udp://host:5555", "inproc://x", "pgm://host:1", "file:///tmp/x"),
        *("tcp://host:5555/path", "tcp://host:5555?x=1", "tcp://host:5555#f", "tcp://user@host:5555"),
        *("ipc://", "ipc:///", "tcp://[::1", "tcp://::1:5555", "tcp://ho\u2100st:1", "tcp://host:\uff15", "host:1\x00"),
        *("grpc://host:5555", "grpc+unix:///tmp/x"),
    ],
)
def test_refusals_of_the_message_address(url: str) -> None:
    with pytest.raises(UsageError, match=r"^url: "):
        checked_addresses(url, "http://web:8080")


def test_grpc_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"--transport zmq"):
        checked_addresses("grpc://host:5555", "web:8080")


@pytest.mark.parametrize(
    "http_url",
    [
        *("", " ", "http://", "http://:9000", "tcp://web:9000", "ftp://web", "ipc:///tmp/x", "ws://web:1"),
        *("http://web:0", "http://web:99999", "http://web:port", "http://web:9000?x=1", "http://web:9000#f"),
        *("http://user:secret@web:9000", "http://[::1", "http://we b:9000", "http://web:9000\x00", "http://ho\u2100st"),
    ],
)
def test_refusals_of_the_http_address(http_url: str) -> None:
    with pytest.raises(UsageError, match=r"^http_url: "):
        checked_addresses("tcp://host:5555", http_url)


@pytest.mark.parametrize("wrong", [None, 5555, b"tcp://host:5555", ["host:5555"], object()])
def test_addresses_are_text(wrong: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^url: "):
        checked_addresses(wrong, "http://web:8080")
    with pytest.raises(ArgumentTypeError, match=r"^http_url: "):
        checked_addresses("tcp://host:5555", wrong)


@pytest.mark.parametrize(
    ("url", "http_url"),
    [
        ("tcp://localhost:5555", "http://localhost:5555"),
        ("localhost:5555", "localhost:5555"),
        ("tcp://localhost:5555", "http://127.0.0.1:5555"),
        ("tcp://127.0.0.1:5555", "http://localhost:5555/"),
        ("tcp://127.0.0.1:5555", "http://127.1.2.3:5555"),
        ("tcp://0.0.0.0:5555", "http://127.0.0.1:5555"),
        ("tcp://[::1]:5555", "http://localhost:5555"),
        ("tcp://[::1]:5555", "http://127.0.0.1:5555"),
        ("tcp://LOCALHOST:5555", "http://localhost:5555"),
        ("tcp://unresolvable.invalid:80", "unresolvable.invalid"),
        ("tcp://10.1.1.1:443", "https://10.1.1.1"),
    ],
)
def test_one_port_for_both_is_refused(url: str, http_url: str) -> None:
    """An HTTP request on the ZMQ port ends the server's message thread for every client."""
    with pytest.raises(UsageError, match=r"^http_url: .*nothing was sent"):
        checked_addresses(url, http_url)


@pytest.mark.parametrize(
    ("url", "http_url"),
    [
        ("tcp://localhost:5555", "http://localhost:5556"),
        ("tcp://10.0.0.1:5555", "http://10.0.0.2:5555"),
        ("ipc:///tmp/x", "http://localhost:5555"),
    ],
)
def test_two_ports_are_fine(url: str, http_url: str) -> None:
    assert checked_addresses(url, http_url).http_url == http_url


def test_names_are_compared_by_what_they_resolve_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        addresses = {"one": "10.0.0.7", "other": "10.0.0.7", "third": "10.0.0.8"}
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(UsageError, match=r"^http_url: "):
        checked_addresses("tcp://one:5555", "http://other:5555")
    checked_addresses("tcp://one:5555", "http://third:5555")


def test_a_host_that_cannot_be_resolved_is_not_the_callers_mistake() -> None:
    with pytest.raises(ConnectError, match=r"resolved"):
        checked_addresses("tcp://nowhere.invalid:5555", "http://elsewhere.invalid:5555")


def test_no_name_is_resolved_when_the_ports_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("resolved"))
    checked_addresses("tcp://one:5555", "http://other:8080")


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_is_an_address_or_refused(url: str, http_url: str) -> None:
    for one, other in ((url, "http://web:8080"), ("tcp://host:5555", http_url)):
        try:
            checked = checked_addresses(one, other)
        except KVCacheSDKError:
            continue
        assert checked.url.startswith(("tcp://", "ipc://"))
        assert checked.http_url.startswith(("http://", "https://")) and not checked.http_url.endswith("/")
