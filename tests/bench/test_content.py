"""What is stored can be told from everything that could come back instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.content import CHUNK, find_wrong, make_kv, tokens

SHAPE = (2, 3, 3 * CHUNK, 8)


def swap_chunks(kv: torch.Tensor) -> torch.Tensor:
    first, second, third = torch.split(kv, CHUNK, dim=2)
    return torch.cat([second, first, third], dim=2)


def lose_chunk(kv: torch.Tensor) -> torch.Tensor:
    return kv.index_fill(2, torch.arange(CHUNK, 2 * CHUNK), 0)


@pytest.mark.parametrize(
    "spoil",
    [swap_chunks, lose_chunk, lambda kv: kv.flip(0), lambda kv: kv.flip(1), lambda kv: kv.flip(3), lambda kv: kv + 1],
)
def test_wrong_content_is_found(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    kv = make_kv(SHAPE, seed=5)
    assert find_wrong(kv, SHAPE, seed=5) == ""
    assert find_wrong(spoil(kv), SHAPE, seed=5) != ""


def test_other_content_shape_and_nothing_are_found() -> None:
    assert find_wrong(make_kv(SHAPE, seed=6), SHAPE, seed=5) != ""
    assert find_wrong(make_kv((2, 3, CHUNK, 8), seed=5), SHAPE, seed=5) != ""
    assert find_wrong(None, SHAPE, seed=5) == "nothing came back"


def test_tokens_share_no_prefix_and_a_prefix_is_a_prefix() -> None:
    assert tokens(1, 300)[0] != tokens(2, 300)[0]
    assert tokens(1, 300)[:256] == tokens(1, 256)
    assert len(tokens(3, 1)) == 1
