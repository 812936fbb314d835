"""What the scripts do: everything that PROTOCOL.md sections 3 to 8 and 13 say of a release, as raw requests in a row.

Each scenario takes a `Script` and talks to a server that nobody else uses. Between scenarios the server is cleared and
all instances leave, but sessions and jobs may stay: lines hold changes, not values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from lmcache_sdk import protocol as p
from lmcache_sdk.values import InstanceId, RequestId
from tests.devserver.raw import (
    CHUNK,
    chunks,
    commit_retrieve,
    commit_store,
    end,
    free,
    key,
    lookup,
    payload,
    prepare_retrieve,
    prepare_store,
    query,
    registration,
    tokens_of,
    unregister,
)
from tests.devserver.script import Script

T: Final = tokens_of(1000, 4 * CHUNK)
INSTANCES: Final = (1, 2, 3, 5, 7, 8, 9, 10, 11, 12, -5, 2**63 + 5)
"""Every id that a scenario registers."""


def whole_life(run: Script) -> None:
    """Register, store, retrieve in all sizes, store again, salts, unregister."""
    run("register", registration(1))
    run("register again, otherwise", registration(1, layers=5, model="other"))
    run("noop", p.Noop())
    run("ping nobody", p.Ping(instance_id=None))
    run("ping a stranger", p.Ping(instance_id=InstanceId(99)))
    run.store(T, request_id="first store")
    run("end", end("first store"))
    run.retrieve(T)
    run.retrieve(T, upto=2)
    run.retrieve(T + [5] * 40)
    run.retrieve(T[:40])
    run.retrieve(T[:10])
    run.retrieve([7] * 64)
    run.store(T)
    run.store(T + tokens_of(0))
    run.retrieve(T + tokens_of(0))
    run.store(T, salt="s")
    run.retrieve(T, salt="s")
    run.retrieve(T, salt="t")
    run("unregister", unregister(1))
    run("unregister again", unregister(1))
    run("prepare of a dead instance", prepare_store(1, key(T)))
    run("commit of a dead instance", commit_retrieve(1, key(T)))
    run.retrieve(T)
    run("clear", p.Clear(force=False))


def lookups(run: Script) -> None:
    """Locks, results, FREE before, after and twice, readers."""
    run("register", registration(1))
    run.store(T)
    run("prepare retrieve without lookup", prepare_retrieve(1, key(T, request_id="a")))
    run("lookup", lookup(T, "b"))
    run("lookup again", lookup(T, "b"))
    run("query", query("b"))
    run("query again", query("b"))
    run("end", end("b"))
    for count in ("once", "twice", "thrice"):
        run(f"free after end {count}", free(T, "b"))
    run("end again", end("b"))
    run("lookup", lookup(T, "c"))
    run("free before query", free(T, "c", end=32))
    run("query", query("c"))
    run("free the rest", free(T, "c", start=32))
    run("end", end("c"))
    run("lookup", lookup(T, "d"))
    run("end before query", end("d"))
    run("query after end", query("d"))
    run("free", free(T, "d"))
    run("end", end("d"))
    for readers, shares in ((3, (1, 2)), (0, (0,))):
        name = f"readers {readers}"
        run(f"lookup for {readers} readers", lookup(T, name, readers=readers))
        run("query", query(name))
        for share in shares:
            run(f"free {share}", free(T, name, readers=share))
        run("end", end(name))
    run("lookup with tp 4", lookup(T, "g", tp_size=4))
    run("query", query("g"))
    run("free with tp 1", free(T, "g"))
    run("free with tp 4", free(T, "g", tp_size=4))
    run("end", end("g"))
    run("wait for nothing", p.WaitPrefetchStatus(request_id=RequestId("nope"), timeout=0.1))
    run("lookup", lookup(T, "h"))
    run("wait", p.WaitPrefetchStatus(request_id=RequestId("h"), timeout=0.1))
    run("free an empty range", free(T, "h", start=16, end=16))
    run("free beyond the tokens", free(T, "h", end=160))
    run("end", end("h"))


def ranges(run: Script) -> None:
    """LOOKUP and FREE with a start, an end, both wrong."""
    run("register", registration(1))
    run.store(T)
    for name, parts in (
        ("start", {"start": 32}),
        ("end", {"end": 32}),
        ("end beyond", {"end": 640}),
        ("unaligned end", {"end": 40}),
        ("empty", {"start": 32, "end": 32}),
    ):
        run(f"lookup: {name}", lookup(T, name, **parts))
        run("query", query(name))
        run("free", free(T, name, **({"start": 3, "end": 41} if name == "unaligned end" else {})))
        run("end", end(name))
    if run.client.dialect.key_form is p.KeyForm.TOKEN_BYTES:
        run("lookup", lookup(T, "x"))
        run("query", query("x"))
        for start, stop, extra in ((0, 0, ((16, 32),)), (32, 64, ((0, 16), (5, 3)))):
            named = key(T, request_id="x", worker_id=None, start=start, end=stop)
            run("free extra ranges", p.FreeLookupLocks(key=named, extra_ranges=extra))
        run("end", end("x"))


def model_leaves(run: Script) -> None:
    """The last registration of a model goes between LOOKUP and FREE, or never was."""
    run("register", registration(1))
    run.store(T)
    run("lookup", lookup(T, "i"))
    run("query", query("i"))
    run("unregister", unregister(1))
    run("free", free(T, "i"))
    run("free an empty range", free(T, "i", start=16, end=16))
    run("register a private model", registration(2, model="private"))
    run.read(key(T, request_id="i"), 2)
    run("end", end("i"))
    run("lookup of a stranger", lookup(T, "j", model="never"))
    run("query", query("j"))
    run("free of a stranger", free(T, "j", model="never"))
    run("free an empty range", free(T, "j", model="never", start=0, end=0))
    run("end", end("j"))
    run("end of nothing", end("nothing"))
    run.store([3] * 32, instance_id=2, model="never", request_id="store only")
    run("end of a store-only session", end("store only"))
    run("register", registration(3))
    run("register the second", registration(1))
    run("unregister one", unregister(3))
    run.retrieve(T)
    run("unregister the same", unregister(3))
    run.retrieve(T)


def transfers(run: Script) -> None:
    """Equal keys, holes, foreign instances, inline on a shared server, what stays pending."""
    run("register", registration(1))
    run("register another", registration(2))
    named = key(T)
    run("prepare", prepare_store(1, named))
    run("prepare again", prepare_store(1, key(T)))
    run("prepare by another", prepare_store(2, key(T)))
    run("commit by another", commit_store(2, key(T)))
    run("lookup", lookup(T, "x"))
    run("query", query("x"))
    run("inline commit after prepare", commit_store(1, key(T), payload(run.release, chunks(4))))
    run("lookup", lookup(T, "y"))
    run("query", query("y"))
    run("commit", commit_store(1, named))
    run("commit again", commit_store(1, named))
    holes = tokens_of(2000, 4 * CHUNK)
    run.store(holes, start=16, end=32)
    run.retrieve(holes)
    run.store(holes, end=48)
    run.retrieve(holes)
    run.store(holes)
    run.retrieve(holes)
    run("prepare an empty range", prepare_store(1, key(T, start=16, end=16)))
    run("commit an empty range", commit_store(1, key(T, start=16, end=16)))
    run("inline commit of an empty range", commit_store(1, key(T, start=16, end=16), payload(run.release, [])))
    run("retrieve an empty range", prepare_retrieve(1, key(T, start=16, end=16)))


def pending(run: Script) -> None:
    """What is in flight when an instance leaves or the pool is cleared."""
    run("register", registration(1))
    run("register another", registration(2))
    for first, (what, request) in enumerate(
        (
            ("unregister", unregister(2)),
            ("forced clear", p.Clear(force=True)),
            ("clear", p.Clear(force=False)),
        )
    ):
        tokens = tokens_of(3000 + 100 * first)
        named = key(tokens)
        run("prepare", prepare_store(2, named))
        run(what, request)
        run("register again", registration(2))
        run("late commit", commit_store(2, named))
        run("lookup", lookup(tokens, what))
        run("query", query(what))
        run("free", free(tokens, what))
    tokens = tokens_of(5000)
    run.store(tokens)
    run("lookup", lookup(tokens, "z"))
    run("query", query("z"))
    run.prepare_read(key(tokens, request_id="z"), 2)
    run("unregister", unregister(2))
    run("register again", registration(2))
    for name in "ab":
        run("lookup", lookup(tokens, name))
        run("query", query(name))
    for name in "ab":
        run.prepare_read(key(tokens, request_id=name), 2)
    for name in "ab":
        run("commit retrieve", commit_retrieve(2, key(tokens, request_id=name)))
    run("forced clear", p.Clear(force=True))


def wrong_keys(run: Script) -> None:
    """Keys that a client must not send, through every operation."""
    run("register", registration(1))
    cases: Mapping[str, Mapping[str, object]] = {
        "unaligned end": {"end": 40},
        "unaligned start": {"start": 3},
        "end beyond the tokens": {"end": 80},
        "no worker": {"worker_id": None},
        "salt with a slash": {"salt": "a/b"},
        "salt too long": {"salt": "x" * 129},
        "longest salt": {"salt": "x" * 128},
        "longest salt, not ascii": {"salt": "é" * 128},
        "worker out of the world": {"worker_id": 300},
        "backward": {"start": 32, "end": 16},
        "forbidden model": {"model": "a@b"},
    }
    run("register a forbidden model", registration(7, model="a@b"))
    for name, parts in cases.items():
        named = key(T, request_id=name, **parts)  # type: ignore[arg-type]  # a table of keywords
        for what, request in (
            ("prepare", prepare_store(1, named)),
            ("commit", commit_store(1, named)),
            ("inline commit", commit_store(1, named, payload(run.release, chunks(4)))),
            ("prepare retrieve", prepare_retrieve(1, named)),
            ("commit retrieve", commit_retrieve(1, named)),
            ("lookup", p.Lookup(key=named)),
            ("query", query(name)),
            ("free", p.FreeLookupLocks(key=named)),
            ("end", end(name)),
        ):
            run(f"{name}: {what}", request)


def reused_request(run: Script) -> None:
    """One request id for two token sequences: the second is stored and read under the first one's names."""
    run("register", registration(1))
    one, other = tokens_of(6000), tokens_of(7000)
    run.store(one, request_id="same")
    run.store(other, request_id="same", tensors=chunks(2, seed=9))
    run.retrieve(other, request_id="fresh")
    run.retrieve(one, request_id="same")


