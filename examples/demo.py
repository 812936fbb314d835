"""The main job once, from connect to close, with every result checked: cache KV, read it, edit it, cache the edit.

Without arguments it starts the embedded server, so it needs no model, no GPU and no download. With `--url`,
`--http-url` and `--model` it runs on a real server. It ends with 0 when every check held, with 1 when one did not, and
with 2 when the server could not be used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import attrs
import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import KVCacheSDKError, KVLayout, LMCacheKVCacheContext, UnknownLayoutError
from lmcache_sdk.devserver import DevServer, PlayedEngine, unique_shm_name

T = TypeVar("T")

EMBEDDED_MODEL = "demo/8-layers"
EMBEDDED_POOL_NBYTES = 48 * 2**20
NUM_CHUNKS = 4
DROPPED_OF = 4
"""The edit drops one token of so many: 4 chunks become 3 whole ones."""


def tail_tokens(chunk_size: int) -> int:
    """Tokens behind the last whole chunk, which are never stored."""
    return chunk_size * 3 // 10


class Report:
    """Prints one line per step, and remembers whether any check failed."""

    def __init__(self) -> None:
        self.failed = 0

    def say(self, step: str, text: str) -> None:
        """One line."""
        print(f"{step:<10} {text}", flush=True)

    def check(self, step: str, text: str, holds: bool) -> None:
        """One line that ends with what a check found."""
        self.failed += not holds
        self.say(step, f"{text}: {'yes' if holds else 'NO'}")


@attrs.frozen
class Target:
    """The server that the demo runs on."""

    url: str
    http_url: str
    model: str
    transport: str | None


@attrs.frozen
class Held:
    """What a server holds on behalf of clients, as GET /status tells it."""

    read_locked_objects: int
    write_locked_objects: int
    sessions: int
    prefetch_jobs: int
    registrations: int

    @classmethod
    def ask(cls, http_url: str) -> Held:
        """Reads the five numbers of this moment."""
        request = urllib.request.Request(f"{http_url}/status")
        if key := os.environ.get("LMCACHE_SDK_API_KEY"):
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=10) as response:
            status: dict[str, Any] = json.loads(response.read())
        l1 = status["storage_manager"]["l1_manager"]
        return cls(
            read_locked_objects=l1["read_locked_count"],
            write_locked_objects=l1["write_locked_count"],
            sessions=status["active_sessions"],
            prefetch_jobs=status["active_prefetch_jobs"],
            registrations=len(status["registered_non_cuda_instance_ids"]),
        )

    def describe(self) -> str:
        """In words."""
        return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in attrs.asdict(self).items())


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What a call gives, and how many milliseconds it took."""
    began = time.perf_counter()
    return call(), (time.perf_counter() - began) * 1e3


def random_kv(layout: KVLayout, num_tokens: int) -> torch.Tensor:
    """`[planes, layer, token, hidden]` of random bits, NaN patterns included: nothing may change a bit of them."""
    shape = (layout.planes, layout.num_layers, num_tokens, layout.hidden_dim)
    nbytes = math.prod(shape) * layout.dtype.itemsize
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=layout.dtype).view(shape)


