"""The soak: `python -m tests.soak`, or `make soak`.

    --seconds 600     of traffic, divided among the pairs of release and transport
    --releases 0.5.6 0.5.7rc2
    --transports shm inline
    --faults freeze kill-client restart
                      leave some out, or all, to look for something
    --seed TEXT       what decides which fault comes when; printed, a new one when left out
    --keep            keeps logs and journals also when all is well

Exit status 0 when nothing wrong came back and nothing was left behind, 1 otherwise. After its traffic a server is left
alone for its TTLs and its sweep of sessions, while the next pair is at work already.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Final

from tests.integration.make_env import RELEASES, is_present
from tests.integration.servers import Held
from tests.soak import plan
from tests.soak.faults import FAULTS, Scene
from tests.soak.hosts import Clients
from tests.soak.report import Result

_PATIENCE: Final = (
    max(plan.WRITE_TTL, plan.READ_TTL, plan.SESSION_TTL + plan.SESSION_SWEEP, plan.GRACE + plan.REAP) + 10
)
_ASK_SECONDS: Final = 1.0


@dataclass
class Draining:
    """A server after its traffic, left alone."""

    scene: Scene
    result: Result
    until: float

    def finish(self) -> None:
        """Waits until it holds nothing more or its time is over, judges, ends it."""
        held: Held | None = None
        while True:
            with suppress(OSError, ValueError, KeyError):
                held = self.scene.server.held()
            empty = held is not None and not (
                held.read_locked or held.write_locked or held.sessions or held.registrations
            )
            if empty or time.monotonic() > self.until:
                break
            time.sleep(_ASK_SECONDS)
        self.scene.server.stop()
        self.result.left = held
        self.result.judge()
        print("\n".join(self.result.lines()), flush=True)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Faults, load, and every byte checked.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--releases", nargs="+", default=["0.5.6", "0.5.7rc2"], choices=RELEASES)
    parser.add_argument("--transports", nargs="+", default=["shm", "inline"], choices=("shm", "inline"))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=tuple(FAULTS))
    parser.add_argument("--seed", default="")
    parser.add_argument("--keep", action="store_true")
    return parser.parse_args()


def run_pair(scene: Scene, seconds: float) -> Draining:
    """The traffic of one pair."""
    scene.start()
    scene.play(seconds)
    scene.stop()
    result = Result(scene.name, scene.happened)
    result.add_journals(scene.folder.glob("client-*.jsonl"))
    print(f"{scene.name}: traffic over, {result.counts['wrong_bytes']} wrong bytes", flush=True)
    for text in result.events.get("wrong", [])[:1]:
        print(f"  first wrong bytes: {text}", flush=True)
    return Draining(scene, result, time.monotonic() + _PATIENCE)


def soak(chosen: argparse.Namespace, seed: str, folder: Path) -> list[Result]:
    """All pairs, one after the other."""
    pairs = [(release, transport) for release in chosen.releases for transport in chosen.transports]
    draining: list[Draining] = []
    results = []
    with ExitStack() as stack:
        clients = Clients(folder / "nursery.log")
        stack.callback(clients.stop)
        for release, transport in pairs:
            while len(draining) > 1:
                draining.pop(0).finish()
            pair_folder = folder / f"{release}-{transport}"
            pair_folder.mkdir()
            scene = Scene(release, transport, seed, chosen.faults, clients, pair_folder)
            stack.callback(scene.abandon)
            draining.append(run_pair(scene, chosen.seconds / len(pairs)))
            results.append(draining[-1].result)
        for left in draining:
            left.finish()
    return results


def main() -> int:
    """Run it and print the verdict."""
    chosen = options()
    if not is_present():
        print("no real servers here: run tests/integration/make_env.py", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers and clients end with it, in order
    seed = chosen.seed or str(SystemRandom().randrange(10**9))
    folder = Path(tempfile.mkdtemp(prefix="lmcache-sdk-soak-"))
    print(
        f"seed {seed}; {plan.PROCESSES} processes × {plan.THREADS} threads; pool {plan.POOL_CHUNKS} chunks of "
        f"{plan.CHUNK_NBYTES // 1024} KiB, key space {plan.KEY_SPACE_CHUNKS}; TTLs write {plan.WRITE_TTL} s, read "
        f"{plan.READ_TTL} s, grace {plan.GRACE} s; logs in {folder}",
        flush=True,
    )
    results = soak(chosen, seed, folder)
    failed = [result.name for result in results if result.problems]
    print(f"seed {seed}: {'FAILED: ' + ', '.join(failed) if failed else 'ok'}")
    if not failed and not chosen.keep:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
