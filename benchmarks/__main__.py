"""The benchmark: `python -m benchmarks`, or `make bench`.

    --quick           one geometry, 2048 tokens, three repetitions, the rows that are quick: a look in two minutes
    --only ROW,...    some rows; `--list` prints them
    --repeats 7       pairs for each case; seven or more are a result
    --geometry NAME   Qwen3-8B, small, MLA; may be repeated
    --out DIR         where the results go

A whole run writes benchmarks/results/*.json and docs/performance.svg; a part of one writes under build/benchmarks and
leaves those alone. Exit status 0 when every row passes or is held by its floor, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import rows_calls, rows_import, rows_inline, rows_memory, rows_shm
from benchmarks.chart import chart
from benchmarks.facts import facts, sources
from benchmarks.figures import ENOUGH, MEANING, Line, failed, passed
from benchmarks.plan import Plan, quick
from benchmarks.stage import GEOMETRIES, RELEASE, Stage
from benchmarks.table import table
from tests.integration.make_env import PROJECT_ROOT, is_present
from tests.integration.servers import Transport

Row = Callable[[Stage, Plan], Iterator[Line]]

STAGED: Final[dict[Transport, dict[str, Row]]] = {
    "shm": {
        "shm-retrieve": rows_shm.retrieve,
        "shm-retrieve-kept": rows_shm.retrieve_kept,
        "shm-store": rows_shm.store,
        "shm-store-new": rows_shm.store_new_slots,
        "view": rows_shm.view,
        "miss": rows_calls.miss,
        "lookup": rows_calls.lookup,
        "long": rows_calls.long,
        "crowd": rows_calls.crowd,
        "connect": rows_calls.connect,
        "shm-memory-retrieve": rows_memory.retrieve,
        "shm-memory-store": rows_memory.store,
    },
    "inline": {
        "inline-store": rows_inline.store,
        "inline-retrieve": rows_inline.retrieve,
        "inline-connect": rows_calls.connect,
        "inline-memory-retrieve": rows_memory.retrieve,
        "inline-memory-store": rows_memory.store,
    },
}
IMPORT: Final = "import"
NAMES: Final = (*(name for rows in STAGED.values() for name in rows), IMPORT)
LONG: Final = frozenset({"long", "inline-connect", IMPORT, *(name for name in NAMES if "memory" in name)})
"""Left out of a quick run that does not name them."""
RESULTS: Final = PROJECT_ROOT / "benchmarks" / "results"
PARTIAL: Final = PROJECT_ROOT / "build" / "benchmarks"
CHART: Final = PROJECT_ROOT / "docs" / "performance.svg"


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ours and the official SDK, in turn.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", metavar="ROW,...")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--geometry", action="append", default=[], choices=tuple(GEOMETRIES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    chosen.only = [name for name in chosen.only.split(",") if name]
    if unknown := set(chosen.only) - set(NAMES):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return chosen


def plan_of(chosen: argparse.Namespace) -> Plan:
    """The size of the run that the command line asks for."""
    if chosen.quick:
        return quick(chosen.repeats or 3)
    geometries = tuple(GEOMETRIES[name] for name in chosen.geometry or GEOMETRIES)
    return Plan(repeats=chosen.repeats or Plan.repeats, geometries=geometries)


def measured(name: str, lines: Callable[[], Iterator[Line]]) -> list[Line]:
    """The lines of one row; a row that cannot be measured is a line that says so, and the others go on."""
    began = time.monotonic()
    taken: list[Line] = []
    try:
        taken.extend(lines())
    except Exception as error:  # noqa: BLE001 - shown in the table
        taken.append(failed(name, error))
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return taken


def sections(chosen: argparse.Namespace, plan: Plan, folder: Path) -> Iterator[tuple[str, list[Line]]]:
    """One section after the other, one server at a time."""
    wanted = chosen.only or [name for name in NAMES if not (chosen.quick and name in LONG)]
    for transport, rows in STAGED.items():
        names = [name for name in rows if name in wanted]
        if not names:
            continue
        with Stage(transport, folder) as stage:
            lines: list[Line] = []
            for name in names:
                lines.extend(measured(name, partial(rows[name], stage, plan)))
        yield transport, lines
    if IMPORT in wanted:
        yield IMPORT, measured(IMPORT, lambda: rows_import.imports(plan))


def write(section: str, lines: Sequence[Line], about: dict[str, object], folder: Path) -> None:
    """The results file of one section."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = [line.as_json() for line in lines]
    document = {"section": section, "facts": about, "words": dict(MEANING), "lines": taken}
    (folder / f"{section}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def note(about: dict[str, object]) -> str:
    """Below the chart."""
    return (
        f"lmcache {RELEASE}, {about['cpu']}, {about['cores']} cores, {about['memory']}; {str(about['date'])[:10]}, "
        f"commit {str(about['commit'])[:10]}"
    )


def main() -> int:
    """Runs it and prints the verdict."""
    chosen = options()
    if chosen.list:
        print("\n".join(NAMES))
        return 0
    if not is_present():
        print("no real servers here: run tests/integration/make_env.py", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers and workers end with it, in order
    plan = plan_of(chosen)
    whole = plan == Plan(repeats=plan.repeats) and plan.repeats >= ENOUGH and not chosen.only
    folder = chosen.out or (RESULTS if whole else PARTIAL)
    about = {**facts(), "server": RELEASE, "repeats": plan.repeats}
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="lmcache-sdk-bench-") as logs:
        for section, taken in sections(chosen, plan, Path(logs)):
            write(section, taken, {**about, "at_end": sources()}, folder)
            lines.extend(taken)
    (CHART if whole and not chosen.out else folder / CHART.name).write_text(chart(lines, note(about)))
    print("\n".join(table(lines)))
    return 0 if passed(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
