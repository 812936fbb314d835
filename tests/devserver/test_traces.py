"""The imitation answers every scenario as the real server of each release did, line by line."""

from __future__ import annotations

import pytest

from lmcache_sdk.devserver import DevServer, ManualClock, unique_shm_name
from tests.devserver.raw import RELEASES, running
from tests.devserver.script import Script
from tests.devserver.stages import STAGES, run_stage
from tests.devserver.traces import TRANSPORTS, read, trace_file


def let_pass(server: DevServer, clock: ManualClock, seconds: float) -> None:
    """Moves the clock, and has the server do what it does once a second."""
    for _ in range(int(seconds)):
        clock.advance(1)
        server.tick()
    clock.advance(seconds % 1)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("release", RELEASES)
def test_answers_as_the_real_server_did(release: str, transport: str) -> None:
    found: dict[str, list[str]] = {}
    for stage in STAGES:
        clock = ManualClock()
        name = unique_shm_name() if transport == "shm" else ""
        with running(release, shm_name=name, clock=clock, **stage.ours) as (server, client):
            found |= run_stage(
                stage,
                lambda: Script(client, server.http_url, server.shm_name, lambda s: let_pass(server, clock, s)),  # noqa: B023
            )
    expected = read(trace_file(release, transport))
    assert list(found) == list(expected)
    for scenario, lines in expected.items():
        assert found[scenario] == lines, scenario


def test_the_traces_hold_what_they_should() -> None:
    """A recording of nothing would agree with anything."""
    for release in RELEASES:
        for transport in TRANSPORTS:
            text = trace_file(release, transport).read_text()
            assert text.count("\n") > 400
            assert text.count("no reply") > 20
            assert text.count(" = ") > 15
            assert text.count("miss") > 3
            assert ("false" in text) is ((release, transport) != ("0.5.7rc2", "inline")), "which refuses by silence"
