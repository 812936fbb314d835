"""connect to servers that cannot be reached or are not what they seem: an error, in time, and nothing left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lmcache_sdk import (
    ConnectError,
    DeadlineExceededError,
    HTTPStatusError,
    KVCacheSDKError,
    PoolFullError,
    RemoteProtocolError,
    UnsupportedError,
    UsageError,
)
from lmcache_sdk import protocol as p
from tests.facade.rig import Rig, inline_payload
from tests.fix_fake_server import NOTHING, Action, Chunk, Delivery, Turn, answer
from tests.fix_faults import ignored, payload, says, silence, then, value, wrong_opcode, wrong_uid
from tests.session.pages import config_page
from tests.session.ports import Page, RawPort, closed_port, page, stay_silent


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# ---- servers that cannot be reached, or are not what they seem -------------------------------------------------------


def test_a_server_that_is_down(rig: Rig) -> None:
    with within(3), pytest.raises(ConnectError, match="http_url"):
        rig.connect(http_url=f"http://127.0.0.1:{closed_port()}")
    with within(3), pytest.raises(ConnectError, match="refused"):
        rig.connect(url=f"tcp://127.0.0.1:{closed_port()}")
    assert rig.server.requests == []


def test_the_http_port_as_url(rig: Rig) -> None:
    rig.http.pages["/x"] = page({})
    other = rig.http.url.replace("http", "tcp").replace("127.0.0.1", "localhost")
    with within(6), pytest.raises(UsageError):
        rig.connect(url=other)


def test_black_holes_end_at_the_deadline_with_their_step(rig: Rig) -> None:
    with RawPort(stay_silent) as hole:
        with within(3), pytest.raises(DeadlineExceededError) as caught:
            rig.connect(0.3, http_url=f"http://127.0.0.1:{hole.port}")
        assert "/lmc_version" in caught.value.step
    with RawPort(stay_silent) as hole:
        with within(3), pytest.raises(DeadlineExceededError) as caught:
            rig.connect(1.0, url=f"tcp://127.0.0.1:{hole.port}")
        assert caught.value.step.startswith("connect: ZMTP handshake with tcp://127.0.0.1")
    assert rig.server.requests == []


def test_the_mode_and_the_key_are_explained(rig: Rig) -> None:
    rig.http.pages["/config"] = config_page(supported_transfer_mode="lmcache_driven")
    with pytest.raises(UnsupportedError, match=r"--supported-transfer-mode auto"):
        rig.connect()
    rig.http.pages["/lmc_version"] = lambda: page("x")
    with pytest.raises(UnsupportedError, match="'x'"):
        rig.connect()
    del rig.http.pages["/lmc_version"]
    with pytest.raises(UnsupportedError, match=r"dialect="):
        rig.connect()
    assert rig.server.requests == []


def test_a_server_with_a_key_gets_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.connect(api_key="given")
    monkeypatch.setenv("LMCACHE_SDK_API_KEY", "from the environment")
    rig.connect()
    sent = [visit.headers.get("authorization") for visit in rig.http.visits]
    assert set(sent) == {"Bearer given", "Bearer from the environment"}


def test_a_status_503_is_an_error_with_its_facts(rig: Rig) -> None:
    rig.http.pages["/status"] = Page(b'{"detail": "starting"}', 503)
    with pytest.raises(HTTPStatusError, match="starting") as caught:
        rig.connect()
    assert caught.value.status == 503


# ---- lies of the registration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        (says(p.Registered("lmcache_l1_pool_nowhere", 4096)), ConnectError),
        (says(p.Registered("../../etc/passwd", 4096)), RemoteProtocolError),
        (says(p.Registered("lmcache_l1_pool_/x", 4096)), RemoteProtocolError),
        (says(p.Registered("lmcache_l1_pool_x", 0)), RemoteProtocolError),
        (says(p.Registered("lmcache_l1_pool_x", -1)), RemoteProtocolError),
        (value({}), RemoteProtocolError),
        (value({"shm_name": None, "pool_size": 0}), RemoteProtocolError),
        (value([]), RemoteProtocolError),
        (payload(b"\xc1"), RemoteProtocolError),
        (payload(b""), RemoteProtocolError),
        (wrong_opcode, RemoteProtocolError),
    ],
)
def test_a_lie_is_an_error_at_once_and_the_registration_is_taken_back(
    inline_rig: Rig, lie: Action, kind: type[KVCacheSDKError]
) -> None:
    inline_rig.server.on(p.Register, lie)
    with within(5), pytest.raises(kind):
        inline_rig.connect()
    assert inline_rig.server.instances == {} and inline_rig.server.names() == ["Register", "Unregister"]


def test_a_pool_of_another_size_is_another_servers(shm_rig: Rig) -> None:
    shm_rig.server.on(p.Register, says(p.Registered(shm_rig.pool_file.name, 2**45)))
    with pytest.raises(ConnectError, match=r"another server.*--ipc=host"):
        shm_rig.connect()
    assert shm_rig.server.instances == {}


@pytest.mark.parametrize("action", [silence, ignored, wrong_uid])
def test_a_registration_that_is_not_answered(inline_rig: Rig, action: Action) -> None:
    inline_rig.server.on(p.Register, action)
    with within(8), pytest.raises(DeadlineExceededError) as caught:
        inline_rig.connect(1.0)
    assert caught.value.step.startswith("connect: REGISTER") and "HTTP port answers" in str(caught.value)
    assert inline_rig.server.instances == {}


def test_silence_in_a_dialect_that_the_caller_chose_says_so(inline_rig: Rig) -> None:
    """A server does not answer what it cannot read."""
    inline_rig.server.on(p.Register, silence)
    with pytest.raises(DeadlineExceededError, match=r"reports version '0\.5\.6'.*dialect='0\.5\.5'"):
        inline_rig.connect(1.0, dialect="0.5.5")


# ---- the proof -------------------------------------------------------------------------------------------------------


def test_a_foreign_segment_of_the_same_name_and_size_is_refused(shm_rig: Rig) -> None:
    """The server writes into its own pool; here it is another file, as on another host."""
    shm_rig.pool_file.unlink()
    shm_rig.pool_file.write_bytes(bytes(64 * 4096))
    with pytest.raises(ConnectError, match=r"not the server's.*--ipc=host"):
        shm_rig.connect()
    assert shm_rig.server.held() == NOTHING and shm_rig.server.instances == {}


def test_a_full_pool_is_not_blamed_on_the_mapping(shm_rig: Rig) -> None:
    shm_rig.server.full = True
    with within(6), pytest.raises(PoolFullError, match="no room for a single chunk"):
        shm_rig.connect()
    assert shm_rig.server.held() == NOTHING and shm_rig.server.instances == {}


def test_a_pool_that_is_full_for_a_moment_is_waited_for(shm_rig: Rig) -> None:
    shm_rig.server.full = True
    tries = iter(range(3))

    def evict() -> None:
        if next(tries, None) is None:
            shm_rig.server.full = False

    shm_rig.server.always(p.CommitStore, then(answer, evict))
    assert shm_rig.connect().transport == "shm"


def test_a_dialect_that_does_not_fit_is_found_out_by_the_proof(inline_rig: Rig) -> None:
    inline_rig.server.on(p.PrepareRetrieve, _other_bytes)
    with pytest.raises(RemoteProtocolError, match=r"does not speak the wire of 0\.5\.6"):
        inline_rig.connect(dialect="0.5.6")
    assert inline_rig.server.instances == {} and inline_rig.server.held() == NOTHING


def _other_bytes(turn: Turn) -> list[Delivery]:
    turn.handle()
    data = inline_payload([Chunk((1, 4, 1), "uint8", b"\x00\x01\x02\x03")], turn.server.dialect.payload_form)
    return [Delivery(turn.frames(p.PreparedRetrieve(success=True, data=data, slots=None)))]


# ---- what failures leave ---------------------------------------------------------------------------------------------


def test_many_failures_leave_nothing_also_when_the_errors_are_kept(inline_rig: Rig) -> None:
    """That no descriptor and no thread is left is what `no_leaks` looks at."""
    errors: list[KVCacheSDKError] = []
    attempts: list[Callable[[], object]] = [
        lambda: inline_rig.connect(url=f"tcp://127.0.0.1:{closed_port()}"),
        lambda: inline_rig.connect(http_url=f"http://127.0.0.1:{closed_port()}"),
        lambda: inline_rig.connect(model_name="another"),
        lambda: inline_rig.connect(transport="shm"),
        lambda: inline_rig.connect(url="tcp://*:5555"),
    ]
    for attempt in attempts * 3:
        with pytest.raises(KVCacheSDKError) as caught:
            attempt()
        errors.append(caught.value)
    assert inline_rig.server.instances == {} and len(errors) == 15
