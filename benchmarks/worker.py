"""One side of the benchmark in a process of its own: it stays, so that it is warm, and makes calls when told to.

    python -m benchmarks.worker ours|official|straight

Answers one JSON line on standard output to each on standard input; {"error": text} when an order failed. What is
timed is the library's call alone: token lists, tensors, checks of content and the dropping of results are outside.
An order may say how many `calls` it means; they are made in a row. An answer has `seconds`, and `faults`, the minor
page faults of the process meanwhile: the means of the calls.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, TextIO

import torch

from benchmarks import content
from benchmarks.side import Context, Side

Order = dict[str, Any]
Answer = dict[str, Any]

_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


class Clock:
    """Runs in its `with` blocks, one for each call, and adds up what they took."""

    seconds = 0.0
    faults = 0
    calls = 0

    def __enter__(self) -> None:
        self.faults -= _faults()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
        self.faults += _faults()
        self.calls += 1

    def answer(self) -> Answer:
        """For the pipe: the means."""
        return {"seconds": self.seconds / self.calls, "faults": self.faults / self.calls}


@contextmanager
def timing() -> Iterator[Clock]:
    """A clock for calls in a row. No collection of garbage falls between them: what is measured is calls, not Python's
    debts.
    """
    gc.collect()
    gc.disable()
    try:
        yield Clock()
    finally:
        gc.enable()


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@lru_cache(maxsize=32)
def _tokens(seed: int, count: int) -> list[int]:
    return content.tokens(seed, count)


class Worker:
    """The orders, one method each: `do_<name>(order) -> answer`."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._context: Context | None = None
        self._kv: torch.Tensor | None = None
        self._content = 0
        self._out: torch.Tensor | None = None
        self._kept: list[object] = []

    @property
    def _now(self) -> Context:
        assert self._context is not None, "not connected"
        return self._context

    def do_version(self, _: Order) -> Answer:
        """The releases that run here."""
        return {"library": self._side.version(), "torch": torch.__version__, "threads": torch.get_num_threads()}

    def do_connect(self, order: Order) -> Answer:
        """A context, in the place of the last one."""
        self.do_close({})
        with timing() as clock, clock:
            context = self._side.connect(order["url"], order["http_url"], order["model"], order.get("recycle"))
        self._context = context
        return clock.answer()

    def do_close(self, order: Order) -> Answer:
        """Closes the context and drops every tensor."""
        self._kv = self._out = None
        self._kept.clear()
        if self._context is not None:
            self._context.close()
            self._context = None
        return self.do_settle(order)

    def do_settle(self, _: Order) -> Answer:
        """Gives unused memory back, so that growth is seen from a low place."""
        gc.collect()
        if _TRIM is not None:
            _TRIM(0)
        return {"pid": os.getpid()}

    def do_make(self, order: Order) -> Answer:
        """The KV that will be stored, written once so that its pages are there."""
        self._content = order["content"]
        self._kv = content.make_kv(tuple(order["shape"]), order["content"])
        return {}

    def do_store(self, order: Order) -> Answer:
        """Stores the made KV under the tokens of a seed, each call under those of the next one."""
        kv, stored = self._kv, []
        assert kv is not None, "nothing made"
        lists = self._expected(order, kv)
        with timing() as clock:
            for tokens in lists:
                with clock:
                    answer = self._now.store(kv, tokens)
                stored.append(answer)
        return {**clock.answer(), "wrong": "" if all(stored) else "store said no"}

    def _expected(self, order: Order, kv: torch.Tensor | None = None) -> list[list[int]]:
        """Token lists of as many seeds as there are calls, made known to the library."""
        lists = [_tokens(order["seed"] + call, order["count"]) for call in range(order.get("calls", 1))]
        for tokens in lists:
            self._now.expect(tokens, kv)
        return lists

    def do_retrieve(self, order: Order) -> Answer:
        """Retrieves; `mode` says what becomes of the result: drop, keep, or out for a warm tensor of ours."""
        tokens, shape = _tokens(order["seed"], order["count"]), tuple(order["shape"])
        out = self._warm_out(shape) if order["mode"] == "out" else None
        self._now.expect(tokens)
        found: object = None
        with timing() as clock:
            for _ in range(order.get("calls", 1)):
                found = None  # the last one is dropped outside of the clock
                with clock:
                    found = self._now.retrieve(tokens, out)
                if order["mode"] == "keep":
                    self._kept.append(found)
        # of several the last one: to look at each would part what is to be in a row
        return {**clock.answer(), "wrong": content.find_wrong(self._now.opened(found), shape, order["content"])}

    def _warm_out(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self._out is None or tuple(self._out.shape) != shape:
            self._out = torch.ones(shape, dtype=torch.bfloat16)
        return self._out

    def do_miss(self, order: Order) -> Answer:
        """Retrieves of what nobody has stored, other tokens each time."""
        misses, found = self._expected(order), []
        with timing() as clock:
            for tokens in misses:
                with clock:
                    answer = self._now.retrieve(tokens, None)
                found.append(answer)
        return {**clock.answer(), "wrong": "" if found == [None] * len(misses) else "something came back"}

    def do_lookup(self, order: Order) -> Answer:
        """Lookups of what is stored."""
        tokens, found = _tokens(order["seed"], order["count"]), set()
        self._now.expect(tokens)
        with timing() as clock:
            for _ in range(order["calls"]):
                with clock:
                    hit = self._now.lookup(tokens)
                found.add(hit)
        wrong = "" if found == {order["expect"]} else f"{found} tokens found, expected {order['expect']}"
        return {**clock.answer(), "wrong": wrong}

    def do_view(self, order: Order) -> Answer:
        """Zero-copy reads in which nothing is read."""
        tokens, calls = _tokens(order["seed"], order["count"]), order["calls"]
        count = 0
        with timing() as clock:
            for _ in range(calls):
                with clock, self._now.view(tokens) as chunks:
                    count += len(chunks)
        expected = calls * (order["count"] // content.CHUNK)
        return {**clock.answer(), "wrong": "" if count == expected else f"{count} chunks, expected {expected}"}

    def do_copy(self, order: Order) -> Answer:
        """The floor: the same bytes copied from the server's pool into one warm buffer, as fast as torch can."""
        tokens, shape = _tokens(order["seed"], order["count"]), tuple(order["shape"])
        flat = self._warm_out(shape).view(-1)
        with self._now.view(tokens) as chunks:
            sources = [chunk.reshape(-1) for chunk in chunks]
            targets = torch.split(flat, [source.numel() for source in sources])
            _copy_all(sources, targets)  # faults the mapping in
            with timing() as clock:
                for _ in range(order.get("calls", 1)):
                    with clock:
                        _copy_all(sources, targets)
            del sources, targets
        return clock.answer()

    def do_crowd(self, order: Order) -> Answer:
        """Several threads on the one context, each `calls` times a lookup and a retrieve; operations per second."""
        count, shape, calls = order["count"], tuple(order["shape"]), order["calls"]
        lists = [_tokens(order["seed"] + number, count) for number in range(order["threads"])]
        for tokens in lists:
            self._now.expect(tokens)
        gate = threading.Barrier(len(lists) + 1)
        problems: list[str] = []

        def work(tokens: list[int]) -> None:
            gate.wait()
            try:
                for _ in range(calls):
                    if self._now.lookup(tokens) != count:
                        problems.append("lookup found too little")
                    found = self._now.opened(self._now.retrieve(tokens, None))
                    problems.extend(filter(None, [_shape_problem(found, shape)]))
            except Exception as error:  # noqa: BLE001 - goes to the report
                problems.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work, args=(tokens,)) for tokens in lists]
        for thread in threads:
            thread.start()
        with timing() as clock, clock:
            gate.wait()
            for thread in threads:
                thread.join()
        done = 2 * calls * len(lists)
        wrong = f"{len(problems)} × wrong, first: {problems[0]}" if problems else ""
        return {**clock.answer(), "per_second": done / clock.seconds, "wrong": wrong}


def _shape_problem(kv: torch.Tensor | None, shape: tuple[int, ...]) -> str:
    """The check that fits into a timed loop: a miss or another shape; the bytes are checked by the other rows."""
    return "" if kv is not None and tuple(kv.shape) == shape else "retrieve brought something else"


def _copy_all(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def main(side: str, answers: TextIO) -> None:
    """Answers until standard input ends."""
    module: Any = import_module(f"benchmarks.{side}")
    worker = Worker(module.SIDE)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order: Order = json.loads(line)
        method: Callable[[Order], Answer] = getattr(worker, f"do_{order['do']}")
        try:
            answer = method(order)
        except Exception as error:  # noqa: BLE001 - goes back to who gave the order
            traceback.print_exc()
            answer = {"error": f"{order['do']}: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # leaving the usual way would wait for lmcache's threads


if __name__ == "__main__":
    # lmcache logs to standard output: keep that for the answers and send everything else to the log
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.argv[1], pipe)
