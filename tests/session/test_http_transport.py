"""HTTP on real sockets: one deadline over everything, a bound on bodies, and not one byte for a ZMQ port."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from lmcache_sdk.errors import (
    ConnectError,
    DeadlineExceededError,
    Fate,
    HTTPStatusError,
    KVCacheSDKError,
    RemoteProtocolError,
    UsageError,
)
from lmcache_sdk.session import Deadline
from lmcache_sdk.session import http_transport as http
from tests.session.ports import HttpPort, Page, RawPort, closed_port, stay_silent

SOON = 0.3
"""A deadline that is meant to pass."""


def get(url: str, path: str = "/status", *, seconds: float = 5.0, api_key: str | None = None) -> bytes:
    with http.converse(url, api_key, Deadline.after(seconds)) as conversation:
        return conversation.get(path)


@contextlib.contextmanager
def at_once(seconds: float = 1.5) -> Iterator[None]:
    """What happens inside takes less than these seconds, on a slow machine too."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def until_it_leaves(connection: socket.socket) -> bytes:
    """Everything that a peer says before it hangs up; a peer that did not read what it got resets the connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            said += piece
    return said


def hang_up(connection: socket.socket, over: threading.Event) -> None:
    pass


def hang_up_when_asked(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(65536)


def greet_and_hang_up(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"\xff")


def raw_url(port: RawPort) -> str:
    return f"http://127.0.0.1:{port.port}"


def test_the_body_of_a_page() -> None:
    with HttpPort({"/status": Page(b'{"chunk_size": 16}')}) as port:
        assert get(port.url) == b'{"chunk_size": 16}'
        assert port.paths == ["/status"]


def test_a_conversation_uses_one_connection() -> None:
    with (
        HttpPort({"/a": Page(b"1"), "/b": Page(b"2")}) as port,
        http.converse(port.url, None, Deadline.after(5)) as talk,
    ):
        assert [talk.get("/a"), talk.get("/b"), talk.get("/a")] == [b"1", b"2", b"1"]
        assert port.num_connections == 1


def test_a_server_that_closes_after_each_answer_is_fine_too() -> None:
    with (
        HttpPort({"/a": Page(b"1")}, keep_alive=False) as port,
        http.converse(port.url, None, Deadline.after(5)) as talk,
    ):
        assert [talk.get("/a"), talk.get("/a")] == [b"1", b"1"]
        assert port.num_connections == 2


def test_a_conversation_can_go_on_under_another_deadline() -> None:
    with HttpPort({"/a": Page(b"1")}) as port:
        first = Deadline.after(0.2)
        with http.converse(port.url, None, first) as talk:
            assert talk.get("/a") == b"1"
            while not first.passed:
                time.sleep(0.01)
            with pytest.raises(DeadlineExceededError):
                talk.get("/a")
            talk.rebind(Deadline.after(5))
            assert talk.get("/a") == b"1"


# ---- statuses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_another_status_is_an_error_with_its_facts(status: int) -> None:
    with HttpPort({"/status": Page(b'{"detail": "busy"}', status)}) as port:
        with pytest.raises(HTTPStatusError) as caught:
            get(port.url)
        assert (caught.value.status, caught.value.url) == (status, f"{port.url}/status")
        assert caught.value.reply == '{"detail": "busy"}' and "busy" in str(caught.value)
        assert caught.value.fate is Fate.ANSWERED


def test_401_says_where_a_key_goes() -> None:
    hint = r"api_key=.*LMCACHE_SDK_API_KEY"
    with HttpPort({"/status": Page(b"{}", 401)}) as port, pytest.raises(HTTPStatusError, match=hint):
        get(port.url)


def test_a_long_error_page_is_not_repeated_in_full() -> None:
    with HttpPort({"/status": Page(b"x" * 100_000, 500)}) as port:
        with pytest.raises(HTTPStatusError) as caught:
            get(port.url)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    with HttpPort({"/other": Page(b"1")}) as elsewhere:
        moved = Page(b"", status, {"Location": f"{elsewhere.url}/other"})
        with HttpPort({"/status": moved}) as port, pytest.raises(HTTPStatusError):
            get(port.url)
        assert elsewhere.visits == []


# ---- headers and surroundings ----------------------------------------------------------------------------------------


def test_the_key_travels_as_a_bearer_token() -> None:
    with HttpPort({"/status": Page(b"{}")}) as port:
        get(port.url, api_key="secret")
        get(port.url)
        assert port.visits[0].headers["authorization"] == "Bearer secret"
        assert "authorization" not in port.visits[1].headers


def test_nothing_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    netrc = f"{tmp_path}/netrc"
    with open(netrc, "w") as file:
        file.write("default login someone password secret\n")
    with HttpPort({"/status": Page(b"{}")}) as port, HttpPort() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("NETRC", netrc)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert get(port.url) == b"{}"
        assert proxy.visits == [] and proxy.num_connections == 0
        assert "authorization" not in port.visits[0].headers


# ---- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY", 200_000)
    with HttpPort({"/big": Page(bytes(200_001)), "/fits": Page(bytes(200_000))}) as port:
        assert len(get(port.url, "/fits")) == 200_000
        with pytest.raises(RemoteProtocolError, match="larger than 200000 bytes"):
            get(port.url, "/big")


def test_an_endless_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY", 1_000_000)

    def pour(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not over.is_set():
            connection.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")

    with RawPort(pour) as port, at_once(5), pytest.raises(RemoteProtocolError, match="larger"):
        get(raw_url(port), seconds=10)


def test_a_body_that_ends_too_early_is_an_error() -> None:
    def cut(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}")

    with RawPort(cut) as port, pytest.raises(KVCacheSDKError):
        get(raw_url(port))


@pytest.mark.parametrize(
    "answer", [b"garbage\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x00\xff" * 100 + b"\r\n", b"HTTP/9\r\n"]
)
def test_what_is_not_http_is_refused(answer: bytes) -> None:
    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    with RawPort(talk) as port, at_once(), pytest.raises(KVCacheSDKError) as caught:
        get(raw_url(port))
    assert raw_url(port) in str(caught.value)


# ---- time ------------------------------------------------------------------------------------------------------------


def drip(text: bytes, every: float) -> RawPort:
    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        for byte in text:
            connection.sendall(bytes([byte]))
            if over.wait(every):
                return

    return RawPort(talk)


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nX: " + b"y" * 500,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100,
    ],
    ids=["body", "headers", "chunks"],
)
def test_a_dripping_server_is_bounded_by_the_deadline(text: bytes) -> None:
    with drip(text, 0.02) as port, at_once():
        with pytest.raises(DeadlineExceededError) as caught:
            get(raw_url(port), seconds=SOON)
        assert caught.value.step == f"GET {raw_url(port)}/status"


def test_the_deadline_bounds_the_whole_conversation() -> None:
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\n1"
    with drip(answer, 0.004) as port, at_once(), http.converse(raw_url(port), None, Deadline.after(0.6)) as talk:
        assert talk.get("/1") == b"1"
        with pytest.raises(DeadlineExceededError):
            [talk.get("/2") for _ in range(10)]


def test_a_silent_server_is_bounded_by_the_deadline() -> None:
    with RawPort(stay_silent) as port, at_once(), pytest.raises(DeadlineExceededError):
        get(raw_url(port), seconds=SOON)


def test_nothing_is_sent_after_the_deadline() -> None:
    with HttpPort({"/status": Page(b"{}")}) as port:
        passed = Deadline.after(1e-9)
        with http.converse(port.url, None, passed) as talk, pytest.raises(DeadlineExceededError) as caught:
            talk.get("/status")
        assert caught.value.fate is Fate.NOT_SENT
        assert port.num_connections == 0


def test_a_port_that_refuses_is_an_error_at_once() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    with at_once(), pytest.raises(ConnectError) as caught:
        get(url)
    assert url in str(caught.value) and "refused" in str(caught.value)
    assert caught.value.fate is Fate.NOT_SENT


def test_a_peer_that_hangs_up_is_an_error_at_once() -> None:
    with RawPort(hang_up) as port, at_once(), pytest.raises(ConnectError):
        get(raw_url(port))


def test_a_peer_that_hangs_up_when_asked_is_an_error_at_once() -> None:
    with RawPort(hang_up_when_asked) as port, at_once(), pytest.raises(ConnectError):
        get(raw_url(port))


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(ConnectError, match=r"nowhere\.invalid"):
        get("http://nowhere.invalid:9000")


# ---- a ZMQ port ------------------------------------------------------------------------------------------------------


def test_a_zmq_port_is_recognised() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        router.bind("tcp://127.0.0.1:0")
        url = router.getsockopt_string(zmq.LAST_ENDPOINT).replace("tcp", "http")
        with at_once(), pytest.raises(UsageError, match=r"^http_url: .*swapped"):
            get(url)
        assert router.poll(50) == 0
    finally:
        router.close(linger=0)
        context.term()


@pytest.mark.parametrize("greeting", [b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", b"\xff", b"220 mail ready\r\n"])
def test_a_port_that_speaks_first_gets_not_one_byte(greeting: bytes) -> None:
    """One HTTP request line ends the message thread of a server for all its clients."""

    def greet(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(greeting)
        gone.append(until_it_leaves(connection))

    gone: list[bytes] = []
    with RawPort(greet) as port, pytest.raises(UsageError, match=r"^http_url: "):
        get(raw_url(port))
    assert gone == [b""] and port.received == b"" and port.num_connections == 1


def test_it_listens_on_every_new_connection() -> None:
    """The port may have changed hands between two calls."""
    answers = iter([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\n1", b""])
    got = []

    def talk(connection: socket.socket, over: threading.Event) -> None:
        answer = next(answers)
        if not answer:
            connection.sendall(b"\xff" + bytes(9))
            got.append(until_it_leaves(connection))
        else:
            got.append(connection.recv(65536))
            connection.sendall(answer)

    with RawPort(talk) as port, http.converse(raw_url(port), None, Deadline.after(5)) as conversation:
        assert conversation.get("/a") == b"1"
        with pytest.raises(UsageError):
            conversation.get("/b")
    assert got[0].startswith(b"GET /a ") and got[1] == b""


# ---- what is left behind ---------------------------------------------------------------------------------------------


def test_close_frees_the_socket_while_the_error_lives() -> None:
    """Users keep errors, and an error keeps its frames: neither may keep a connection."""
    left = threading.Event()

    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy")
        connection.settimeout(1.0)
        if connection.recv(1) == b"":
            left.set()

    with RawPort(talk) as port:
        with pytest.raises(HTTPStatusError) as caught:
            get(raw_url(port))
        assert left.wait(1.5), f"the connection is open while {caught.value!r} lives"


@pytest.mark.parametrize("head", [b"", b"Transfer-Encoding: chunked\r\n"], ids=["until it closes", "chunked"])
def test_a_refused_body_frees_the_socket_while_the_error_lives(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(http, "MAX_BODY", 100_000)
    left = threading.Event()

    def pour(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")
        try:
            while not over.is_set():
                connection.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")
        except OSError:
            left.set()

    with RawPort(pour) as port:
        conversation = http.HttpConversation(raw_url(port), None, Deadline.after(5))
        with pytest.raises(RemoteProtocolError, match="larger") as caught:
            conversation.get("/status")
        assert left.wait(1.5), f"the connection is open while {caught.value!r} lives"
        conversation.close()


def test_failed_calls_leave_nothing_behind() -> None:
    """That nothing is left is what `no_leaks` looks at; here are enough failures to show."""
    url = f"http://127.0.0.1:{closed_port()}"
    with RawPort(greet_and_hang_up) as greeter, HttpPort() as port:
        for _ in range(5):
            for wrong in (url, raw_url(greeter), port.url):
                with pytest.raises(KVCacheSDKError):
                    get(wrong)