def inline_data(run: Script) -> None:
    """Bytes in the message: too few, too many, wrong shapes and dtypes, garbage, one plane."""
    run("register", registration(1))
    good, wrong = chunks(2), chunks(2, (2, 2, CHUNK, 9))
    cases: Mapping[str, list[torch.Tensor]] = {
        "right": good,
        "too few": good[:1],
        "wrong shape": wrong,
        "too many": chunks(3),
        "other dtype": chunks(2, dtype=torch.float64),
        "one wrong": [good[0], wrong[0]],
    }
    for position, tensors in enumerate(cases.values()):
        tokens = tokens_of(1000 + 100 * position)
        run.store_inline(tokens, tensors)
        run.retrieve(tokens)
        run.store_inline(tokens, good)
        run.retrieve(tokens)
    run("register one plane", registration(5, model="mla", mla=True))
    for position, shape in enumerate(((1, 2, CHUNK, 8), (2, CHUNK, 8))):
        tokens = tokens_of(2000 + 100 * position)
        run.store_inline(tokens, chunks(2, shape), 5)
        run.store_inline(tokens, chunks(2, (2, CHUNK, 8)), 5)
        run.retrieve(tokens)
    for position, data in enumerate((b"", b"garbage", b"\xc0", b"\x80\x04.")):
        run("inline commit of garbage", commit_store(1, key(tokens_of(3000 + 100 * position)), data))


