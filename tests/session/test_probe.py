"""Questions over HTTP while the message port is silent: fresh answers, shared ones, and likely causes in words."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from lmcache_sdk.errors import ConnectError, DeadlineExceededError, Fate, KVCacheSDKError
from lmcache_sdk.protocol import StatusDocument
from lmcache_sdk.session import Addresses, Deadline
from lmcache_sdk.session.probe import HttpProbe
from lmcache_sdk.session.renewal import Renewable
from lmcache_sdk.values import InstanceId
from tests.session.pages import status_page
from tests.session.ports import HttpPort, Page, RawPort, closed_port, page, stay_silent

ME = InstanceId(7)
KNOWN = status_page(registered_non_cuda_instance_ids=[7], cache_context_meta={"1": {"model_name": "m"}})


def probe_of(http_url: str) -> HttpProbe:
    return HttpProbe(Addresses("tcp://127.0.0.1:1", http_url), None)


def test_every_question_gets_a_status_asked_for_after_it() -> None:
    with HttpPort({"/status": status_page(chunk_size=4)}) as port:
        probe = probe_of(port.url)
        assert probe.status(Deadline.after(5)).chunk_size == 4
        port.pages["/status"] = status_page(chunk_size=8)
        assert probe.status(Deadline.after(5)).chunk_size == 8
        assert port.num_connections == 1
        probe.close()


def test_questions_at_the_same_time_share_answers_and_none_is_older_than_its_question() -> None:
    with HttpPort({"/status": status_page()}) as port:
        probe = probe_of(port.url)
        probe.status(Deadline.after(5))
        answers: list[StatusDocument] = []
        threads = [threading.Thread(target=lambda: answers.append(probe.status(Deadline.after(10)))) for _ in range(12)]
        before = len(port.visits)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        assert len(answers) == 12 and 1 <= len(port.visits) - before <= 12
        probe.close()


def test_a_question_behind_a_slow_one_ends_at_its_own_deadline() -> None:
    with RawPort(stay_silent) as port:
        probe = probe_of(f"http://127.0.0.1:{port.port}")
        slow = threading.Thread(target=lambda: _ask(probe, 1.0))
        slow.start()
        while not port.num_connections:
            time.sleep(0.005)
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            probe.status(Deadline.after(0.05))
        assert time.monotonic() - began < 0.8
        slow.join(10)
        probe.close()


def _ask(probe: HttpProbe, seconds: float) -> None:
    with pytest.raises(DeadlineExceededError):
        probe.status(Deadline.after(seconds))


def test_a_failed_question_does_not_spoil_the_next() -> None:
    with HttpPort({"/status": Page(b"<html>", 500)}) as port:
        probe = probe_of(port.url)
        with pytest.raises(KVCacheSDKError):
            probe.status(Deadline.after(5))
        port.pages["/status"] = status_page()
        assert probe.status(Deadline.after(5)).chunk_size == 4
        probe.close()


def test_who_has_left() -> None:
    with HttpPort({"/status": KNOWN}) as port:
        probe = probe_of(port.url)
        soon = Deadline.after(5)
        assert not probe.instance_has_left(ME, soon) and probe.instance_has_left(InstanceId(8), soon)
        assert not probe.model_has_left("m", soon) and probe.model_has_left("other", soon)
        probe.close()


@pytest.mark.parametrize("wrong", [Page(b"{}", 503), Page(b"<html>"), page([])])
def test_who_cannot_be_asked_has_not_left(wrong: Page) -> None:
    """Only a server that answers and does not know us is a reason to connect again."""
    with HttpPort({"/status": wrong}) as port:
        probe = probe_of(port.url)
        assert not probe.instance_has_left(ME, Deadline.after(5))
        assert not probe.model_has_left("m", Deadline.after(5))
        probe.close()
    probe = probe_of(f"http://127.0.0.1:{closed_port()}")
    assert not probe.instance_has_left(ME, Deadline.after(5))
    probe.close()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (KNOWN, "its HTTP port answers: its message thread may be busy, or dead"),
        (status_page(registered_non_cuda_instance_ids=[8]), "no longer knows this instance"),
        (page({"chunk_size": 4}), "restarted in another mode"),
        (Page(b"<html>"), "not with a status"),
        (Page(b"{}", 503), "not with a status"),
    ],
)
def test_the_likely_cause_of_a_silence(found: Page, words: str) -> None:
    with HttpPort({"/status": found}) as port:
        probe = probe_of(port.url)
        assert words in probe.why_silent(ME)
        probe.close()


def test_the_likely_cause_when_nothing_answers_comes_soon() -> None:
    with RawPort(stay_silent) as port:
        began = time.monotonic()
        probe = probe_of(f"http://127.0.0.1:{port.port}")
        assert "HTTP port does not answer either" in probe.why_silent(ME)
        assert time.monotonic() - began < 1.5
        probe.close()


def test_close_frees_the_connection_and_twice_does_no_harm() -> None:
    with HttpPort({"/status": KNOWN}) as port:
        probe = probe_of(port.url)
        probe.status(Deadline.after(5))
        probe.close()
        probe.close()


# ---- one value that many renew ---------------------------------------------------------------------------------------


def test_a_bad_value_is_replaced_once_for_all() -> None:
    first, made = object(), []
    holder = Renewable(first)

    def make(bad: object) -> object:
        made.append(bad)
        time.sleep(0.02)
        return object()

    got: list[object] = []
    threads = [
        threading.Thread(target=lambda: got.append(holder.renew(first, make, Deadline.after(5), "x"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert made == [first] and len(set(map(id, got))) == 1 and holder.current is got[0]


def test_a_value_that_somebody_else_replaced_is_not_replaced_again() -> None:
    holder = Renewable(1)
    assert holder.renew(1, lambda _: 2, Deadline.after(1), "x") == 2
    assert holder.renew(1, lambda _: 3, Deadline.after(1), "x") == 2


def test_a_replacement_that_fails_leaves_the_old_value() -> None:
    holder = Renewable("old")

    def fail(bad: str) -> str:
        raise ConnectError("refused")

    for _ in range(2):
        with pytest.raises(ConnectError):
            holder.renew("old", fail, Deadline.after(1), "x")
    assert holder.current == "old"
    assert holder.renew("old", lambda _: "new", Deadline.after(1), "x") == "new"


def test_waiting_for_another_replacement_ends_at_the_deadline() -> None:
    holder = Renewable(0)
    working, done = threading.Event(), threading.Event()

    def make(bad: int) -> int:
        working.set()
        done.wait(5)
        return 1

    thread = threading.Thread(target=lambda: holder.renew(0, make, Deadline.after(10), "x"))
    thread.start()
    assert working.wait(5)
    with pytest.raises(DeadlineExceededError, match="retrieve: another call is connecting") as caught:
        holder.renew(0, make, Deadline.after(0.05), "retrieve")
    assert caught.value.fate is Fate.NOT_SENT
    done.set()
    thread.join(10)
    assert holder.current == 1


def test_a_kept_connection_that_the_server_hangs_up_on_is_no_failure() -> None:
    """HTTP servers close idle connections; the question that is on its way just then is asked again on a new one."""
    body = status_page().body
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def talk(connection: socket.socket, over: threading.Event) -> None:
        if connection.recv(65536):
            connection.sendall(head + body)
            connection.recv(65536)  # the second question; no answer

    with RawPort(talk) as port:
        probe = probe_of(f"http://127.0.0.1:{port.port}")
        for _ in range(3):
            assert probe.status(Deadline.after(5)).chunk_size == 4
        probe.close()