def same_bits(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether two tensors are equal byte for byte; comparing values would call NaN unequal to itself."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def megabytes(tensor: torch.Tensor) -> str:
    """The size of a tensor's data."""
    return f"{tensor.nbytes / 1e6:.1f} MB"


def store_and_read(
    report: Report, ctx: LMCacheKVCacheContext, layout: KVLayout, tokens: list[int]
) -> torch.Tensor | None:
    """Stores random KV and retrieves its whole chunks."""
    kv = random_kv(layout, len(tokens))
    hit = NUM_CHUNKS * ctx.chunk_size
    report.say("kv", f"{list(kv.shape)} [kv, layer, token, hidden] {kv.dtype}, {megabytes(kv)} of random bits")
    found = ctx.lookup(tokens)
    report.check("lookup", f"{found.hit_tokens} of {found.total_tokens} tokens are cached; none", found.hit_tokens == 0)
    report.check("retrieve", "None for a prefix that is not cached", ctx.retrieve(tokens) is None)
    stored, took = timed(lambda: ctx.store(kv, tokens))
    counts = f"{stored.written_chunks} chunks written, {stored.tail_tokens} tail tokens left out, {took:.1f} ms"
    report.check("store", f"{counts}; every whole chunk is cached", bool(stored))
    found = ctx.lookup(tokens)
    report.check(
        "lookup", f"{found.hit_tokens} of {found.total_tokens} tokens; all whole chunks", found.hit_tokens == hit
    )
    back, took = timed(lambda: ctx.retrieve(tokens))
    if back is None:
        report.check("retrieve", "a hit", False)
        return None
    what = f"{list(back.shape)}, {megabytes(back)}, {took:.1f} ms; equal bit for bit"
    report.check("retrieve", what, same_bits(back, kv[:, :, :hit]))
    again = ctx.store(random_kv(layout, len(tokens)), tokens)
    counts = f"other KV, same ids: {again.already_cached_chunks} chunks were cached already"
    report.check("store", f"{counts}; none written", bool(again) and again.written_chunks == 0)
    report.check("retrieve", "the first writer's KV is still there", same_bits(ctx.retrieve(tokens), back))
    return back


def edit_and_store(report: Report, ctx: LMCacheKVCacheContext, tokens: list[int], kv: torch.Tensor) -> None:
    """Drops tokens, stores the rest under the ids that are left, and retrieves that."""
    kept = [at for at in range(kv.shape[2]) if at % DROPPED_OF]
    edited, new_tokens = kv[:, :, kept], [tokens[at] for at in kept]
    chunks = len(kept) // ctx.chunk_size
    report.say(
        "edit", f"every {DROPPED_OF}th token dropped: {len(kept)} of {kv.shape[2]} are left, {chunks} whole chunks"
    )
    ok = lmc_sdk.store(ctx, edited, new_tokens)
    report.check("store", f"{megabytes(edited)} under the {len(new_tokens)} ids that are left", ok)
    report.check("retrieve", "the edit, equal bit for bit", same_bits(lmc_sdk.retrieve(ctx, new_tokens), edited))
    report.check("retrieve", "the original, unchanged", same_bits(lmc_sdk.retrieve(ctx, tokens), kv))


def run(target: Target) -> int:
    """The whole demo on one server; how many checks failed."""
    report = Report()
    report.say("server", f"{target.url} and {target.http_url}, model {target.model!r}")
    before = Held.ask(target.http_url)
    report.say("held", before.describe())
    ctx, took = timed(lambda: lmc_sdk.connect(target.url, target.http_url, target.model))
    with ctx:
        report.say(
            "connect", f"LMCache {ctx.dialect}, {ctx.transport}, chunks of {ctx.chunk_size} tokens, {took:.1f} ms"
        )
        layout = ctx.layout
        if layout is None:
            raise UnknownLayoutError(f"the server publishes no layout of {target.model!r} to store with")
        report.say("layout", layout.describe())
        if target.transport is not None:
            report.check("transport", f"{target.transport}, as asked for", ctx.transport == target.transport)
        # random ids: on a server that has run the demo before, other ids would be cached already
        length = NUM_CHUNKS * ctx.chunk_size + tail_tokens(ctx.chunk_size)
        tokens = [random.randrange(32_000) for _ in range(length)]
        kv = store_and_read(report, ctx, layout, tokens)
        if kv is not None:
            edit_and_store(report, ctx, tokens, kv)
    report.check("close", "the context is closed", ctx.closed)
    after = Held.ask(target.http_url)
    report.check("held", f"{after.describe()}; as before", after == before)
    report.say("result", "every check held" if not report.failed else f"{report.failed} checks FAILED")
    return report.failed


@contextlib.contextmanager
def server(told: argparse.Namespace) -> Iterator[Target]:
    """The real server that the command line names, or an embedded one."""
    if told.url is not None:
        yield Target(told.url, told.http_url.rstrip("/"), told.model, told.transport)
        return
    transport = told.transport or "shm"
    engine = PlayedEngine(model_name=EMBEDDED_MODEL, num_layers=8, num_kv_heads=4, head_dim=128)
    with DevServer(
        models=[engine],
        speak=told.speak,
        shm_name=unique_shm_name() if transport == "shm" else "",
        l1_size_bytes=EMBEDDED_POOL_NBYTES,
    ) as embedded:
        yield Target(embedded.url, embedded.http_url, EMBEDDED_MODEL, transport)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Store, retrieve and edit KV, on the embedded or on a real server.")
    parser.add_argument("--transport", choices=("shm", "inline"), help="embedded: default shm; real: asserted")
    parser.add_argument("--speak", default="0.5.6", metavar="RELEASE", help="what the embedded server speaks")
    parser.add_argument("--url", help="a real server's ZMQ address, such as tcp://localhost:5555")
    parser.add_argument("--http-url", help="its HTTP address, such as http://localhost:8080")
    parser.add_argument("--model", help="the model that an engine has registered there")
    told = parser.parse_args(arguments)
    if len({value is None for value in (told.url, told.http_url, told.model)}) != 1:
        parser.error("--url, --http-url and --model go together")
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; the exit status."""
    told = parse(arguments)
    try:
        with server(told) as target:
            return 1 if run(target) else 0
    except (KVCacheSDKError, OSError) as error:
        print(f"demo: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