def registrations(run: Script) -> None:
    """What a registration may say, and objects of another registration's shape."""
    run("register", registration(1))
    run("unknown dtype", registration(8, dtype="nope"))
    run("an attribute that is no dtype", registration(8, dtype="Tensor"))
    run("no slots", registration(9, slots=0))
    run("few slots", registration(10, slots=4))
    run.store_inline(tokens_of(1000), chunks(2, (2, 2, 4, 8)), 10)
    run.retrieve(tokens_of(1000), instance_id=10)
    run("negative id", registration(-5))
    run("huge id", registration(2**63 + 5))
    run("bfloat16", registration(11, dtype="bfloat16", model="bf"))
    run.store_inline(tokens_of(2000), chunks(2, dtype=torch.bfloat16), 11)
    run.retrieve(tokens_of(2000))
    run("fp8", registration(12, dtype="float8_e4m3fn"))
    run("one plane", registration(5, model="mla", mla=True))
    run.retrieve(tokens_of(2000), instance_id=5)
    run.store(tokens_of(3000), instance_id=11, tensors=chunks(2, dtype=torch.bfloat16))
    run.retrieve(tokens_of(3000), instance_id=5)


def two_ranks(run: Script) -> None:
    """A model of two ranks: locks on both, one missing, one looked up or freed alone."""
    run("register", registration(1, world_size=2))
    run.store(T, world_size=2, worker_id=0)
    run.retrieve(T, world_size=2)
    run.store(T, world_size=2, worker_id=1, end=48)
    run("lookup", lookup(T, "a", world_size=2))
    run("query", query("a"))
    keys = [key(T, world_size=2, worker_id=worker, request_id="a", end=48) for worker in (0, 1)]
    for named in keys:
        run.prepare_read(named)
    for named in keys:
        run("commit retrieve", commit_retrieve(1, named))
    run("end", end("a"))
    for worker in (0, 1):
        name = f"rank {worker}"
        run("lookup of one rank", lookup(T, name, world_size=2, worker_id=worker))
        run("query", query(name))
        run("free of one rank", free(T, name, world_size=2, worker_id=worker))
        run("end", end(name))
    run("lookup", lookup(T, "d", world_size=2))
    run("query", query("d"))
    for worker in (0, 1):
        run(f"free of rank {worker}", free(T, "d", world_size=2, worker_id=worker))
    run("end", end("d"))
    for tp_size in (2, 4):
        name = f"tp {tp_size}"
        run(f"lookup with {name}", lookup(T, name, world_size=2, tp_size=tp_size))
        run("query", query(name))
        run("free with tp 1", free(T, name, world_size=2))
        run("end", end(name))


AT_ANY_TIME: Final[Sequence[Callable[[Script], None]]] = (
    whole_life,
    lookups,
    ranges,
    model_leaves,
    transfers,
    pending,
    wrong_keys,
    reused_request,
    inline_data,
    registrations,
    two_ranks,
)
"""In the order in which they run, all on one server."""
