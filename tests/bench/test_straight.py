"""The straight-line client moves the right bytes and leaves nothing behind: a floor that did less would be none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks import content
from benchmarks.straight import AHEAD, BATCH, Straight, StraightContext
from benchmarks.straight_memory import runs
from lmcache_sdk.devserver import DevServer, PlayedEngine, unique_shm_name
from lmcache_sdk.facade import transfer

ENGINE = PlayedEngine(model_name="m", num_layers=2, num_kv_heads=2, head_dim=8)
SHAPE = (2, 2, 3 * content.CHUNK, 16)
SEED, CONTENT = 3, 7


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([], []),
        ([8], [(0, 1, 0)]),
        ([0, 4, 8, 12], [(0, 4, 4)]),
        ([0, 4, 8, 100, 104], [(0, 3, 4), (3, 2, 4)]),
        ([12, 8, 4], [(0, 1, 0), (1, 1, 0), (2, 1, 0)]),
        ([0, 4, 2, 3], [(0, 2, 4), (2, 2, 1)]),
    ],
)
def test_runs(offsets: Sequence[int], expected: list[tuple[int, int, int]]) -> None:
    assert list(runs(offsets)) == expected


def test_inline_messages_are_those_of_ours() -> None:
    assert (BATCH, AHEAD) == (transfer._INLINE_BATCH_NBYTES, transfer._RANGES_AHEAD)
    assert transfer._BATCHES_AHEAD == AHEAD


def connected(server: DevServer, recycle: int | None = None) -> StraightContext:
    return Straight().connect(server.url, server.http_url, ENGINE.model_name, recycle)


def use(context: StraightContext) -> None:
    kv, tokens, absent = content.make_kv(SHAPE, CONTENT), content.tokens(SEED, SHAPE[2]), content.tokens(4, SHAPE[2])
    context.expect(tokens, kv)
    context.expect(absent)
    assert context.store(kv, tokens)
    for _ in range(2):
        assert context.lookup(tokens) == SHAPE[2]
        assert content.find_wrong(context.opened(context.retrieve(tokens, None)), SHAPE, CONTENT) == ""
        assert context.retrieve(absent, None) is None
        assert context.lookup(absent) == 0


@pytest.mark.parametrize("shm_name", [unique_shm_name(), ""], ids=["shm", "inline"])
def test_stores_finds_retrieves_and_leaves_nothing(shm_name: str) -> None:
    with DevServer(models=[ENGINE], shm_name=shm_name) as server:
        before = server.held()
        context = connected(server)
        use(context)
        context.close()
        assert server.held() == before


def test_results_share_memory_unless_they_are_kept() -> None:
    with DevServer(models=[ENGINE], shm_name=unique_shm_name()) as server:
        places = {}
        for recycle in (None, 0):
            context = connected(server, recycle)
            use(context)
            tokens = content.tokens(SEED, SHAPE[2])
            context.expect(tokens)
            kept = [context.opened(context.retrieve(tokens, None)) for _ in range(2)]
            places[recycle] = len({kv.data_ptr() for kv in kept if kv is not None})
            out = torch.zeros(SHAPE, dtype=torch.bfloat16)
            assert context.retrieve(tokens, out) is out
            assert content.find_wrong(out, SHAPE, CONTENT) == ""
            context.close()
            server.evict_all()
        assert places == {None: 1, 0: 2}
