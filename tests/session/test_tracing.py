"""LMCACHE_SDK_TRACE=1 prints frames in the form of the golden files, and nothing else does."""

from __future__ import annotations

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.session.channel import Channel
from lmcache_sdk.session.tracing import TRACE_VARIABLE
from lmcache_sdk.values import RequestId
from tests.fix_fake_server import FakeServer
from tests.fix_faults import FakeClock, MemoryTransport, says
from tests.session.desk import Desk


def talk(text: str = "OK") -> None:
    server = FakeServer("0.5.6")
    channel = Channel(server.dialect, MemoryTransport(server, FakeClock()))
    server.on(p.Noop, says(p.NoopAnswer(text)))
    channel.call(p.Noop(), Desk().within(1), "x")
    channel.call(p.EndSession(request_id=RequestId("r")), Desk().within(1), "x")


def test_frames_are_printed_line_by_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, "1")
    talk()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        *("# noop", "> 00", "> 18", "# reply", "< 00", "< 18", "< a2 4f 4b"),
        *("# end_session", "> 01", "> 0d", "> a1 72", "# reply", "< 01", "< 0d"),
    ]


def test_a_long_frame_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, "1")
    talk("x" * 10_000)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "..." in line]
    assert line.endswith("# 10003 bytes") and len(line) < 250


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_nothing_is_printed_unless_asked_for(
    value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if value is None:
        monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(TRACE_VARIABLE, value)
    talk()
    assert capsys.readouterr() == ("", "")
