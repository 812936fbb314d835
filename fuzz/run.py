"""Runs one target under libFuzzer: `python -m fuzz.run TARGET [libFuzzer flags]`, from the repository's root.

The library's branches are instrumented as it is imported. Its comparisons and the targets are not: the mutators know
the words that there are to be found, and a third more executions fit into a second. The corpus in the repository is
read; inputs that reach something new go to `.cache/fuzz/TARGET`, which later runs start from too, and a finding to
`.cache/fuzz/TARGET-crash-*`. Every 1024th execution is measured for its peak of memory.
"""

from __future__ import annotations

import gc
import importlib
import resource
import sys
from pathlib import Path
from typing import Final

import atheris  # type: ignore[import-untyped]
import torch
from atheris.import_hook import HookManager  # type: ignore[import-untyped]

ROOT: Final = Path(__file__).parent
FOUND: Final = ROOT.parent / ".cache" / "fuzz"
TARGETS: Final = ("payloads", "frames", "documents")
_TRACED_EVERY: Final = 1024
_MEMORY_ON_TOP: Final = 256 * 2**20
"""Address space above what is there after the warm-up; libFuzzer's own growth is in it."""
# keep_seed: which dialect, kind or format an input is of shows in no branch, and would be thrown away
_FLAGS: Final = (
    "-keep_seed=1",
    "-timeout=25",
    "-entropic_scale_per_exec_time=1",
    "-len_control=50",
    "-print_final_stats=1",
)


def _limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY_ON_TOP, resource.RLIM_INFINITY))


def main(name: str, flags: list[str]) -> None:
    """Does not return: libFuzzer ends the process."""
    torch.set_num_threads(1)
    with HookManager({"lmcache_sdk"}, set(), enable_loader_override=True, trace_dataflow=False):
        target = importlib.import_module(f"fuzz.{name}")
    mutators, guards = importlib.import_module("fuzz.mutators"), importlib.import_module("fuzz.guard")
    corpus, found = ROOT / "corpus" / name, FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    counters = [atheris._reserve_counter() for _ in range(guards.Marks.COUNT)]
    guards.MARKS.hit = lambda number: atheris._trace_branch(counters[number])
    guard = guards.Guard(target.check)
    guard.warm_up([path.read_bytes() for path in sorted(corpus.iterdir())])
    run, run_traced, mutator = guard.run, guard.run_traced, mutators.MUTATORS[name]
    executions = 0

    def once(data: bytes) -> None:
        nonlocal executions
        executions += 1
        if executions % _TRACED_EVERY:
            run(data)
        else:
            run_traced(data)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        changed: bytes = mutator(data, max_size, seed, atheris.Mutate)
        return changed

    arguments = [sys.argv[0], *_FLAGS, f"-max_len={target.MAX_LEN}", f"-artifact_prefix={FOUND}/{name}-"]
    atheris.Setup([*arguments, *flags, str(found), str(corpus)], once, custom_mutator=mutate)
    gc.freeze()  # what is there now need not be walked through again and again
    _limit_memory()
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m fuzz.run {{{'|'.join(TARGETS)}}} [libFuzzer flags]")
    main(sys.argv[1], sys.argv[2:])
