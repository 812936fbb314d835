"""Traces: what the real servers answered to the scenarios, as text files that nobody's encoder made.

One file per release and transport. `python -m tests.devserver.traces [RELEASE …]` records them anew from real servers,
for which the environment of `make interop` must be there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from tests.devserver.raw import CHUNK, RELEASES, RawClient
from tests.devserver.script import Script
from tests.devserver.stages import STAGES, Stage, run_stage

FOLDER: Final = Path(__file__).parent / "traces"
TRANSPORTS: Final = ("shm", "inline")
REAL_SILENCE: Final = 1.0
"""Seconds after which a real server on a quiet machine will not answer any more."""


def trace_file(release: str, transport: str) -> Path:
    """Where the trace of one kind of server is."""
    return FOLDER / f"{release}-{transport}.txt"


def write(path: Path, scenarios: Mapping[str, Sequence[str]]) -> None:
    """Writes a trace."""
    text = [
        "# Recorded from the real server by tests/devserver/traces.py. Not to be edited, nor made from ours.",
        "",
    ]
    for name, lines in scenarios.items():
        text += [f"[{name}]", *lines, ""]
    path.write_text("\n".join(text))


def read(path: Path) -> dict[str, list[str]]:
    """Reads a trace."""
    scenarios: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            lines = scenarios.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return scenarios


def run_on_real_server(release: str, transport: str, stage: Stage) -> dict[str, list[str]]:
    """The lines of a stage on a real server."""
    from tests.integration.servers import RealServer

    kind: Literal["shm", "inline"] = "shm" if transport == "shm" else "inline"
    server = RealServer(release, transport=kind, chunk_size=CHUNK, extra_args=stage.real)
    with server, RawClient(server.url, release) as client:
        client.patience = REAL_SILENCE
        return run_stage(stage, lambda: Script(client, server.http_url, server.segment, time.sleep))


def record(release: str, transport: str) -> None:
    """Runs every stage on real servers and writes the trace."""
    lines = {}
    for stage in STAGES:
        lines.update(run_on_real_server(release, transport, stage))
    write(trace_file(release, transport), lines)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for wanted in sys.argv[1:] or RELEASES:
        for each in TRANSPORTS:
            record(wanted, each)
            print(f"recorded {trace_file(wanted, each).name}", flush=True)
