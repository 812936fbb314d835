"""The imitation answers every scenario as the real server of each release did, line by line."""

from __future__ import annotations

import pytest

from lmcache_sdk.devserver import unique_shm_name
from tests.devserver.raw import RELEASES, running
from tests.devserver.scenarios import SCENARIOS, run_all
from tests.devserver.script import Script
from tests.devserver.traces import POOL_NBYTES, TRANSPORTS, read, trace_file


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("release", RELEASES)
def test_answers_as_the_real_server_did(release: str, transport: str) -> None:
    expected = read(trace_file(release, transport))
    assert list(expected) == list(SCENARIOS)
    name = unique_shm_name() if transport == "shm" else ""
    with running(release, shm_name=name, l1_size_bytes=POOL_NBYTES) as (server, client):
        found = run_all(lambda: Script(client, server.http_url, server.shm_name))
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
