"""Rows 2 and 3: what a caller may pass by mistake. Nothing of it reaches the server; a right call works after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmcache_sdk import ArgumentTypeError, LMCacheKVCacheContext, UsageError
from tests.integration.cases import CHUNK

from .conftest import everywhere
from .report import Fault
from .worlds import World, tokens_of


def store_right(fault: Fault, here: World, ctx: LMCacheKVCacheContext, tokens: list[int], seed: int) -> None:
    """A correct store of the same tokens on the same context, and what another client then reads."""
    assert here.server.held().write_locked == 0
    kv = here.values(len(tokens), seed)
    stored = ctx.store(kv, tokens)
    fault.never(bool(stored) and here.read(tokens) is None, "a store that said True is not there")
    assert stored.written_chunks == len(tokens) // CHUNK
    fault.exact(here.read(tokens), kv, "right store afterwards")


def wrong_dtypes(kv: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "float32": kv.float(),
        "float16": kv.to(torch.float16),
        "int64": kv.view(torch.int16).long(),
        "int16 bits": kv.view(torch.int16),
    }


@pytest.mark.row("2.1")
@everywhere
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int16 bits"])
def test_other_dtype(fault: Fault, here: World, dtype: str) -> None:
    tokens, seed = tokens_of(2), 1
    ctx = here.connect()
    wrong = wrong_dtypes(here.values(len(tokens), seed))[dtype]
    fault.refused(lambda: ctx.store(wrong, tokens), says="torch.bfloat16")
    store_right(fault, here, ctx, tokens, seed)


@pytest.mark.row("2.2")
@everywhere
@pytest.mark.parametrize("shape", ["layers", "hidden", "planes", "rank 5", "transposed"])
def test_other_geometry(fault: Fault, here: World, shape: str) -> None:
    tokens, seed = tokens_of(2), 2
    ctx = here.connect()
    kv = here.values(len(tokens), seed)
    wrong = {
        "layers": kv[:, :3],
        "hidden": kv[..., :32],
        "planes": torch.cat([kv, kv[:1]]),
        "rank 5": kv.view(*kv.shape[:3], 2, 32),
        "transposed": kv.transpose(1, 2),
    }[shape]
    fault.refused(lambda: ctx.store(wrong, tokens), says="[2, 4, 512, 64]")
    store_right(fault, here, ctx, tokens, seed)


@pytest.mark.row("2.3")
@everywhere
@pytest.mark.parametrize("axis", [0, 1, 3])
def test_size_one_axis(fault: Fault, here: World, axis: int) -> None:
    tokens, seed = tokens_of(2), 3
    ctx = here.connect()
    wrong = here.values(len(tokens), seed).narrow(axis, 0, 1)
    fault.refused(lambda: ctx.store(wrong, tokens), says="expected [2, 4, 512, 64]")
    store_right(fault, here, ctx, tokens, seed)


@pytest.mark.row("2.4")
def test_rank_3(fault: Fault, here: World) -> None:
    tokens = tokens_of(1)
    ctx = here.connect()
    fault.refused(lambda: ctx.store(here.values(CHUNK, 4)[0], tokens), says="expected [2, 4, 256, 64]")
    store_right(fault, here, ctx, tokens, 4)


@pytest.mark.row("2.5")
@pytest.mark.parametrize("length", [0, CHUNK, 2 * CHUNK - 1, 2 * CHUNK + 1])
def test_tokens_do_not_fit_kv(fault: Fault, here: World, length: int) -> None:
    tokens = tokens_of(3)
    ctx = here.connect()
    error = fault.refused(lambda: ctx.store(here.values(2 * CHUNK, 5), tokens[:length]), says="512 rows")
    assert f"{length} ids" in str(error)


@pytest.mark.row("2.6", "2.7")
@pytest.mark.parametrize("form", ["numpy", "int32", "torch", "list of numpy"])
def test_other_sequences_of_ints(fault: Fault, here: World, form: str) -> None:
    tokens, ctx = tokens_of(2), here.connect()
    given: Any = {
        "numpy": np.array(tokens),
        "int32": np.array(tokens, dtype=np.int32),
        "torch": torch.tensor(tokens),
        "list of numpy": list(np.array(tokens)),
    }[form]
    kv = here.values(len(tokens), 6)
    assert ctx.store(kv, given)
    fault.exact(ctx.retrieve(given), kv, form)
    fault.exact(here.read(tokens), kv, "as a list")


REFUSED_IDS = [(-1, "2.8"), (2**32, "2.8"), (2**64, "2.9")]


@pytest.mark.parametrize("wrong", [pytest.param(i, marks=pytest.mark.row(r), id=str(i)) for i, r in REFUSED_IDS])
def test_ids_out_of_range(fault: Fault, here: World, wrong: int) -> None:
    tokens, ctx = tokens_of(1), here.connect()
    tokens[7] = wrong
    for call in (ctx.lookup, ctx.retrieve, lambda t: ctx.store(here.values(CHUNK, 7), t)):
        assert isinstance(fault.refused(lambda call=call: call(tokens), says="tokens[7]"), UsageError)  # type: ignore[misc]


@pytest.mark.row("2.8")
def test_largest_and_smallest_id(fault: Fault, here: World) -> None:
    tokens, ctx = tokens_of(1), here.connect()
    tokens[-2:] = [0, 2**32 - 1]
    kv = here.values(CHUNK, 8)
    assert ctx.store(kv, tokens)
    fault.exact(ctx.retrieve(tokens), kv, "0 and 2**32-1")


@pytest.mark.row("2.10", "2.11")
@pytest.mark.parametrize("wrong", [1.0, "1", True, None, "a str", b"bytes", bytearray(512)], ids=repr)
def test_no_ids(fault: Fault, here: World, wrong: object) -> None:
    ctx = here.connect()
    whole = isinstance(wrong, bytes | bytearray) or wrong == "a str"
    tokens: Any = wrong if whole else [*tokens_of(1)[:-1], wrong]
    for call in (ctx.lookup, ctx.retrieve, lambda t: ctx.store(here.values(CHUNK, 9), t)):
        error = fault.refused(lambda call=call: call(tokens), says="tokens")  # type: ignore[misc]
        assert isinstance(error, ArgumentTypeError)


@pytest.mark.parametrize(
    ("salt", "says"),
    [
        *(pytest.param(salt, "cache_salt", marks=pytest.mark.row("2.12"), id=salt[:4]) for salt in ("a/b", 129 * "x")),
        *(pytest.param(salt, "expected a str", marks=pytest.mark.row("2.13"), id=str(salt)) for salt in (None, 7)),
    ],
)
def test_salt_that_is_refused(fault: Fault, here: World, salt: Any, says: str) -> None:
    tokens, ctx = tokens_of(1), here.connect()
    fault.refused(lambda: ctx.retrieve(tokens, salt), says=says)
    fault.refused(lambda: ctx.store(here.values(CHUNK, 10), tokens, salt), says=says)


@pytest.mark.row("2.14")
def test_other_salt(fault: Fault, here: World) -> None:
    tokens, ctx = tokens_of(2), here.connect()
    kv = here.values(len(tokens), 11)
    assert ctx.store(kv, tokens, "one")
    fault.never(ctx.retrieve(tokens, "two") is not None, "another salt's data")
    fault.never(ctx.retrieve(tokens) is not None, "a salt's data without the salt")
    fault.exact(ctx.retrieve(tokens, "one"), kv)


@pytest.mark.row("2.15")
@pytest.mark.parametrize("form", ["special", "not contiguous", "strided", "grad", "stride 0", "unicode salt"])
def test_unusual_and_right(fault: Fault, here: World, form: str) -> None:
    tokens, ctx = tokens_of(2), here.connect()
    kv = here.values(len(tokens), 12)
    if form == "special":
        assert kv.isnan().any() and kv.isinf().any()
    given = {
        "not contiguous": kv.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "strided": torch.stack([kv, kv], dim=-1).flatten(3)[..., ::2],
        "grad": kv.clone().requires_grad_(),
        "stride 0": kv[:, :, :, :1].expand(kv.shape),
    }.get(form, kv)
    salt = "ünïcode ☃" if form == "unicode salt" else ""
    assert ctx.store(given, tokens, salt)
    fault.exact(ctx.retrieve(tokens, salt), given.detach().contiguous(), form)


@pytest.mark.row("2.16")
@pytest.mark.parametrize("form", ["numpy", "None", "meta"])
def test_no_tensor(fault: Fault, here: World, form: str) -> None:
    tokens, ctx = tokens_of(1), here.connect()
    kv = here.values(CHUNK, 13)
    wrong: Any = {"numpy": kv.float().numpy(), "None": None, "meta": kv.to("meta")}[form]
    assert isinstance(fault.refused(lambda: ctx.store(wrong, tokens), says="kv"), ArgumentTypeError)


@pytest.mark.row("3.1")
@pytest.mark.parametrize("length", [0, 1, CHUNK - 1])
def test_less_than_one_chunk(fault: Fault, here: World, length: int) -> None:
    tokens, ctx = tokens_of(1)[:length], here.connect()
    stored = ctx.store(here.values(length, 14), tokens)
    fault.never(bool(stored), "nothing was stored, and the answer is True")
    assert (stored.written_chunks, stored.missing_chunks, stored.tail_tokens) == (0, 0, length)
    assert "no whole chunk" in stored.reason
    assert ctx.retrieve(tokens) is None
    fault.saw("False, with the reason")


@pytest.mark.row("3.2")
@pytest.mark.parametrize("length", [CHUNK + 1, 2 * CHUNK - 1, 700])
def test_tail(fault: Fault, here: World, length: int) -> None:
    tokens, ctx = tokens_of(3)[:length], here.connect()
    kv, whole = here.values(length, 15), length // CHUNK * CHUNK
    stored = ctx.store(kv, tokens)
    assert stored and stored.written_chunks == whole // CHUNK and stored.tail_tokens == length - whole
    found = ctx.lookup(tokens)
    assert (found.hit_tokens, found.total_tokens, found.tail_tokens) == (whole, length, length - whole)
    fault.exact(ctx.retrieve(tokens), kv[:, :, :whole].contiguous(), "the aligned prefix")


@pytest.mark.row("3.3")
def test_nothing_is_aliased(fault: Fault, here: World) -> None:
    tokens, ctx = tokens_of(2), here.connect()
    kv = here.values(len(tokens), 16)
    given = kv.clone()
    assert ctx.store(given, tokens)
    given.zero_()
    found = ctx.retrieve(tokens)
    fault.exact(found, kv, "after kv changed")
    assert found is not None
    found.zero_()
    fault.exact(ctx.retrieve(tokens), kv, "after the result changed")
