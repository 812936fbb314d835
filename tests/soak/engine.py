"""A serving engine for the soak: registers its model when told to, again after each restart, and pings as engines do.

    python engine.py URL SPECS

Runs inside the server's environment and answers "registered" on standard output to each line "register" on standard
input. A ping goes out every few seconds and is not waited for: the server may be frozen. An engine that pinged once
is forgotten soon after its last ping, which is what the end of a soak waits for.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tests.integration.play_engine import EngineClient, Worker, parse_specs, register_all
else:  # run as a script: its own folder gives way to the one of the engine that it is made of
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "integration")
    from play_engine import EngineClient, parse_specs, register_all

PING_SECONDS = 5.0


def ping(connection: EngineClient, workers: dict[str, Worker]) -> None:
    """Tell the server that the workers live."""
    for worker in workers.values():
        with contextlib.suppress(Exception):
            connection.client.ping(worker.instance_id)


def main(replies: TextIO) -> None:
    """Do as the lines say until they end."""
    url, specs = sys.argv[1], parse_specs(sys.argv[2])
    connection: EngineClient | None = None
    workers: dict[str, Worker] = {}
    print("ready", file=replies, flush=True)
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], PING_SECONDS)
        if not ready:
            if connection is not None:
                ping(connection, workers)
            continue
        if sys.stdin.readline().strip() != "register":
            # leaving the usual way would wait for lmcache's threads
            os._exit(0)
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.client.close()
        connection = EngineClient(url)
        workers = register_all(connection, specs)
        ping(connection, workers)
        print("registered", file=replies, flush=True)


if __name__ == "__main__":
    # lmcache logs to standard output: keep that for the answers and send everything else to the log
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(answers)
