"""Which scenarios run on which kind of server, and those that need one of their own: short times, a small pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs

from lmcache_sdk import protocol as p
from lmcache_sdk.values import InstanceId
from tests.devserver.raw import (
    CHUNK,
    chunks,
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
from tests.devserver.scenarios import AT_ANY_TIME, INSTANCES
from tests.devserver.script import Script


def ends_by_itself(run: Script) -> None:
    """Read locks end after 3 seconds, reservations after 4, an instance that pinged after 30."""
    run("register", registration(1))
    run("register another", registration(2))
    tokens = tokens_of(100)
    run.store(tokens)
    for name in "ab":
        run("lookup", lookup(tokens, name))
        run("query", query(name))
        run.wait(2)
    run("noop 4 seconds after the first", p.Noop())
    run.wait(2)
    run("noop 4 seconds after the second", p.Noop())
    run("late retrieve", prepare_retrieve(1, key(tokens, request_id="a")))
    run("late free", free(tokens, "b"))

    tokens = tokens_of(200)
    run("abandoned prepare", prepare_store(1, key(tokens)))
    run.wait(5)
    run("noop", p.Noop())
    run.look(tokens, "c")
    run("prepare by another", prepare_store(2, key(tokens)))
    run("late commit", commit_store(1, key(tokens)))
    run.look(tokens, "d")
    run("commit by the other", commit_store(2, key(tokens)))
    run.look(tokens, "e")

    tokens = tokens_of(300)
    run("prepare", prepare_store(1, key(tokens)))
    run.wait(5)
    run("late commit", commit_store(1, key(tokens)))
    run.look(tokens, "f")

    tokens = tokens_of(400)
    run("prepare", prepare_store(2, key(tokens)))
    run.wait(5)
    run("late unregister", unregister(2))
    run.look(tokens, "g")

    tokens = tokens_of(500)
    run.store_inline(tokens, chunks(1))
    run.wait(5)
    run.look(tokens, "h")
    run.store_inline(tokens, chunks(2))
    run.look(tokens, "i")

    run("register a third", registration(3, model="third"))
    run("it pings", p.Ping(instance_id=InstanceId(3)))
    run("it prepares", prepare_store(3, key(tokens_of(600))))
    run.wait(39)
    run("it is reaped", p.Noop())
    run.look(tokens_of(600), "j")
    run("clear", p.Clear(force=False))


def full_pool(run: Script) -> None:
    """A pool of ten chunks of 2 MiB: nothing fits, somebody goes, in which order, and what is being written stays."""
    shape = (2, 32, CHUNK, 512)
    run("register", registration(1, layers=32, hidden=512))
    for first in (100, 300):
        run.store(tokens_of(first, 3 * CHUNK), tensors=chunks(3, shape))
    run("prepare too much", prepare_store(1, key(tokens_of(1000, 30 * CHUNK))))
    run("commit", commit_store(1, key(tokens_of(1000, 30 * CHUNK))))
    run.wait(2.5)
    run("nobody goes", p.Noop())
    with run.unwatched():
        run.store(tokens_of(500, 3 * CHUNK), tensors=chunks(3, shape))
    run.wait(2.5)
    run("somebody went", p.Noop())
    for first in (100, 300, 500):
        run.look(tokens_of(first, 3 * CHUNK), f"after {first}")
        run("end", end(f"after {first}"))
    run("prepare more than there is", prepare_store(1, key(tokens_of(700, 4 * CHUNK))))
    with run.unwatched():
        for first in (900, 950):
            run("prepare", prepare_store(1, key(tokens_of(first, CHUNK))))
    run.wait(4)
    run("what is written stays", p.Noop())
    run(
        "inline commit of too much",
        commit_store(1, key(tokens_of(2000, 9 * CHUNK)), payload(run.release, chunks(9, shape))),
    )


@attrs.frozen(kw_only=True)
class Stage:
    """Scenarios that run on one server, and how that is started."""

    scenarios: Sequence[Callable[[Script], None]]
    real: Sequence[str] = ()
    """Arguments of the real server, besides the usual ones."""
    ours: Mapping[str, float] = {}
    """The same for a DevServer."""


STAGES: Final = (
    Stage(
        scenarios=AT_ANY_TIME,
        ours={"l1_size_bytes": 2**30},
    ),
    Stage(
        scenarios=(ends_by_itself,),
        real=(
            *("--l1-read-ttl-seconds", "3", "--l1-write-ttl-seconds", "4"),
            *("--worker-reap-timeout-seconds", "30"),
        ),
        ours={"l1_size_bytes": 2**30, "read_ttl": 3, "write_ttl": 4, "reap": 30},
    ),
    Stage(
        scenarios=(full_pool,),
        real=("--l1-size-gb", "0.02"),
        ours={"l1_size_bytes": int(0.02 * 2**30), "eviction_interval": 10**6},
    ),
)


def run_stage(stage: Stage, make_script: Callable[[], Script]) -> dict[str, list[str]]:
    """The lines of every scenario of a stage."""
    lines = {}
    for scenario in stage.scenarios:
        script = make_script()
        try:
            scenario(script)
            lines[scenario.__name__] = list(script.lines)
            script("forced clear", p.Clear(force=True))
            for instance_id in INSTANCES:
                script("unregister", unregister(instance_id))
        finally:
            script.close()
    return lines
